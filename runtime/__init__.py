"""PACK -> TOKENS: tokenizer, model families, kernels, expert store and cache, engine."""

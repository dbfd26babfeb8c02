"""Llama and Mixtral (GGUF calls both "llama"): RMSNorm, GQA, SwiGLU or eight experts of it.

llama.cpp's converter permutes the rows of q and k so that rotated pairs are neighbours; safetensors keep
HF's halves. Both give the same products, so only the pairing of the rotation differs.
"""

from runtime.families.family import Family

FAMILY = Family(architectures=("llama",), gguf_rope="interleaved")

"""The logits of a greedy run, for tests that compare two runs bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from runtime.engine import Engine

PROMPT = "Once upon a time there was a little rabbit who lived in a hollow tree."


def greedy_logits(engine: Engine, num_tokens: int) -> torch.Tensor:
    """Logits float32 [n, vocab] of every position of a prompt and of so many tokens that the model chooses."""
    kv = engine.new_kv()
    rows = [engine.forward(engine.tokenizer.encode(PROMPT), kv, all_logits=True)]
    for _ in range(num_tokens):
        rows.append(engine.forward([int(rows[-1][-1].argmax())], kv))
    return torch.cat(rows)

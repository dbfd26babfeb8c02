"""Perplexity as llama.cpp's tool computes it, so that the two numbers can be compared."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lmpack.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from runtime.engine import Engine

MIN_CONTEXT = 3  # the second half of a chunk must hold a token and the one that follows it
_LOGIT_ROWS = 64  # logits of this many positions exist at once


@dataclass(frozen=True, slots=True)
class Perplexity:
    """exp of the mean negative log-probability, its standard error, and over how many tokens."""

    perplexity: float
    standard_error: float
    num_tokens: int
    num_chunks: int
    context_length: int


def measure_perplexity(
    engine: Engine,
    token_ids: Sequence[int],
    context_length: int,
    *,
    num_chunks: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Perplexity:
    """Score `token_ids` in chunks of `context_length`, of each chunk the second half.

    A chunk's first token is replaced by the start token where the model asks for one, as llama.cpp's
    llama-perplexity does. Raises UsageError when the text is shorter than one chunk.
    """
    if context_length < MIN_CONTEXT:
        raise UsageError(f"a context of {context_length} tokens scores nothing; use {MIN_CONTEXT} or more")
    available = len(token_ids) // context_length
    if available == 0:
        raise UsageError(
            f"{len(token_ids)} tokens are less than one chunk of {context_length}; "
            f"give a longer text or a smaller --context"
        )
    chunks = min(available, num_chunks or available)
    losses = []
    for chunk in range(chunks):
        ids = list(token_ids[chunk * context_length : (chunk + 1) * context_length])
        if engine.tokenizer.adds_bos:
            assert engine.tokenizer.bos_id is not None
            ids[0] = engine.tokenizer.bos_id
        losses.append(_losses(engine, ids, context_length // 2))
        if progress is not None:
            progress(1)
    loss = torch.cat(losses)
    mean, count = float(loss.mean()), len(loss)
    error = float(loss.std() / math.sqrt(count - 1)) if count > 1 else math.inf
    value = math.exp(mean)
    return Perplexity(value, value * error, count, chunks, context_length)


def _losses(engine: Engine, token_ids: Sequence[int], first: int) -> torch.Tensor:
    """Negative log-probabilities float64 of token_ids[first + 1:], each given all before it."""
    hidden = engine.hidden(token_ids, engine.new_kv())[first:-1]
    targets = torch.tensor(token_ids[first + 1 :], device=hidden.device)
    rows = []
    with torch.inference_mode():
        for start in range(0, len(targets), _LOGIT_ROWS):
            part = slice(start, start + _LOGIT_ROWS)
            logprobs = engine.logits(hidden[part]).log_softmax(-1)
            rows.append(-logprobs.gather(1, targets[part, None]).squeeze(1).double())
    return torch.cat(rows)

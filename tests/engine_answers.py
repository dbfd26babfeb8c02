"""What our engine says where a reference was asked: all logits of a text, greedy continuations, choices of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from runtime.sampler import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from runtime.engine import Engine


def split_windows(token_ids: Sequence[int], num_positions: int, window: int) -> list[Sequence[int]]:
    """Windows of `window` tokens, spread evenly over a text, that have `num_positions` tokens together."""
    count = -(-num_positions // window)
    assert count * window <= len(token_ids), f"{len(token_ids)} tokens are too few for {count} x {window}"
    last_start = len(token_ids) - window
    starts = [last_start * index // max(count - 1, 1) for index in range(count)]
    return [token_ids[start : start + window] for start in starts]


def score_windows(engine: Engine, windows: Sequence[Sequence[int]]) -> NDArray[np.float32]:
    """Logits [num_positions, vocab] after each token of each window, each window a text of its own."""
    rows = [engine.forward(window, engine.new_kv(), all_logits=True).numpy().copy() for window in windows]
    return np.concatenate(rows)


def continue_greedily(engine: Engine, prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
    """The engine's greedy continuation, through end tokens too."""
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    return [token.token_id for token in engine.generate(prompt_ids, params)]

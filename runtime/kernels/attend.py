"""Scaled dot-product attention by torch: the reference, and the faster way for many queries at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.step import Step

SCORES_NBYTES = 4 << 20
"""Queries are taken in blocks whose scores fill no more than this; four copies of them are alive at once."""


def attend(q: Tensor, k: Tensor, v: Tensor, layer: int, step: Step) -> Tensor:
    """Append to the step's KV cache and attend: see Operations.attend."""
    keys, values = step.kv.append(layer, k, v)
    return attend_to(q, keys, values, step.sliding_window)


def attend_to(q: Tensor, keys: Tensor, values: Tensor, sliding_window: int | None) -> Tensor:
    """Causal attention of the last n positions over all of them.

    q float32 [n, heads, head_dim]; keys [kv_heads, tokens, head_dim] and values [kv_heads, head_dim, tokens] in the
    cache's dtype, the last n of them the queries' own -> float32 [n, heads * head_dim]. As in ggml, what is multiplied
    with the cache is rounded to its dtype, and sums are float32.
    """
    n, num_heads, head_dim = q.shape
    kv_heads, num_tokens, _ = keys.shape
    dtype = keys.dtype
    keys, values = keys.float().transpose(1, 2), values.float().transpose(1, 2)
    # [kv_heads, group, n, head_dim]
    grouped = q.to(dtype).float().view(n, kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    mixed = q.new_empty(n, kv_heads, num_heads // kv_heads, head_dim)
    rows = max(1, SCORES_NBYTES // (4 * num_heads * num_tokens))
    for first in range(0, n, rows):
        block = grouped[:, :, first : first + rows]
        position = num_tokens - n + first  # of the block's first query
        stop = position + block.shape[2]
        start = 0 if sliding_window is None else max(0, position - sliding_window + 1)
        flat = block.reshape(kv_heads, -1, head_dim)
        scores = torch.matmul(flat, keys[:, :, start:stop]).mul_(head_dim**-0.5)
        scores = scores.view(*block.shape[:3], stop - start).add_(
            _unseen(position, start, stop, sliding_window, q.device)
        )
        weights = scores.softmax(-1).to(dtype).float().view(kv_heads, -1, stop - start)
        outputs = torch.matmul(weights, values[:, start:stop]).view(block.shape)
        mixed[first : first + rows] = outputs.permute(2, 0, 1, 3)
    return mixed.view(n, -1)


def _unseen(position: int, start: int, stop: int, sliding_window: int | None, device: torch.device) -> Tensor:
    """-inf where the query of a row, from `position`, may not see the token of a column, `start` to `stop`; else 0."""
    queries = torch.arange(position, stop, device=device)[:, None]
    tokens = torch.arange(start, stop, device=device)
    unseen = tokens > queries
    if sliding_window is not None:
        unseen |= tokens <= queries - sliding_window
    return torch.zeros(unseen.shape, device=device).masked_fill_(unseen, -torch.inf)

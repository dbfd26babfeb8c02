"""Scaled dot-product attention in float32 by torch: the reference, and the faster way for many queries at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.step import Step


def attend(q: Tensor, k: Tensor, v: Tensor, layer: int, step: Step) -> Tensor:
    """Append to the step's KV cache and attend, in float32 by torch: see Operations.attend."""
    keys, values = step.kv.append(layer, k, v)
    return attend_to(q, keys, values, step.sliding_window)


def attend_to(q: Tensor, keys: Tensor, values: Tensor, sliding_window: int | None) -> Tensor:
    """Causal attention of the last n positions over all of them.

    q float32 [n, heads, head_dim]; keys [kv_heads, tokens, head_dim] and values [kv_heads, head_dim, tokens] in the
    cache's dtype, the last n of them the queries' own -> float32 [n, heads * head_dim].
    """
    n, num_heads, head_dim = q.shape
    kv_heads, num_tokens, _ = keys.shape
    if n == 1:
        grouped = q.view(kv_heads, num_heads // kv_heads, head_dim)
        scores = torch.matmul(grouped * head_dim**-0.5, keys.float().transpose(1, 2))
        if sliding_window is not None and num_tokens > sliding_window:
            scores[..., : num_tokens - sliding_window] = -torch.inf
        return torch.matmul(scores.softmax(-1), values.float().transpose(1, 2)).reshape(1, -1)
    whole = n == num_tokens and (
        sliding_window is None or n <= sliding_window
    )  # no need to look masked pairs up
    mixed = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        keys.float()[None],
        values.float().transpose(1, 2)[None],
        attn_mask=None if whole else _causal_mask(n, num_tokens, sliding_window, q.device),
        is_causal=whole,
        enable_gqa=True,
    )
    return mixed[0].transpose(0, 1).reshape(n, -1)


def _causal_mask(n: int, num_tokens: int, sliding_window: int | None, device: torch.device) -> Tensor:
    """True where query i (at position num_tokens - n + i) may look: [n, num_tokens]."""
    mask = torch.ones(n, num_tokens, dtype=torch.bool, device=device).tril(num_tokens - n)
    if sliding_window is not None:
        mask = mask.triu(num_tokens - n - sliding_window + 1)
    return mask

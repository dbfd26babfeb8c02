"""Grouped-query attention with rotary positions over the KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.kernels.kernels import Kernels
    from runtime.kernels.rms_norm import RMSNorm
    from runtime.kernels.weight import Weight
    from runtime.kv_cache import KVCache
    from runtime.model_config import ModelConfig
    from runtime.rope import Rope


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """One layer's projections; a norm or bias that the family does not have is None."""

    norm: RMSNorm  # of the layer's input
    q: Weight  # [num_attention_heads * head_dim, hidden]
    k: Weight  # [num_key_value_heads * head_dim, hidden]
    v: Weight
    output: Weight  # [hidden, num_attention_heads * head_dim]
    q_bias: Tensor | None
    k_bias: Tensor | None
    v_bias: Tensor | None
    output_bias: Tensor | None
    q_norm: Tensor | None  # [head_dim], or [num_attention_heads * head_dim] when it spans the projection
    k_norm: Tensor | None


class Attention:
    """softmax(q k^T / sqrt(head_dim)) v (Vaswani et al. 2017, eq. 1), query heads sharing key heads."""

    def __init__(self, layer: int, config: ModelConfig, weights: AttentionWeights, kernels: Kernels) -> None:
        self.layer = layer
        self.config = config
        self.weights = weights
        self.kernels = kernels

    def __call__(self, x: Tensor, kv: KVCache, rope: Rope) -> Tensor:
        """[n, hidden] of the tokens that follow the cache's -> [n, hidden]."""
        weights, config = self.weights, self.config
        q, k, v = self.kernels.linear(x, (weights.q, weights.k, weights.v), weights.norm)
        q = self._heads(_plus(q, weights.q_bias), weights.q_norm)
        k = self._heads(_plus(k, weights.k_bias), weights.k_norm)
        heads = rope(torch.cat((q, k), 1), kv.num_tokens)
        q, k = heads[:, : config.num_attention_heads], heads[:, config.num_attention_heads :]
        v = _plus(v, weights.v_bias).view(len(x), -1, config.head_dim)
        keys, values = kv.append(self.layer, k, v)
        mixed = attend(q, keys, values, config.sliding_window)
        (out,) = self.kernels.linear(mixed, (weights.output,))
        return _plus(out, weights.output_bias)

    def _heads(self, x: Tensor, norm: Tensor | None) -> Tensor:
        """Split [n, heads * head_dim] into heads, normalised over whatever the norm's weight spans."""
        head_dim, eps = self.config.head_dim, self.config.rms_norm_eps
        if norm is not None and norm.shape[0] != head_dim:
            x = F.rms_norm(x, norm.shape, norm, eps)
        x = x.view(len(x), -1, head_dim)
        if norm is not None and norm.shape[0] == head_dim:
            x = F.rms_norm(x, norm.shape, norm, eps)
        return x


def attend(q: Tensor, keys: Tensor, values: Tensor, sliding_window: int | None) -> Tensor:
    """Causal attention of the last n positions over all of them.

    q float32 [n, heads, head_dim]; keys, values in the cache's dtype [kv_heads, num_tokens, head_dim], the last n of them
    the queries' own -> float32 [n, heads * head_dim].
    """
    n, num_heads, head_dim = q.shape
    kv_heads, num_tokens, _ = keys.shape
    grouped = q.view(n, kv_heads, num_heads // kv_heads, head_dim)
    if n == 1:
        scores = torch.matmul(grouped[0] * head_dim**-0.5, keys.float().transpose(1, 2))
        if sliding_window is not None and num_tokens > sliding_window:
            scores[..., : num_tokens - sliding_window] = -torch.inf
        return torch.matmul(scores.softmax(-1), values.float()).reshape(1, -1)
    mixed = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        keys.float()[None],
        values.float()[None],
        attn_mask=_causal_mask(n, num_tokens, sliding_window, q.device),
        enable_gqa=True,
    )
    return mixed[0].transpose(0, 1).reshape(n, -1)


def _causal_mask(n: int, num_tokens: int, sliding_window: int | None, device: torch.device) -> Tensor:
    """True where query i (at position num_tokens - n + i) may look: [n, num_tokens]."""
    mask = torch.ones(n, num_tokens, dtype=torch.bool, device=device).tril(num_tokens - n)
    if sliding_window is not None:
        mask = mask.triu(num_tokens - n - sliding_window + 1)
    return mask


def _plus(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias

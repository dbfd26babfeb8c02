"""The keys and values of the tokens seen so far."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lmpack.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from runtime.model_config import ModelConfig

KV_DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}


class KVCache:
    """Room for `context_length` tokens of keys and values, and the ids of those it holds."""

    def __init__(
        self, config: ModelConfig, context_length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (config.num_hidden_layers, config.num_key_value_heads, context_length, config.head_dim)
        self.keys = torch.empty(shape, dtype=dtype, device=device)  # memory is touched as tokens come
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.context_length = context_length
        self.token_ids: list[int] = []

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def require(self, num_tokens: int) -> None:
        """UsageError unless `num_tokens` more fit."""
        total = self.num_tokens + num_tokens
        if total > self.context_length:
            raise UsageError(
                f"{total} tokens do not fit a context of {self.context_length}; "
                f"use a longer --context or a shorter prompt"
            )

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store [n, kv_heads, head_dim] behind the tokens seen; views [kv_heads, num_tokens + n, head_dim]."""
        start, stop = self.num_tokens, self.num_tokens + keys.shape[0]
        self.keys[layer, :, start:stop] = keys.transpose(0, 1)
        self.values[layer, :, start:stop] = values.transpose(0, 1)
        return self.keys[layer, :, :stop], self.values[layer, :, :stop]

    def advance(self, token_ids: Sequence[int]) -> None:
        """The tokens appended to every layer are now part of the past."""
        self.token_ids.extend(token_ids)

    def keep_prefix(self, token_ids: Sequence[int]) -> int:
        """Forget all behind the longest common prefix with `token_ids`; its length in tokens."""
        common = 0
        for ours, theirs in zip(self.token_ids, token_ids, strict=False):
            if ours != theirs:
                break
            common += 1
        del self.token_ids[common:]
        return common


def kv_nbytes(config: ModelConfig, context_length: int, dtype: torch.dtype) -> int:
    """Bytes that a KVCache of this length takes when it is full."""
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return per_token * context_length * dtype.itemsize

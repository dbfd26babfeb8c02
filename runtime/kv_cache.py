"""The keys and values of the tokens seen so far."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lmpack.alignment import align_up
from lmpack.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from runtime.model_config import ModelConfig

KV_DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
_CAPACITY_STEP = 32  # tokens; rows of values start at a cache line


class KVCache:
    """Room for `context_length` tokens of keys and values, and the ids of those it holds.

    Zeros lie behind the tokens held, so that products may run over them and mask the results.
    """

    def __init__(
        self, config: ModelConfig, context_length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.context_length = context_length
        self.longest_context = config.max_position_embeddings
        self.capacity = align_up(context_length, _CAPACITY_STEP)
        self.num_grouped_heads = config.num_attention_heads // config.num_key_value_heads
        layers, heads = config.num_hidden_layers, config.num_key_value_heads
        # A token's key is a row and its value a column: sums over tokens read rows.
        # The system gives zeros without touching memory before tokens come.
        self.keys = torch.zeros(layers, heads, self.capacity, config.head_dim, dtype=dtype, device=device)
        self.values = torch.zeros(layers, heads, config.head_dim, self.capacity, dtype=dtype, device=device)
        self.token_ids: list[int] = []

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def require(self, num_tokens: int) -> None:
        """UsageError unless `num_tokens` more fit."""
        check_fit(self.num_tokens + num_tokens, self.context_length, self.longest_context)

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store [n, kv_heads, head_dim] of both behind the tokens seen.

        Views of all there is now: keys [kv_heads, tokens, head_dim], values [kv_heads, head_dim, tokens].
        """
        start, stop = self.num_tokens, self.num_tokens + keys.shape[0]
        self.keys[layer, :, start:stop] = keys.transpose(0, 1)
        self.values[layer, :, :, start:stop] = values.permute(1, 2, 0)
        return self.keys[layer, :, :stop], self.values[layer, :, :, :stop]

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


def check_fit(num_tokens: int, context_length: int, longest_context: int) -> None:
    """UsageError unless a context of this length holds so many tokens; a longer one helps up to the model's longest."""
    if num_tokens > context_length:
        advice = f"use --context {num_tokens} or more, or a shorter prompt"
        if num_tokens > longest_context:
            advice = f"use a shorter prompt: this model's longest context is {longest_context}"
        raise UsageError(f"{num_tokens} tokens do not fit a context of {context_length}; {advice}")


def kv_nbytes(config: ModelConfig, context_length: int, dtype: torch.dtype) -> int:
    """Bytes that a KVCache of this length takes when it is full."""
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return per_token * align_up(context_length, _CAPACITY_STEP) * dtype.itemsize

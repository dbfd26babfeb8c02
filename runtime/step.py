"""One forward pass: how many tokens, and which past they follow."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.kv_cache import KVCache

_ATTENDED_STEP = 128  # tokens; a recorded program serves until its length is passed


class Step:
    """`num_tokens` tokens that follow those of `kv`, with what attention needs to know of their positions."""

    def __init__(self, kv: KVCache, num_tokens: int, sliding_window: int | None) -> None:
        self.kv = kv
        self.num_tokens = num_tokens
        self.sliding_window = sliding_window
        self.start = kv.num_tokens
        self.stop = self.start + num_tokens

    @property
    def attended(self) -> int:
        """Length in tokens of the masked past that a single token looks at: not less than `stop`."""
        return min(-(-self.stop // _ATTENDED_STEP) * _ATTENDED_STEP, self.kv.capacity)

    @cached_property
    def positions(self) -> Tensor:
        """int32 [num_tokens]."""
        return torch.arange(self.start, self.stop, dtype=torch.int32)

    @cached_property
    def visible(self) -> Tensor:
        """What the last token's scores get added: float32 [heads per key head, attended] of 0 and -inf."""
        row = torch.zeros(self.kv.num_grouped_heads, self.attended)
        row[:, self.stop :] = -torch.inf
        if self.sliding_window is not None and self.stop > self.sliding_window:
            row[:, : self.stop - self.sliding_window] = -torch.inf
        return row

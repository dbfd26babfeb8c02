"""Rotary position embedding: a frequency for each pair of elements, and the angles that torch takes from a table."""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from lmpack.errors import UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.model_config import ModelConfig, RopeScaling


class Rope:
    """Rotates heads [n, num_heads, head_dim] by their positions (Su et al. 2021, RoFormer, eq. 34).

    Elements i and i + rope_dim / 2 form a pair, as in HF's models and GPT-NeoX; its frequency is
    theta^(-2i / rope_dim) / factors[i].
    """

    def __init__(
        self,
        config: ModelConfig,
        num_positions: int,
        frequency_factors: Tensor | None,
        device: torch.device,
    ) -> None:
        self.rope_dim = config.rope_dim
        self.theta = config.rope_theta
        frequencies = _frequencies(config)
        if frequency_factors is None:
            frequency_factors = _factors(frequencies, config.rope_scaling)
        self.factors = frequency_factors.contiguous()  # float32 [rope_dim / 2]
        self._frequencies = frequencies / self.factors.cpu()
        self._num_positions = num_positions
        self._device = device

    @cached_property
    def _table(self) -> tuple[Tensor, Tensor]:
        """Cosines, and sines with the sign of each half: [num_positions, rope_dim]; ggml does without."""
        angles = torch.outer(torch.arange(self._num_positions, dtype=torch.float32), self._frequencies)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), -1).to(self._device), torch.cat((-sin, sin), -1).to(self._device)

    def __call__(self, heads: Tensor, start: int) -> Tensor:
        """Rotate [n, num_heads, head_dim] whose first row is at position `start`."""
        stop = start + heads.shape[0]
        cos, sin = (angles[start:stop, None] for angles in self._table)
        rotated = heads if self.rope_dim == heads.shape[-1] else heads[..., : self.rope_dim]
        partners = rotated.roll(self.rope_dim // 2, -1)
        rotated = torch.addcmul(rotated * cos, partners, sin)
        if self.rope_dim == heads.shape[-1]:
            return rotated
        return torch.cat((rotated, heads[..., self.rope_dim :]), -1)


def _frequencies(config: ModelConfig) -> Tensor:
    exponents = torch.arange(0, config.rope_dim, 2, dtype=torch.float32) / config.rope_dim
    return 1.0 / config.rope_theta**exponents


def _factors(frequencies: Tensor, scaling: RopeScaling | None) -> Tensor:
    if scaling is None:
        return torch.ones_like(frequencies)
    if scaling.kind == "linear":
        return torch.full_like(frequencies, scaling.factor)
    if scaling.kind == "llama3":
        return _llama3_factors(frequencies, scaling)
    raise UnsupportedError(f"rope scaling {scaling.kind!r} is not supported yet; known: linear, llama3")


def _llama3_factors(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1's rule: long waves are stretched, short ones kept, those between are blended."""
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_position_embeddings / wavelengths
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return 1 / (kept + (1 - kept) / scaling.factor)

"""Rotary position embedding: a table of angles, applied to query and key heads."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import torch

from lmpack.errors import UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.model_config import ModelConfig, RopeScaling

Pairing = Literal["half", "interleaved"]


class Rope:
    """Rotates heads [n, num_heads, head_dim] by their positions (Su et al. 2021, RoFormer, eq. 34).

    `pairing` says which two elements form a pair: "half" (i, i + d/2), as HF and GPT-NeoX have it, or
    "interleaved" (2i, 2i + 1), the order in which llama-family GGUFs store q and k rows.
    """

    def __init__(
        self,
        config: ModelConfig,
        pairing: Pairing,
        num_positions: int,
        frequency_factors: Tensor | None,
        device: torch.device,
    ) -> None:
        self.rope_dim = config.rope_dim
        self.pairing = pairing
        frequencies = _frequencies(config, frequency_factors)
        angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
        cos, sin = angles.cos(), angles.sin()
        if pairing == "half":
            cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        else:
            cos = cos.repeat_interleave(2, -1)
            sin = torch.stack((-sin, sin), -1).flatten(-2)
        self.cos = cos.to(device)  # [num_positions, rope_dim]
        self.sin = sin.to(device)  # [num_positions, rope_dim], the first of each pair negated

    def __call__(self, heads: Tensor, start: int) -> Tensor:
        """Rotate [n, num_heads, head_dim] whose first row is at position `start`."""
        stop = start + heads.shape[0]
        cos, sin = self.cos[start:stop, None], self.sin[start:stop, None]
        if self.rope_dim == heads.shape[-1]:
            return torch.addcmul(heads * cos, self._partners(heads), sin)
        rotated, rest = heads[..., : self.rope_dim], heads[..., self.rope_dim :]
        return torch.cat((torch.addcmul(rotated * cos, self._partners(rotated), sin), rest), -1)

    def _partners(self, heads: Tensor) -> Tensor:
        if self.pairing == "half":
            return heads.roll(self.rope_dim // 2, -1)
        return heads.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


def _frequencies(config: ModelConfig, factors: Tensor | None) -> Tensor:
    exponents = torch.arange(0, config.rope_dim, 2, dtype=torch.float32) / config.rope_dim
    frequencies = 1.0 / config.rope_theta**exponents
    if factors is not None:
        return frequencies / factors
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        return _llama3_frequencies(frequencies, scaling)
    raise UnsupportedError(f"rope scaling {scaling.kind!r} is not supported yet; known: linear, llama3")


def _llama3_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1's rule: long waves are stretched, short ones kept, those between are blended."""
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_position_embeddings / wavelengths
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)

"""Routing shape: which layers of a model route, among how many experts, and how many each token takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lmpack.errors import ProfileError, UnsupportedError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from lmpack.manifest import Manifest

MAX_LAYERS = 4096
MAX_EXPERTS = 2**15
"""Expert numbers fit int16; the largest models of 2025 have 512 a layer."""
MAX_TOP_K = 1024


@dataclass(frozen=True, slots=True)
class RoutingShape:
    """The MoE layers in the order they run; raises ProfileError when the numbers cannot mean a model."""

    layers: tuple[int, ...]  # layer numbers, ascending; dense layers are left out
    num_experts: tuple[int, ...]  # of each of these layers: they differ in pruned models
    top_k: int  # experts per token, the same in every layer

    def __post_init__(self) -> None:
        """Check the bounds that arrays are sized by."""
        if not 1 <= len(self.layers) <= MAX_LAYERS or list(self.layers) != sorted(set(self.layers)):
            raise ProfileError(f"layers: expected 1 to {MAX_LAYERS} ascending layer numbers")
        if self.layers[0] < 0:
            raise ProfileError(f"layers: expected numbers from 0, got {self.layers[0]}")
        if len(self.num_experts) != len(self.layers):
            raise ProfileError(
                f"num_experts: expected {len(self.layers)} numbers, one per layer, got {len(self.num_experts)}"
            )
        if not 1 <= self.top_k <= MAX_TOP_K:
            raise ProfileError(f"top_k: expected 1 to {MAX_TOP_K}, got {self.top_k}")
        for layer, num_experts in zip(self.layers, self.num_experts, strict=True):
            if not self.top_k <= num_experts <= MAX_EXPERTS:
                raise ProfileError(
                    f"num_experts: layer {layer} has {num_experts}, expected {self.top_k} (top_k) to {MAX_EXPERTS}"
                )

    @classmethod
    def of_manifest(cls, manifest: Manifest) -> RoutingShape:
        """The shape of a pack's model; raises UnsupportedError for a dense one."""
        if not manifest.layers:
            raise UnsupportedError(
                f"this {manifest.architecture} model is dense: no layer routes, so there is nothing to profile"
            )
        top_k = manifest.config.get("num_experts_per_tok")
        if type(top_k) is not int:
            raise UnsupportedError(
                f"the pack's config has num_experts_per_tok {top_k!r}; only one number for all layers is supported"
            )
        return cls(
            tuple(entry.layer for entry in manifest.layers),
            tuple(entry.num_experts for entry in manifest.layers),
            top_k,
        )

    @property
    def num_layers(self) -> int:
        """How many layers route."""
        return len(self.layers)

    @property
    def widest(self) -> int:
        """Experts of the layer that has most: the length of padded arrays."""
        return max(self.num_experts)

    def padding(self) -> NDArray[np.bool_]:
        """True where a cell of a [num_layers, widest] array stands for no expert."""
        return np.arange(self.widest)[None, :] >= np.array(self.num_experts)[:, None]

    def differences(self, other: RoutingShape) -> list[str]:
        """What differs from another shape, in words; empty when they are equal."""
        return [
            f"{name} {_shown(mine)} and {_shown(theirs)}"
            for name, mine, theirs in (
                ("layers", self.layers, other.layers),
                ("num_experts", self.num_experts, other.num_experts),
                ("top_k", self.top_k, other.top_k),
            )
            if mine != theirs
        ]


def _shown(value: int | tuple[int, ...]) -> str:
    if isinstance(value, int):
        return str(value)
    if len(set(value)) == 1:
        return f"{len(value)} x {value[0]}"
    shown = ", ".join(str(number) for number in value[:8])
    return f"[{shown}{', ...' if len(value) > 8 else ''}] ({len(value)})"

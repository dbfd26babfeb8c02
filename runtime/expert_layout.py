"""Layers whose experts look alike, so that they can share slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmpack.manifest import ExpertPart, Manifest


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """One arrangement of parts in an expert file, and the layers that have it."""

    parts: tuple[ExpertPart, ...]
    stride: int  # bytes of a slot
    layers: tuple[int, ...]
    num_experts: int  # of all those layers together

    @property
    def nbytes(self) -> int:
        """What all experts of this layout take."""
        return self.num_experts * self.stride


def expert_layouts(manifest: Manifest) -> tuple[ExpertLayout, ...]:
    """The layouts of a pack in the order of their first layers; none for a dense model."""
    groups: dict[tuple[tuple[ExpertPart, ...], int], list[int]] = {}
    for entry in manifest.layers:
        groups.setdefault((entry.parts, entry.stride), []).append(entry.layer)
    return tuple(
        ExpertLayout(parts, stride, tuple(layers), sum(manifest.layer(layer).num_experts for layer in layers))
        for (parts, stride), layers in groups.items()
    )

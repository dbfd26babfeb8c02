"""Memory on the compute device that holds experts, one per slot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from lmpack.manifest import ExpertPart


@dataclass(frozen=True, slots=True, eq=False)
class ExpertBank:
    """Slots of one expert layout, a stride apart; who fills them is the store's affair."""

    storage: torch.Tensor  # uint8, one-dimensional, num_slots * stride bytes
    stride: int
    num_slots: int
    parts: tuple[ExpertPart, ...]

"""Slot pool: the places that the experts of some layers share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lmpack.expert_key import ExpertKey


@dataclass(frozen=True, slots=True)
class SlotPool:
    """So many experts of these layers can be resident at once, each in a slot that fits any of them."""

    num_slots: int
    layers: tuple[int, ...]  # in the order in which a token passes through them

    def first_that_fit(self, keys: Iterable[ExpertKey]) -> list[ExpertKey]:
        """The first of these experts that belong here, as many as there are slots."""
        return [key for key in keys if key.layer in self.layers][: self.num_slots]

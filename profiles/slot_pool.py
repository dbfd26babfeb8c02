"""Slot pool: the places that the experts of some layers share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SlotPool:
    """So many experts of these layers can be resident at once, each in a slot that fits any of them."""

    num_slots: int
    layers: tuple[int, ...]  # in the order in which a token passes through them

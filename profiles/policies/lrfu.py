"""LRFU: LFU whose counts halve with time and outlive an expert's stay.

LRFU of Lee et al., "LRFU: A Spectrum of Policies that Subsumes the Least Recently Used and Least Frequently Used
Policies", IEEE Transactions on Computers 50 (2001), with a ghost history: a use counts (1/2)^(age / half-life), and
the count of an expert that left is there when it comes back.
"""

from __future__ import annotations

from math import log2
from typing import TYPE_CHECKING

from profiles.policies.priority_order import PriorityOrder

if TYPE_CHECKING:
    from collections.abc import Container

    from lmpack.expert_key import ExpertKey


class LRFU:
    """Keeps residents in the order of their decayed uses, whether these came while resident or before."""

    name = "lrfu"

    def __init__(self, half_life: float) -> None:
        """`half_life` in touches."""
        # log2 of the count + now: what it will be after any decay differs by the same for all, so order is kept
        self._scores: dict[ExpertKey, float] = {}
        self._order = PriorityOrder(self._scores)
        self._residents = self._order.residents
        self._now = 0.0  # half-lives since the start
        self._step = 1 / half_life

    def __len__(self) -> int:
        return len(self._residents)

    def touch(self, key: ExpertKey) -> None:
        """Add one to the decayed count."""
        self._now = now = self._now + self._step
        score = self._scores.get(key)
        self._scores[key] = now if score is None else now + log2(1 + 2 ** (score - now))
        if key not in self._residents:
            self._order.add(key)

    def victim(self, newcomer: ExpertKey, protected: Container[ExpertKey]) -> ExpertKey:
        """Name the one of the lowest count."""
        return self._order.lowest(protected)

    def forget(self, key: ExpertKey) -> None:
        """Drop the expert from the order; its count stays."""
        self._order.remove(key)

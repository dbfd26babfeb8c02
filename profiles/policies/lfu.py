"""LFU: the least frequently used expert goes first, among equals the longest unused; a leaver's count is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from profiles.policies.priority_order import PriorityOrder

if TYPE_CHECKING:
    from collections.abc import Container

    from lmpack.expert_key import ExpertKey

_ONE_USE = 1 << 48  # more than there are touches, so that a count outweighs any age


class LFU:
    """Keeps residents in the order of their uses since they came."""

    name = "lfu"

    def __init__(self) -> None:
        self._order: PriorityOrder[int] = PriorityOrder()
        self._counts: dict[ExpertKey, int] = {}
        self._now = 0

    def __len__(self) -> int:
        return len(self._counts)

    def touch(self, key: ExpertKey) -> None:
        """Count the use."""
        self._now += 1
        self._counts[key] = count = self._counts.get(key, 0) + 1
        self._order.put(key, count * _ONE_USE + self._now)

    def victim(self, newcomer: ExpertKey, protected: Container[ExpertKey]) -> ExpertKey:
        """Name the one of the fewest uses."""
        return self._order.lowest(protected)

    def forget(self, key: ExpertKey) -> None:
        """Drop the expert and its count."""
        del self._counts[key]
        self._order.remove(key)

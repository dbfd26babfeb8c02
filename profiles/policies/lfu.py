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
        self._priorities: dict[ExpertKey, int] = {}  # uses x _ONE_USE + when the last one was
        self._order = PriorityOrder(self._priorities)
        self._now = 0

    def __len__(self) -> int:
        return len(self._priorities)

    def touch(self, key: ExpertKey) -> None:
        """Count the use."""
        self._now += 1
        priority = self._priorities.get(key)
        if priority is None:
            self._priorities[key] = _ONE_USE + self._now
            self._order.add(key)
        else:
            self._priorities[key] = (priority // _ONE_USE + 1) * _ONE_USE + self._now

    def victim(self, newcomer: ExpertKey, protected: Container[ExpertKey]) -> ExpertKey:
        """Name the one of the fewest uses."""
        return self._order.lowest(protected)

    def forget(self, key: ExpertKey) -> None:
        """Drop the expert and its count."""
        self._order.remove(key)
        del self._priorities[key]

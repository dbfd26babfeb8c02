"""Priority order: residents by a number that only rises while they stay; the lowest goes first."""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Container

    from lmpack.expert_key import ExpertKey

Priority = TypeVar("Priority", int, float)


class PriorityOrder(Generic[Priority]):
    """A heap that learns of a risen priority only when its old place comes up: raising one is a dict's store."""

    def __init__(self) -> None:
        self._priorities: dict[ExpertKey, Priority] = {}
        self._heap: list[tuple[Priority, ExpertKey]] = []  # places at or below today's; leavers' may linger

    def __len__(self) -> int:
        return len(self._priorities)

    def __contains__(self, key: ExpertKey) -> bool:
        return key in self._priorities

    def put(self, key: ExpertKey, priority: Priority) -> None:
        """Raise a resident's priority, or take in a newcomer."""
        if key not in self._priorities:
            heappush(self._heap, (priority, key))
        self._priorities[key] = priority

    def lowest(self, protected: Container[ExpertKey]) -> ExpertKey:
        """The unprotected resident of the lowest priority; LookupError when all are protected."""
        heap, spared = self._heap, []
        try:
            while heap:
                priority, key = heap[0]
                current = self._priorities.get(key)
                if current is None:
                    heappop(heap)
                elif current != priority:
                    heapreplace(heap, (current, key))
                elif key in protected:
                    spared.append(heappop(heap))
                else:
                    return key
        finally:
            for entry in spared:
                heappush(heap, entry)
        raise LookupError(f"all {len(self)} resident experts are protected")

    def remove(self, key: ExpertKey) -> None:
        """Let a resident go; KeyError for a stranger."""
        del self._priorities[key]
        if self._heap[0][1] == key:
            heappop(self._heap)
        elif len(self._heap) > 2 * len(self._priorities) + 64:
            self._heap = [(priority, key) for key, priority in self._priorities.items()]
            heapify(self._heap)

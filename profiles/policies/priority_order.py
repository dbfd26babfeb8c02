"""Priority order: residents by a number that only rises while they stay; the lowest goes first."""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

    from lmpack.expert_key import ExpertKey

Priority = TypeVar("Priority", int, float)


class PriorityOrder(Generic[Priority]):
    """A heap that learns of a risen priority only when its old place comes up: raising one costs it nothing."""

    def __init__(self, priorities: Mapping[ExpertKey, Priority]) -> None:
        """`priorities` are the owner's, who may raise a resident's at any time and lower it before add() alone."""
        self.residents: set[ExpertKey] = set()
        self._priorities: Mapping[ExpertKey, Priority] = priorities
        self._heap: list[tuple[Priority, ExpertKey]] = []  # places at or below today's; leavers' may linger

    def add(self, key: ExpertKey) -> None:
        """Take in a newcomer, whose priority is known."""
        self.residents.add(key)
        heappush(self._heap, (self._priorities[key], key))

    def lowest(self, protected: Container[ExpertKey]) -> ExpertKey:
        """The unprotected resident of the lowest priority; LookupError when all are protected."""
        heap, spared = self._heap, []
        try:
            while heap:
                priority, key = heap[0]
                if key not in self.residents:
                    heappop(heap)
                elif self._priorities[key] != priority:
                    heapreplace(heap, (self._priorities[key], key))
                elif key in protected:
                    spared.append(heappop(heap))
                else:
                    return key
        finally:
            for entry in spared:
                heappush(heap, entry)
        raise LookupError(f"all {len(self.residents)} resident experts are protected")

    def remove(self, key: ExpertKey) -> None:
        """Let a resident go; KeyError for a stranger."""
        self.residents.remove(key)
        if self._heap[0][1] == key:
            heappop(self._heap)
        elif len(self._heap) > 2 * len(self.residents) + 64:
            self._heap = [(self._priorities[key], key) for key in self.residents]
            heapify(self._heap)

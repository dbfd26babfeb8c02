"""Belady's MIN: the expert whose next use is farthest goes first, which no policy can beat (Belady 1966).

It has to know the future, so only the simulator can ask it. Experts of one pool have one size: the fewest misses are
the fewest bytes as well.
"""

from __future__ import annotations

from collections import defaultdict, deque
from heapq import heappop, heappush
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    from lmpack.expert_key import ExpertKey


class Belady:
    """Keeps residents in the order of their next use."""

    name = "belady"

    def __init__(self, future: Iterable[ExpertKey]) -> None:
        """`future` is all that will be touched, in order."""
        self._uses: defaultdict[ExpertKey, deque[float]] = defaultdict(deque)  # still to come
        for when, key in enumerate(future):
            self._uses[key].append(when)
        self._next_uses: dict[ExpertKey, float] = {}  # of the residents
        self._heap: list[
            tuple[float, ExpertKey]
        ] = []  # the farthest first, as negative; outdated ones linger

    def __len__(self) -> int:
        return len(self._next_uses)

    def touch(self, key: ExpertKey) -> None:
        """Strike this use from the future."""
        uses = self._uses[key]
        if uses:
            uses.popleft()
        self._next_uses[key] = next_use = uses[0] if uses else inf
        heappush(self._heap, (-next_use, key))

    def victim(self, newcomer: ExpertKey, protected: Container[ExpertKey]) -> ExpertKey:
        """Name the one that will not be needed for longest."""
        spared = []
        try:
            while self._heap:
                when, key = self._heap[0]
                if self._next_uses.get(key) != -when:
                    heappop(self._heap)
                elif key in protected:
                    spared.append(heappop(self._heap))
                else:
                    return key
        finally:
            for entry in spared:
                heappush(self._heap, entry)
        raise LookupError(f"all {len(self)} resident experts are protected")

    def forget(self, key: ExpertKey) -> None:
        """Drop the expert from the order; its future stays."""
        del self._next_uses[key]

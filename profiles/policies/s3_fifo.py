"""S3-FIFO: newcomers queue in a small FIFO and reach the main one when they are used again.

Algorithm 1 of Yang et al., "FIFO Queues are All You Need for Cache Eviction", SOSP 2023, and its authors' rule for the
start: until somebody has to go, newcomers that the small queue has no room for join the main one.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container

    from lmpack.expert_key import ExpertKey

_SMALL_SHARE = 0.1  # of the slots, as in the paper
_MOST_USES = 3  # counted, in two bits
_USES_TO_STAY = 2  # while in the small queue


class S3FIFO:
    """A small queue, a main queue, and the names of those that left the small one unused."""

    name = "s3fifo"

    def __init__(self, num_slots: int) -> None:
        self._small_length = max(1, int(num_slots * _SMALL_SHARE))
        self._num_ghosts = num_slots - self._small_length
        self._small: OrderedDict[ExpertKey, int] = OrderedDict()  # uses since they came, the first in first
        self._main: OrderedDict[ExpertKey, int] = OrderedDict()
        self._ghosts: OrderedDict[ExpertKey, None] = OrderedDict()
        self._had_room = True

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def touch(self, key: ExpertKey) -> None:
        """Count a resident's use; queue a newcomer, in the main queue when it left not long ago."""
        if key in self._main:
            self._main[key] = min(self._main[key] + 1, _MOST_USES)
        elif key in self._small:
            self._small[key] = min(self._small[key] + 1, _MOST_USES)
        else:
            self._take_in(key)

    def victim(self, newcomer: ExpertKey, protected: Container[ExpertKey]) -> ExpertKey:
        """Name the first of the small queue when that is full, else of the main one, unless it was used."""
        if len(self._small) >= self._small_length:
            while (key := _first(self._small, protected)) is not None:
                if self._small[key] < _USES_TO_STAY:
                    return key
                del self._small[key]
                self._main[key] = 0
        return self._victim_of_main(protected)

    def forget(self, key: ExpertKey) -> None:
        """Drop the expert; one of the small queue becomes a ghost."""
        self._had_room = False
        if key in self._main:
            del self._main[key]
            return
        del self._small[key]
        self._ghosts[key] = None

    def _take_in(self, key: ExpertKey) -> None:
        if key in self._ghosts:
            del self._ghosts[key]
            self._main[key] = 0
        elif self._had_room and len(self._small) >= self._small_length:
            self._main[key] = 0
        else:
            self._small[key] = 0
        while (
            len(self._ghosts) > self._num_ghosts
        ):  # not in forget(): who went for this one may not push it out
            self._ghosts.popitem(last=False)

    def _victim_of_main(self, protected: Container[ExpertKey]) -> ExpertKey:
        while (key := _first(self._main, protected)) is not None and self._main[key]:
            self._main[key] -= 1
            self._main.move_to_end(key)
        if key is None:
            key = _first(self._small, protected)
        if key is None:
            raise LookupError(f"all {len(self)} resident experts are protected")
        return key


def _first(queue: OrderedDict[ExpertKey, int], protected: Container[ExpertKey]) -> ExpertKey | None:
    return next((key for key in queue if key not in protected), None)

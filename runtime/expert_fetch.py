"""A layer's experts on their way: the resident ones are there at once, the others as they are read."""

from __future__ import annotations

from queue import SimpleQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from runtime.expert_readers import Read


class Fetch:
    """What `ExpertCache.begin` gives: a slot for every expert it was asked for, and word of those being read.

    `slots` are in the order of the call and do not change; `missing` are the positions in it whose experts have
    not arrived. A fetch that is not followed to its end leaves none of its missing experts resident.
    """

    def __init__(
        self, experts: Sequence[int], on_end: Callable[[Fetch, bool], None], clock: Callable[[], float]
    ) -> None:
        """`on_end` is told once that all have arrived (True) or that a read failed."""
        self.slots: list[int] = []
        self.missing: list[int] = []
        self.reads: list[Read] = []  # in the order of the call
        self.wakeup: SimpleQueue[None] = SimpleQueue()  # gets an item after each read
        self.num_hits = 0
        self.waited_s = 0.0
        self.abandoned = False
        self._experts = experts
        self._on_end = on_end
        self._clock = clock

    def arrivals(self) -> Iterator[list[int]]:
        """Yield positions in groups as their experts arrive, first those that were resident; in the end, all.

        Raises StorageError, which names layer and expert, when a read fails: then no missing expert of the call
        becomes resident.
        """
        missing = set(self.missing)
        if len(missing) < len(self.slots):
            yield [position for position in range(len(self.slots)) if position not in missing]
        while self.missing:
            started = self._clock()
            arrived = self._next_arrivals()
            self.waited_s += self._clock() - started
            self._end_when_whole()
            yield arrived

    def wait(self) -> None:
        """Return when all have arrived; raises what arrivals() raises."""
        if self.missing:
            started = self._clock()
            while self.missing:
                self._next_arrivals()
            self.waited_s += self._clock() - started
            self._end_when_whole()

    def _next_arrivals(self) -> list[int]:
        """Wait until there is one more."""
        assert not self.abandoned, "another fetch has begun since"
        while True:
            if any(read.error for read in self.reads):
                self._fail()
            ended = {read.key.expert for read in self.reads if read.ended}
            arrived = [position for position in self.missing if self._experts[position] in ended]
            if arrived:
                self.missing = [position for position in self.missing if self._experts[position] not in ended]
                return arrived
            self.wakeup.get()

    def _end_when_whole(self) -> None:
        if not self.missing:
            self._on_end(self, True)

    def _fail(self) -> None:
        """Raise the error of the first read that failed, when no other is under way."""
        reads = list(self.reads)
        self._on_end(self, False)
        raise next(read.error for read in reads if read.error)

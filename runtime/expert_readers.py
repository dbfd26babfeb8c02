"""The threads that read experts: what is needed now before what may be needed soon."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING

from runtime.interruptible import InterruptibleThread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lmpack.expert_key import ExpertKey

NUM_READERS = 8
"""A drive needs several requests in flight; benchmarks/expert_reads.py shows what more gain."""
MAX_GUESSES_IN_FLIGHT = 1
"""A demand read shares the drive with the guesses it finds under way: this many at most."""


@dataclass(slots=True, eq=False)
class Read:
    """One expert on its way into a slot."""

    key: ExpertKey
    slot: int
    is_guess: bool = False  # nobody has asked for it yet
    wakeup: SimpleQueue[None] = field(default_factory=SimpleQueue)  # gets an item when it has ended
    begun: bool = False
    ended: bool = False  # read, failed, or cancelled
    error: BaseException | None = None
    drive_nbytes: int = 0  # what it took from the drive


class ExpertReaders:
    """Reads experts in threads: demands in their order, and guesses while no demand waits for a thread.

    All methods are for one thread. A second interrupt may end settle() or close() early: calling them again takes
    the wait up where it was.
    """

    # Queues and bare locks are written in C, so that an interrupt cannot leave them half done: a read that has
    # ended says so first and wakes its owner then, who looks at the reads and not at what woke him.

    def __init__(
        self,
        read: Callable[[ExpertKey, int], int],
        num_threads: int = NUM_READERS,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`read(key, slot)` runs in `num_threads` threads and a few more for guesses and returns the bytes that
        the drive gave; what it raises is kept."""
        self._read = read
        self._clock = clock
        self._lock = threading.Lock()
        self._demands: deque[Read] = deque()
        self._guesses: deque[Read] = deque()
        self._num_running = 0
        self._num_guesses_running = 0
        self._busy_since = 0.0
        self._busy_s = 0.0
        self._closed = False
        self._work: SimpleQueue[None] = SimpleQueue()  # an item for each read that was queued
        self._threads = [
            InterruptibleThread(self._run, f"expert-reader-{number}")
            for number in range(num_threads + MAX_GUESSES_IN_FLIGHT)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def busy_s(self) -> float:
        """Seconds during which at least one read was under way."""
        with self._lock:
            return self._busy_s + (self._clock() - self._busy_since if self._num_running else 0.0)

    def start(self, *reads: Read) -> None:
        """Queue reads; an error when closed."""
        with self._lock:
            if self._closed:
                raise ValueError("the expert readers are closed")
            for read in reads:
                (self._guesses if read.is_guess else self._demands).append(read)
        for _ in reads:
            self._work.put(None)

    def demand(self, guess: Read, wakeup: SimpleQueue[None]) -> None:
        """Make a guess a demand, wherever it is on its way; `wakeup` hears of it unless it has ended."""
        with self._lock:
            guess.wakeup = wakeup
            guess.is_guess = False
            if guess.begun:
                self._num_guesses_running -= not guess.ended
            elif not guess.ended:
                if guess in self._guesses:  # it is not, when an interrupt came before start()
                    self._guesses.remove(guess)
                self._demands.append(guess)
        self._work.put(None)

    def cancel(self, read: Read) -> bool:
        """See to it that a read does not begin; False when it has begun or ended."""
        with self._lock:
            if read.begun or read.ended:
                return False
            queue = self._guesses if read.is_guess else self._demands
            if read in queue:  # it is not, when an interrupt came before start()
                queue.remove(read)
            read.ended = True
            return True

    def settle(self, reads: Sequence[Read]) -> None:
        """Cancel those that have not begun and wait for the others: afterwards no thread touches their slots."""
        wakeup: SimpleQueue[None] = SimpleQueue()
        for read in reads:
            if not self.cancel(read):
                with self._lock:
                    read.wakeup = wakeup
        while not all(read.ended for read in reads):
            wakeup.get()

    def close(self) -> None:
        """Cancel what has not begun and join the threads; a second time does nothing."""
        with self._lock:
            self._closed = True
            for queue in (self._demands, self._guesses):
                while queue:
                    queue.pop().ended = True
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.wait_for_end()

    def _run(self) -> None:
        while True:
            self._work.get()
            while (read := self._next()) is not None:
                try:
                    read.drive_nbytes = self._read(read.key, read.slot)
                except BaseException as error:  # noqa: BLE001 (raised again by whoever waits for it)
                    read.error = error
                self._end(read)
            if self._closed:
                return

    def _next(self) -> Read | None:
        """Take the next read, if one may begin; a guess held back is taken by a thread that ends its read."""
        with self._lock:
            if self._demands:
                read = self._demands.popleft()
            elif self._guesses and self._num_guesses_running < MAX_GUESSES_IN_FLIGHT:
                read = self._guesses.popleft()
            else:
                return None
            if not self._num_running:
                self._busy_since = self._clock()
            read.begun = True
            self._num_running += 1
            self._num_guesses_running += read.is_guess
            return read

    def _end(self, read: Read) -> None:
        with self._lock:
            self._num_running -= 1
            self._num_guesses_running -= read.is_guess
            if not self._num_running:
                self._busy_s += self._clock() - self._busy_since
            read.ended = True
            read.wakeup.put(None)

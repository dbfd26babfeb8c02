"""CopyLanes: a few threads that hash and write while the next bytes are read, in bounded memory.

Work given to one lane is done in order; lanes run beside each other. A buffer returns to the pool when every
lane that was given a part of it is done, so the reader waits when the lanes fall behind.
"""

from __future__ import annotations

import mmap
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from threading import Lock
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from types import TracebackType

BUFFER_NBYTES = 8 << 20
BUFFERS_NBYTES = 128 << 20  # of all buffers together, unless two of the longest parts need more
MAX_BUFFERS = 16


class LentBuffer:
    """A buffer of the pool; every holder calls release() once."""

    __slots__ = ("_done", "_failed", "_home", "_lock", "_num_holders", "view")

    def __init__(
        self, view: memoryview, home: SimpleQueue[memoryview], done: Callable[[], None] | None
    ) -> None:
        """Start with one holder: the caller of lend()."""
        self.view = view
        self._home = home
        self._done = done
        self._failed = False
        self._num_holders = 1
        self._lock = Lock()

    def hold(self) -> None:
        """Add a holder."""
        with self._lock:
            self._num_holders += 1

    def release(self, *, failed: bool = False) -> None:
        """Drop a holder; the last one gives the memory back, and says so unless one has failed."""
        with self._lock:
            self._failed |= failed
            self._num_holders -= 1
            is_last = self._num_holders == 0
        if is_last:
            self._home.put(self.view)
            if self._done is not None and not self._failed:
                self._done()


class CopyLanes:
    """Single-thread lanes over one pool of buffers; the first failure in a lane is raised to the caller."""

    def __init__(self, num_lanes: int, buffer_nbytes: int = BUFFER_NBYTES) -> None:
        """Make the pool; a buffer has at least buffer_nbytes, in anonymous memory that is touched when used."""
        self._free: SimpleQueue[memoryview] = SimpleQueue()
        for _ in range(min(MAX_BUFFERS, max(2, BUFFERS_NBYTES // max(buffer_nbytes, 1)))):
            self._free.put(memoryview(mmap.mmap(-1, max(buffer_nbytes, 1))))
        self._lanes = [ThreadPoolExecutor(1, f"lane-{number}") for number in range(num_lanes)]
        self._failure: BaseException | None = None

    def __enter__(self) -> Self:
        """Return the lanes themselves."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Wait for the threads; after an error a lane begins nothing more, so that what it did has no gaps."""
        self._failure = self._failure or error
        for lane in self._lanes:
            lane.shutdown(wait=True)

    def lend(self, done: Callable[[], None] | None = None) -> LentBuffer:
        """Wait for a free buffer; raises what a lane has raised.

        done is called, from any thread, when all work that was given with the buffer has succeeded.
        """
        view = self._free.get()
        self._raise_failure()
        return LentBuffer(view, self._free, done)

    def give(self, lane: int, buffer: LentBuffer, work: Callable[[], None]) -> None:
        """Queue work that reads the buffer; the lane releases it afterwards."""
        buffer.hold()
        self._lanes[lane].submit(self._run, buffer, work).add_done_callback(self._note_failure)

    def drain(self, lane: int | None = None) -> None:
        """Return when all work given so far, to one lane or to all, is done; raises the first failure."""
        for one in self._lanes if lane is None else [self._lanes[lane]]:
            one.submit(lambda: None).result()
        self._raise_failure()

    def _run(self, buffer: LentBuffer, work: Callable[[], None]) -> None:
        failed = True
        try:
            if self._failure is None:
                work()
                failed = False
        finally:
            buffer.release(failed=failed)

    def _note_failure(self, done: Future[None]) -> None:
        self._failure = self._failure or done.exception()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

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


class LentBuffer:
    """A buffer of the pool; every holder calls release() once."""

    __slots__ = ("_home", "_lock", "_num_holders", "view")

    def __init__(self, view: memoryview, home: SimpleQueue[memoryview]) -> None:
        """Start with one holder: the caller of lend()."""
        self.view = view
        self._home = home
        self._num_holders = 1
        self._lock = Lock()

    def hold(self) -> None:
        """Add a holder."""
        with self._lock:
            self._num_holders += 1

    def release(self) -> None:
        """Drop a holder; the last one gives the memory back."""
        with self._lock:
            self._num_holders -= 1
            is_last = self._num_holders == 0
        if is_last:
            self._home.put(self.view)


class CopyLanes:
    """Single-thread lanes over one pool of buffers; the first failure in a lane is raised to the caller."""

    def __init__(self, num_lanes: int, buffer_nbytes: int = BUFFER_NBYTES) -> None:
        """Make the pool; a buffer has at least buffer_nbytes, in anonymous memory that is touched when used."""
        self._free: SimpleQueue[memoryview] = SimpleQueue()
        for _ in range(max(2, BUFFERS_NBYTES // max(buffer_nbytes, 1))):
            self._free.put(memoryview(mmap.mmap(-1, max(buffer_nbytes, 1))))
        self._lanes = [ThreadPoolExecutor(1, f"lane-{number}") for number in range(num_lanes)]
        self._failure: BaseException | None = None

    def __enter__(self) -> Self:
        """Return the lanes themselves."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Wait for the threads; work that has not begun is dropped after an error."""
        for lane in self._lanes:
            lane.shutdown(wait=True, cancel_futures=error is not None)

    def lend(self) -> LentBuffer:
        """Wait for a free buffer; raises what a lane has raised."""
        view = self._free.get()
        self._raise_failure()
        return LentBuffer(view, self._free)

    def give(self, lane: int, buffer: LentBuffer, work: Callable[[], None]) -> None:
        """Queue work that reads the buffer; the lane releases it afterwards."""
        buffer.hold()
        self._lanes[lane].submit(self._run, buffer, work).add_done_callback(self._note_failure)

    def drain(self) -> None:
        """Return when all work given so far is done; raises the first failure."""
        for lane in self._lanes:
            lane.submit(lambda: None).result()
        self._raise_failure()

    def _run(self, buffer: LentBuffer, work: Callable[[], None]) -> None:
        try:
            if self._failure is None:
                work()
        finally:
            buffer.release()

    def _note_failure(self, done: Future[None]) -> None:
        if not done.cancelled():
            self._failure = self._failure or done.exception()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

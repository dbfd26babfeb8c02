"""The threads that read experts."""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from threading import Condition
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lmpack.expert_key import ExpertKey

    Read = Callable[[ExpertKey, int], object]

NUM_READERS = 8
"""A drive needs several requests in flight; benchmarks/expert_reads.py shows what more gain."""


class ExpertReaders:
    """Runs one read per expert, several at once; no read outlives the batch that asked for it.

    Called from one thread at a time.
    """

    def __init__(self, num_threads: int = NUM_READERS) -> None:
        self._num_threads = num_threads
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="expert-reader")
        self._batch: _Batch | None = None

    def read(self, read: Read, keys: Sequence[ExpertKey], slots: Sequence[int]) -> None:
        """Call read(key, slot) for each pair and return when all have ended.

        Raises what the first failing key raised, after the others have been read.
        """
        self.settle()
        if len(keys) == 1:  # a hand-over to a thread would only cost time
            read(keys[0], slots[0])
            return
        self._batch = batch = _Batch(read, keys, slots)
        try:
            for _ in range(min(len(keys), self._num_threads)):
                self._executor.submit(batch.work)
            batch.wait()
        finally:
            self.settle()
        batch.raise_first_error()

    def settle(self) -> None:
        """Wait until no read is under way, and start none of those that an interrupted batch left waiting.

        A second Ctrl-C may end this wait; the next call takes it up again, so that a slot is never filled by an
        old read after a new one.
        """
        if self._batch is not None:
            self._batch.cancel()
            self._batch.wait()
            self._batch = None

    def close(self) -> None:
        """Join the threads; a second time does nothing."""
        self.settle()
        self._executor.shutdown()


class _Batch:
    """Reads that wait, are under way, or have failed; it counts them itself, so that no interrupt loses one."""

    def __init__(self, read: Read, keys: Sequence[ExpertKey], slots: Sequence[int]) -> None:
        self._read = read
        self._waiting = deque(enumerate(zip(keys, slots, strict=True)))
        self._num_running = 0
        self._errors: dict[int, BaseException] = {}  # by position in the batch
        self._changed = Condition()

    def work(self) -> None:
        """Read until none waits; runs in several threads at once."""
        while True:
            with self._changed:
                if not self._waiting:
                    return
                position, (key, slot) = self._waiting.popleft()
                self._num_running += 1
            try:
                self._read(key, slot)
            except BaseException as error:  # noqa: BLE001 (raised again in the caller's thread)
                self._errors[position] = error
            finally:
                with self._changed:
                    self._num_running -= 1
                    self._changed.notify()

    def wait(self) -> None:
        """Return when no read waits or is under way."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._num_running)

    def cancel(self) -> None:
        """Start no more reads."""
        with self._changed:
            self._waiting.clear()

    def raise_first_error(self) -> None:
        """Raise the error of the read that comes first in the batch, if there is one."""
        if self._errors:
            raise self._errors[min(self._errors)]

"""The threads that read experts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from lmpack.expert_key import ExpertKey

NUM_READERS = 8
"""A drive needs several requests in flight; benchmarks/expert_reads.py shows what more gain."""


class ExpertReaders:
    """Runs one read per expert, several at once; no read outlives the batch that asked for it.

    Called from one thread at a time.
    """

    def __init__(self, num_threads: int = NUM_READERS) -> None:
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="expert-reader")
        self._running: list[Future[None]] = []

    def read(
        self, read: Callable[[ExpertKey, int], None], keys: Sequence[ExpertKey], slots: Sequence[int]
    ) -> None:
        """Call read(key, slot) for each pair and return when all have ended.

        Raises what the first failing key raised, after the others have been read.
        """
        self.settle()
        if len(keys) == 1:  # a hand-over to a thread would only cost time
            read(keys[0], slots[0])
            return
        try:
            for key, slot in zip(keys, slots, strict=True):
                self._running.append(self._executor.submit(read, key, slot))
            wait(self._running)
            for future in self._running:
                future.result()
        finally:
            self.settle()

    def settle(self) -> None:
        """Wait until no read is under way, and start none of those that an interrupted batch left waiting.

        A second Ctrl-C may end this wait; the next call takes it up again, so that a slot is never filled by an
        old read after a new one.
        """
        if self._running:
            for future in self._running:
                future.cancel()
            wait(self._running)
            self._running.clear()

    def close(self) -> None:
        """Join the threads; a second time does nothing."""
        self._executor.shutdown(cancel_futures=True)

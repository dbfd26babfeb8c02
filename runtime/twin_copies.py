"""A device for machines without one: its memory is a second piece of RAM, its copies are those of one thread."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING

from runtime.address_range import AddressRange

if TYPE_CHECKING:
    from torch import Tensor


class TwinCopies:
    """A CopyStream whose copies can be held back, so that it shows who does not wait for them.

    The arithmetic is the processor's and has always ended when a copy is submitted.
    """

    def __init__(self) -> None:
        self._ranges: list[AddressRange] = []
        self._submitted: SimpleQueue[_Copy | None] = SimpleQueue()
        self._may_go_on = threading.Condition()
        self._num_let_through: int | None = None  # all of them
        self._thread: threading.Thread | None = threading.Thread(
            target=self._run, name="twin-copies", daemon=True
        )
        self._thread.start()

    def allocate(self, nbytes: int) -> Tensor:
        memory = AddressRange(nbytes)
        memory.fill_with_memory(huge_pages=False)
        self._ranges.append(memory)
        return memory.tensor()

    def pin(self, storage: Tensor) -> None:
        """Its copies run beside everything else as it is."""

    def copy(self, source: Tensor, target: Tensor) -> _Copy:
        copy = _Copy(source, target)
        self._submitted.put(copy)
        return copy

    def follow_compute(self) -> None:
        """It has ended."""

    def hold_back(self) -> None:
        """Begin no copy until it is let through."""
        with self._may_go_on:
            self._num_let_through = 0

    def let_through(self, num_copies: int | None = None) -> None:
        """Make so many more copies, or all that there are and will be."""
        with self._may_go_on:
            if num_copies is None or self._num_let_through is None:
                self._num_let_through = None
            else:
                self._num_let_through += num_copies
            self._may_go_on.notify()

    def close(self) -> None:
        if self._thread is None:
            return
        self.let_through()
        self._submitted.put(None)
        self._thread.join()
        self._thread = None
        while self._ranges:
            self._ranges.pop().close()

    def _run(self) -> None:
        while (copy := self._submitted.get()) is not None:
            with self._may_go_on:
                self._may_go_on.wait_for(lambda: self._num_let_through != 0)
                if self._num_let_through is not None:
                    self._num_let_through -= 1
            copy.make()


class _Copy:
    """One copy and its event."""

    def __init__(self, source: Tensor, target: Tensor) -> None:
        self._source = source
        self._target = target
        self._ended = threading.Event()

    def make(self) -> None:
        self._target.copy_(self._source)
        self._ended.set()

    def synchronize(self) -> None:
        self._ended.wait()

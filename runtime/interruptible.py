"""Waits that an interrupt ends, whenever it comes, and that can be taken up again."""

from __future__ import annotations

from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

TICK_S = 0.1


def take(queue: SimpleQueue[T]) -> T:
    """The next item. An interrupt between Python's last look for one and the wait is heard at the next tick."""
    while True:
        with suppress(Empty):
            return queue.get(timeout=TICK_S)


class InterruptibleThread(Thread):
    """A daemon: a process whose owner forgot to end it ends all the same."""

    def __init__(self, target: Callable[[], None], name: str) -> None:
        super().__init__(target=target, name=name, daemon=True)
        self._has_ended = False
        self._wakeup: SimpleQueue[None] = SimpleQueue()  # gets an item when it has

    def run(self) -> None:
        """Do what a thread does, and say when it is done."""
        try:
            super().run()
        finally:
            self._has_ended = True
            self._wakeup.put(None)

    def wait_for_end(self) -> None:
        """As join(), after which Python 3.11 takes the thread for ended when an interrupt came meanwhile."""
        while not self._has_ended:
            take(self._wakeup)
        self.join()

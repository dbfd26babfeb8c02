"""A wait that an interrupt ends, whenever it comes."""

from __future__ import annotations

from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TypeVar

T = TypeVar("T")

TICK_S = 0.1


def take(queue: SimpleQueue[T]) -> T:
    """The next item. An interrupt between Python's last look for one and the wait is heard at the next tick."""
    while True:
        with suppress(Empty):
            return queue.get(timeout=TICK_S)

"""The lanes of a conversion keep order, also when it is broken off."""

from __future__ import annotations

import sys
import threading
from functools import partial
from typing import TYPE_CHECKING

import pytest

from converters.copy_lanes import CopyLanes

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def eager_threads() -> Iterator[None]:
    """Let threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("eager_threads")
def test_a_lane_that_is_broken_off_has_done_the_first_works_without_gaps() -> None:
    # A journaled hash covers everything before it: a work that is skipped must not be followed by one that is not.
    for _ in range(20):
        done: list[int] = []
        begin = threading.Event()

        def wait(begin: threading.Event = begin) -> None:
            assert begin.wait(60)

        with pytest.raises(KeyboardInterrupt), CopyLanes(1, 16) as lanes:
            buffer = lanes.lend()
            lanes.give(0, buffer, wait)
            for number in range(2000):
                lanes.give(0, buffer, partial(done.append, number))
            begin.set()
            raise KeyboardInterrupt
        assert done == list(range(len(done)))

"""The reader threads: everything is read, and no read outlives its batch."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING

import pytest

from lmpack.expert_key import ExpertKey
from runtime.expert_readers import ExpertReaders

if TYPE_CHECKING:
    from collections.abc import Iterator

KEYS = [ExpertKey(0, expert) for expert in range(20)]
SLOTS = list(range(100, 120))


@pytest.fixture
def readers() -> Iterator[ExpertReaders]:
    readers = ExpertReaders(num_threads=2)
    yield readers
    readers.close()


def test_each_expert_is_read_once_into_its_slot(readers: ExpertReaders) -> None:
    read: list[tuple[ExpertKey, int]] = []
    for count in (20, 1, 0):
        read.clear()
        readers.read(lambda key, slot: read.append((key, slot)), KEYS[:count], SLOTS[:count])
        assert sorted(read) == list(zip(KEYS[:count], SLOTS, strict=False))


def test_reads_overlap(readers: ExpertReaders) -> None:
    both = threading.Barrier(2, timeout=60)
    readers.read(lambda key, slot: both.wait(), KEYS[:2], SLOTS[:2])


def test_a_failure_is_raised_after_the_others_were_read_and_the_threads_go_on(readers: ExpertReaders) -> None:
    read: list[ExpertKey] = []

    def fail_on_odd(key: ExpertKey, slot: int) -> None:
        if key.expert % 2:
            raise OSError(f"{key} failed")
        read.append(key)

    for _ in range(2):
        read.clear()
        with pytest.raises(OSError, match="L000/E0001 failed"):
            readers.read(fail_on_odd, KEYS, SLOTS)
        assert sorted(read) == KEYS[::2]


def test_after_an_interrupt_no_read_is_under_way_and_none_begins(readers: ExpertReaders) -> None:
    main_thread = threading.get_ident()
    interrupted = threading.Event()
    begun: list[ExpertKey] = []
    ended: list[ExpertKey] = []

    def on_interrupt(*_: object) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    def read(key: ExpertKey, slot: int) -> None:
        begun.append(key)
        if key == KEYS[0]:
            signal.pthread_kill(main_thread, signal.SIGINT)
        assert interrupted.wait(timeout=60)
        ended.append(key)

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            readers.read(read, KEYS, SLOTS)
        after = sorted(begun)
        assert sorted(ended) == after
    finally:
        signal.signal(signal.SIGINT, before)
    readers.read(lambda key, slot: None, KEYS, SLOTS)
    assert sorted(begun) == after


def test_closing_twice_does_no_harm_and_reading_afterwards_is_an_error(readers: ExpertReaders) -> None:
    readers.close()
    readers.close()
    with pytest.raises(RuntimeError, match="shutdown"):
        readers.read(lambda key, slot: None, KEYS, SLOTS)

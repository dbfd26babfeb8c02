"""The reader threads: demands first, guesses beside them, and nothing under way that nobody knows of."""

from __future__ import annotations

import signal
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING

import pytest

from lmpack.expert_key import ExpertKey
from runtime.expert_readers import MAX_GUESSES_IN_FLIGHT, ExpertReaders, Read

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

KEYS = [ExpertKey(0, expert) for expert in range(20)]


class Gate:
    """A read that says it has begun and goes on when it may."""

    def __init__(self) -> None:
        self.begun: SimpleQueue[ExpertKey] = SimpleQueue()
        self.ended: list[ExpertKey] = []
        self._may_end = {key: threading.Event() for key in KEYS}

    def __call__(self, key: ExpertKey, slot: int) -> int:
        self.begun.put(key)
        assert self._may_end[key].wait(timeout=60)
        self.ended.append(key)
        return 0

    def open(self, *keys: ExpertKey) -> None:
        for key in keys:
            self._may_end[key].set()


@pytest.fixture
def make_readers() -> Iterator[Callable[..., ExpertReaders]]:
    """Two threads and those for guesses; closed after the test."""
    opened: list[ExpertReaders] = []

    def make(read: Callable[[ExpertKey, int], int]) -> ExpertReaders:
        opened.append(ExpertReaders(read, num_threads=2))
        return opened[-1]

    yield make
    for readers in opened:
        readers.close()


def start(readers: ExpertReaders, keys: Sequence[ExpertKey], *, is_guess: bool = False) -> list[Read]:
    reads = [Read(key, 100 + key.expert, is_guess) for key in keys]
    for read in reads:
        readers.start(read)
    return reads


def wait(reads: Sequence[Read]) -> None:
    for read in reads:
        read.wakeup.get(timeout=60)
        assert read.ended


def test_each_expert_is_read_once_into_its_slot(make_readers: Callable[..., ExpertReaders]) -> None:
    reads: list[tuple[ExpertKey, int]] = []

    def read(key: ExpertKey, slot: int) -> int:
        reads.append((key, slot))
        return key.expert

    started = start(make_readers(read), KEYS)
    wait(started)
    assert [read.drive_nbytes for read in started] == [key.expert for key in KEYS]
    assert sorted(reads) == [(key, 100 + key.expert) for key in KEYS]


def test_reads_overlap(make_readers: Callable[..., ExpertReaders]) -> None:
    both = threading.Barrier(2, timeout=60)
    wait(start(make_readers(lambda key, slot: both.wait()), KEYS[:2]))


def test_a_failure_is_kept_with_its_read_and_the_threads_go_on(
    make_readers: Callable[..., ExpertReaders],
) -> None:
    def fail_on_odd(key: ExpertKey, slot: int) -> int:
        if key.expert % 2:
            raise OSError(f"{key} failed")
        return 0

    readers = make_readers(fail_on_odd)
    for _ in range(2):
        reads = start(readers, KEYS)
        wait(reads)
        assert [str(read.error) for read in reads[:2]] == ["None", "L000/E0001 failed"]


def test_a_demand_is_read_before_guesses_that_were_there_first(
    make_readers: Callable[..., ExpertReaders],
) -> None:
    gate = Gate()
    readers = make_readers(gate)
    guesses = start(readers, KEYS[:6], is_guess=True)
    assert {gate.begun.get(timeout=60) for _ in range(MAX_GUESSES_IN_FLIGHT)} == set(
        KEYS[:MAX_GUESSES_IN_FLIGHT]
    )
    demands = start(readers, KEYS[10 : 12 + MAX_GUESSES_IN_FLIGHT])
    begun = {gate.begun.get(timeout=60) for _ in range(2)}  # in the two threads that no guess can take
    assert begun == set(KEYS[10:12])
    gate.open(*KEYS[:MAX_GUESSES_IN_FLIGHT])  # their threads have a guess and a demand to choose from
    begun = {gate.begun.get(timeout=60) for _ in range(MAX_GUESSES_IN_FLIGHT)}
    assert begun == set(KEYS[12 : 12 + MAX_GUESSES_IN_FLIGHT])
    gate.open(*KEYS)
    wait([*guesses, *demands])


def test_few_guesses_are_under_way_at_once(make_readers: Callable[..., ExpertReaders]) -> None:
    places = threading.BoundedSemaphore(MAX_GUESSES_IN_FLIGHT)

    def read(key: ExpertKey, slot: int) -> int:
        assert places.acquire(blocking=False)
        places.release()
        return 0

    guesses = start(make_readers(read), KEYS, is_guess=True)
    wait(guesses)
    assert [guess.error for guess in guesses] == [None] * len(KEYS)


def test_a_guess_that_is_asked_for_becomes_a_demand_and_is_read_once(
    make_readers: Callable[..., ExpertReaders],
) -> None:
    gate = Gate()
    readers = make_readers(gate)
    guesses = start(readers, KEYS[:4], is_guess=True)
    begun = {gate.begun.get(timeout=60) for _ in range(MAX_GUESSES_IN_FLIGHT)}
    assert begun == set(KEYS[:MAX_GUESSES_IN_FLIGHT])
    wakeup: SimpleQueue[None] = SimpleQueue()
    readers.demand(guesses[3], wakeup)
    assert gate.begun.get(timeout=60) == KEYS[3]  # before the guess that waits longer
    readers.demand(guesses[0], wakeup)
    assert (
        gate.begun.get(timeout=60) == KEYS[MAX_GUESSES_IN_FLIGHT]
    )  # in the place of the guess that is one no more
    gate.open(*KEYS)
    for _ in range(2):
        wakeup.get(timeout=60)
    assert guesses[0].ended
    assert guesses[3].ended
    wait(guesses[1:3])
    assert sorted(gate.ended) == KEYS[:4]


def test_settled_reads_have_ended_or_never_begin(make_readers: Callable[..., ExpertReaders]) -> None:
    gate = Gate()
    readers = make_readers(gate)
    reads = start(readers, KEYS)
    first = {gate.begun.get(timeout=60) for _ in range(2 + MAX_GUESSES_IN_FLIGHT)}
    threading.Thread(target=gate.open, args=KEYS).start()
    readers.settle(reads)
    assert all(read.ended for read in reads)
    assert {read.key for read in reads if read.begun} == set(gate.ended) >= first
    settled = sorted(gate.ended)
    wait(start(readers, KEYS[15:16]))
    assert sorted(gate.ended) == sorted([*settled, KEYS[15]])


def test_an_interrupted_wait_can_be_taken_up_again(make_readers: Callable[..., ExpertReaders]) -> None:
    gate = Gate()
    readers = make_readers(gate)
    reads = start(readers, KEYS[:1])
    gate.begun.get(timeout=60)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            readers.settle(reads)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not reads[0].ended
    gate.open(KEYS[0])
    readers.settle(reads)
    assert gate.ended == KEYS[:1]


def test_closing_joins_the_threads_and_starts_nothing_that_waits(
    make_readers: Callable[..., ExpertReaders],
) -> None:
    threads = set(threading.enumerate())
    gate = Gate()
    readers = make_readers(gate)
    reads = start(readers, KEYS)
    begun = {gate.begun.get(timeout=60) for _ in range(2 + MAX_GUESSES_IN_FLIGHT)}
    assert set(threading.enumerate()) - threads
    threading.Thread(target=gate.open, args=KEYS).start()
    readers.close()
    readers.close()
    assert not [thread for thread in set(threading.enumerate()) - threads if "reader" in thread.name]
    assert begun <= set(gate.ended)
    assert all(read.ended for read in reads)
    with pytest.raises(ValueError, match="closed"):
        start(readers, KEYS[:1])


def test_it_knows_how_long_it_was_reading() -> None:
    now = [10.0]

    def read(key: ExpertKey, slot: int) -> int:
        now[0] += 2.0
        return 0

    readers = ExpertReaders(read, num_threads=1, clock=lambda: now[0])
    wait(start(readers, KEYS[:1]))
    now[0] += 5.0
    wait(start(readers, KEYS[1:2]))
    assert readers.busy_s == 4.0
    readers.close()

"""Experts that arrive one after another, and guesses that may come true, over a drive that waits to be told."""

from __future__ import annotations

import random
import signal
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING

import pytest

from lmpack.errors import StorageError
from lmpack.expert_key import ExpertKey
from runtime.direct_store import DirectStore
from runtime.expert_cache import ExpertCache
from runtime.expert_readers import MAX_GUESSES_IN_FLIGHT
from runtime.expert_store import open_store
from tests.expert_packs import budget_with_slots, write_expert_pack

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from lmpack.pack import Pack
    from runtime.expert_fetch import Fetch

ROOMY = (9, 5)  # layers 0 (5 experts) and 3 (4) share nine slots, layers 1 (3) and 4 (2) five
NARROW = (4, 2)


class SlowStore(DirectStore):
    """Reads nothing before it may; keeps word of what it began to read."""

    def __init__(self, pack: Pack, *slots: int) -> None:
        super().__init__(pack, budget_with_slots(pack.manifest, *slots))
        self.begun: list[ExpertKey] = []
        self.begins: SimpleQueue[ExpertKey] = SimpleQueue()
        self._may_read: dict[ExpertKey, threading.Event] = {}

    def read(self, key: ExpertKey, slot: int) -> int:
        self.begun.append(key)
        self.begins.put(key)
        assert self._gate(key).wait(timeout=60)
        return super().read(key, slot)

    def let(self, layer: int, *experts: int) -> None:
        for expert in experts:
            self._gate(ExpertKey(layer, expert)).set()

    def _gate(self, key: ExpertKey) -> threading.Event:
        return self._may_read.setdefault(key, threading.Event())


@pytest.fixture(scope="module")
def whole_pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    return write_expert_pack(tmp_path_factory.mktemp("experts") / "experts.lmpack")


@pytest.fixture(params=[ROOMY, NARROW], ids=["roomy", "narrow"])
def slow(request: pytest.FixtureRequest, whole_pack: Pack) -> Iterator[tuple[ExpertCache, SlowStore]]:
    yield from _open(whole_pack, request.param)


@pytest.fixture
def narrow(whole_pack: Pack) -> Iterator[tuple[ExpertCache, SlowStore]]:
    yield from _open(whole_pack, NARROW)


def _open(pack: Pack, slots: tuple[int, int]) -> Iterator[tuple[ExpertCache, SlowStore]]:
    store = SlowStore(pack, *slots)
    cache = ExpertCache(store, budget_with_slots(pack.manifest, *slots))
    yield cache, store
    for layer in (0, 1, 3, 4):
        store.let(layer, *range(5))
    cache.close()


def check_bytes(cache: ExpertCache, pack: Pack, layer: int, experts: list[int], fetch: Fetch) -> None:
    bank = cache.bank(layer)
    for expert, slot in zip(experts, fetch.slots, strict=True):
        found = bank.storage[slot * bank.stride : (slot + 1) * bank.stride].numpy().tobytes()
        assert found == pack.read_expert(ExpertKey(layer, expert))


def test_hits_come_at_once_and_misses_as_they_are_read(
    slow: tuple[ExpertCache, SlowStore], whole_pack: Pack
) -> None:
    cache, store = slow
    store.let(0, 1)
    cache.fetch(0, [1])
    experts = [0, 1, 2, 1, 3]
    fetch = cache.begin(0, experts)
    assert fetch.missing == [0, 2, 4]
    assert fetch.slots[1] == fetch.slots[3]
    assert len(set(fetch.slots)) == 4
    arrivals = fetch.arrivals()
    assert next(arrivals) == [1, 3]
    store.let(0, 2)
    assert next(arrivals) == [2]
    assert fetch.missing == [0, 4]
    store.let(0, 0, 3)
    assert sorted(position for group in arrivals for position in group) == [0, 4]
    assert fetch.missing == []
    check_bytes(cache, whole_pack, 0, experts, fetch)
    assert (cache.hits, cache.misses) == (1, 4)
    assert list(cache.begin(0, [3, 2, 0]).arrivals()) == [[0, 1, 2]]


def test_without_hits_the_first_group_is_what_was_read_first(slow: tuple[ExpertCache, SlowStore]) -> None:
    cache, store = slow
    arrivals = cache.begin(3, [2, 0]).arrivals()
    store.let(3, 0)
    assert next(arrivals) == [1]
    store.let(3, 2)
    assert list(arrivals) == [[0]]


def test_nothing_asked_for_arrives_in_no_group(slow: tuple[ExpertCache, SlowStore]) -> None:
    cache, _ = slow
    assert list(cache.begin(0, []).arrivals()) == []


def test_a_read_that_fails_ends_the_call_and_leaves_none_of_its_misses(tmp_path: Path) -> None:
    pack = write_expert_pack(tmp_path / "experts.lmpack")
    store = SlowStore(pack, *NARROW)
    cache = ExpertCache(store, budget_with_slots(pack.manifest, *NARROW))
    store.let(0, 0, 1)
    cache.fetch(0, [0])
    path = pack.expert_path(ExpertKey(0, 2))
    aside = path.rename(tmp_path / "aside")
    arrivals = cache.begin(0, [0, 1, 2]).arrivals()
    assert [next(arrivals), next(arrivals)] == [[0], [1]]
    store.let(0, 2)
    with pytest.raises(StorageError, match="expert L000/E0002: "):
        next(arrivals)
    assert cache.begin(0, [0]).missing == []
    aside.rename(path)
    fetch = cache.begin(0, [0, 1, 2, 3])
    assert fetch.missing == [1, 2, 3]
    store.let(0, 3)
    fetch.wait()
    check_bytes(cache, pack, 0, [0, 1, 2, 3], fetch)
    cache.close()


def test_an_interrupted_fetch_is_abandoned_when_the_next_begins(
    narrow: tuple[ExpertCache, SlowStore], whole_pack: Pack
) -> None:
    cache, store = narrow
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    interrupted = cache.begin(0, [0, 1, 2])
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            interrupted.wait()
    finally:
        signal.signal(signal.SIGALRM, before)
    store.let(0, *range(4))
    for _ in range(3):
        fetch = cache.begin(0, [0, 1, 2, 3])
        fetch.wait()
        check_bytes(cache, whole_pack, 0, [0, 1, 2, 3], fetch)
    with pytest.raises(AssertionError, match="another fetch has begun"):
        interrupted.wait()


def test_a_guess_that_has_arrived_is_a_hit(slow: tuple[ExpertCache, SlowStore], whole_pack: Pack) -> None:
    cache, store = slow
    store.let(3, 0, 1)
    (guess,) = cache.prefetch(3, [0])
    assert cache.prefetch(3, [0]) == []
    guess.wakeup.get(timeout=60)
    fetch = cache.begin(3, [0, 1])
    fetch.wait()
    assert store.begun.count(ExpertKey(3, 0)) == 1
    assert (cache.hits, cache.misses, cache.useful_guesses, cache.wasted_guesses) == (1, 1, 1, 0)
    assert cache.bytes_read == 2 * cache.bank(3).stride
    check_bytes(cache, whole_pack, 3, [0, 1], fetch)


def test_a_guess_on_its_way_is_waited_for_and_read_once(
    slow: tuple[ExpertCache, SlowStore], whole_pack: Pack
) -> None:
    cache, store = slow
    cache.prefetch(3, [0, 1, 2])  # the last one waits for a thread
    fetch = cache.begin(3, [2, 0])
    assert fetch.missing == [0, 1]
    store.let(3, *range(3))
    fetch.wait()
    assert store.begun.count(ExpertKey(3, 0)) == store.begun.count(ExpertKey(3, 2)) == 1
    assert (cache.hits, cache.misses, cache.useful_guesses) == (0, 2, 2)
    check_bytes(cache, whole_pack, 3, [2, 0], fetch)


def test_a_guess_takes_no_slot_of_an_expert_in_use_or_guessed_itself(
    narrow: tuple[ExpertCache, SlowStore], whole_pack: Pack
) -> None:
    cache, store = narrow
    store.let(0, *range(5))
    store.let(3, *range(4))
    cache.fetch(3, [0])
    fetch = cache.begin(0, [0, 1, 2])
    fetch.wait()
    cache.prefetch(3, [0, 1, 2, 3])
    check_bytes(cache, whole_pack, 0, [0, 1, 2], fetch)
    assert store.begun == [ExpertKey(3, 0), *(ExpertKey(0, expert) for expert in range(3))]
    cache.fetch(3, [0])
    cache.prefetch(0, [0, 4])
    assert cache.evictions == 1  # one of those in use before
    assert cache.begin(3, [0]).missing == []


def test_guesses_in_vain_are_the_first_to_go(narrow: tuple[ExpertCache, SlowStore]) -> None:
    cache, store = narrow
    store.let(0, *range(5))
    store.let(3, *range(4))
    cache.fetch(0, [0, 1])
    for guess in cache.prefetch(3, [0, 1]):
        guess.wakeup.get(timeout=60)
    cache.fetch(3, [2])  # layer 3 has its turn: the two guesses were in vain, one place is needed
    assert (cache.evictions, cache.wasted_guesses) == (0, 1)
    cache.fetch(0, [2])
    assert (cache.evictions, cache.wasted_guesses) == (0, 2)
    assert cache.begin(0, [0, 1]).missing == []


def test_a_guess_whose_layer_has_had_its_turn_is_not_read_any_more(
    narrow: tuple[ExpertCache, SlowStore],
) -> None:
    cache, store = narrow
    cache.prefetch(3, [0, 1, 2])
    begun = {store.begins.get(timeout=60).expert for _ in range(MAX_GUESSES_IN_FLIGHT)}
    fetch = cache.begin(3, [3])
    store.let(3, *range(4))
    fetch.wait()
    cache.close()
    assert {key.expert for key in store.begun} == {*begun, 3}


def test_a_guess_that_cannot_be_read_is_an_error_only_when_it_is_asked_for(tmp_path: Path) -> None:
    pack = write_expert_pack(tmp_path / "experts.lmpack")
    store = SlowStore(pack, *NARROW)
    cache = ExpertCache(store, budget_with_slots(pack.manifest, *NARROW))
    path = pack.expert_path(ExpertKey(3, 0))
    path.rename(tmp_path / "aside")
    store.let(3, *range(4))
    (guess,) = cache.prefetch(3, [0])
    guess.wakeup.get(timeout=60)
    for _ in range(2):
        with pytest.raises(StorageError, match="expert L003/E0000: "):
            cache.fetch(3, [0, 1, 2, 3])
    (tmp_path / "aside").rename(path)
    cache.fetch(3, [0, 1, 2, 3])
    cache.close()


def test_closing_with_reads_under_way_joins_the_threads(whole_pack: Pack) -> None:
    threads = set(threading.enumerate())
    store = SlowStore(whole_pack, *NARROW)
    cache = ExpertCache(store, budget_with_slots(whole_pack.manifest, *NARROW))
    cache.begin(0, [0, 1])
    cache.prefetch(3, [0])
    threading.Thread(target=store.let, args=(0, 0, 1)).start()
    threading.Thread(target=store.let, args=(3, 0)).start()
    cache.close()
    assert not [thread for thread in set(threading.enumerate()) - threads if "reader" in thread.name]


@pytest.mark.parametrize("name", ["mmap", "direct"])
def test_whatever_is_guessed_in_between_the_bytes_are_right(whole_pack: Pack, name: str) -> None:
    numbers = random.Random(1)
    for slots in [(4, 3), (5, 4), ROOMY]:
        budget = budget_with_slots(whole_pack.manifest, *slots)
        cache = ExpertCache(open_store(name, whole_pack, budget), budget)
        for _ in range(200):
            layer = numbers.choice([0, 1, 3, 4])
            num_experts = whole_pack.manifest.layer(layer).num_experts
            experts = numbers.sample(range(num_experts), numbers.randint(0, min(4, num_experts)))
            fetch = cache.begin(layer, experts)
            guessed = numbers.choice([0, 1, 3, 4])
            cache.prefetch(guessed, range(numbers.randint(0, whole_pack.manifest.layer(guessed).num_experts)))
            arrived = sorted(position for group in fetch.arrivals() for position in group)
            assert arrived == list(range(len(experts)))
            check_bytes(cache, whole_pack, layer, experts, fetch)
        assert cache.useful_guesses > 0
        cache.close()

"""The device tier over a twin of a device: a second piece of memory, and copies that a test can hold back."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmpack.errors import StorageError
from lmpack.expert_key import ExpertKey
from profiles.policies.lru import LRU
from runtime.device_store import DeviceStore
from runtime.expert_cache import ExpertCache
from runtime.twin_copies import TwinCopies
from tests.expert_packs import budget_with_slots, write_expert_pack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from lmpack.pack import Pack

DEVICE = (4, 2)  # slots of layers 0 (5 experts) and 3 (4), and of layers 1 (3) and 4 (2)


class Tiers:
    """A cache over a device store, with the parts that tests look into."""

    def __init__(self, pack: Pack, device: tuple[int, int], ram: tuple[int, int]) -> None:
        self.pack = pack
        self.copies = TwinCopies()
        budget = budget_with_slots(pack.manifest, *device)
        ram_budget = budget_with_slots(pack.manifest, *ram)
        self.store = DeviceStore.open(pack, budget, ram_budget, lambda pool: LRU(), self.copies)
        self.cache = ExpertCache(self.store, budget, lambda pool: LRU())

    def fetch(self, layer: int, *experts: int) -> None:
        """Fetch and compare every byte."""
        self.check(layer, experts, self.cache.fetch(layer, experts))

    def check(self, layer: int, experts: Sequence[int], slots: Sequence[int]) -> None:
        bank = self.cache.bank(layer)
        for expert, slot in zip(experts, slots, strict=True):
            found = bank.storage[slot * bank.stride : (slot + 1) * bank.stride].numpy().tobytes()
            assert found == self.pack.read_expert(ExpertKey(layer, expert))

    def in_ram(self, layer: int) -> list[int]:
        return [
            expert
            for expert in range(self.pack.manifest.layer(layer).num_experts)
            if ExpertKey(layer, expert) in self.store.ram
        ]

    def close(self) -> None:
        self.copies.let_through()
        self.cache.close()


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    return write_expert_pack(tmp_path_factory.mktemp("experts") / "experts.lmpack")


@pytest.fixture
def open_tiers(pack: Pack) -> Iterator[Callable[..., Tiers]]:
    """Open tiers with so many slots in RAM; closed after the test."""
    opened: list[Tiers] = []

    def make(*ram: int) -> Tiers:
        opened.append(Tiers(pack, DEVICE, (ram[0], ram[1])))
        return opened[-1]

    yield make
    for tiers in opened:
        tiers.close()


def test_an_expert_has_not_arrived_before_its_copy_was_let_through(open_tiers: Callable[..., Tiers]) -> None:
    tiers = open_tiers(4, 2)
    tiers.copies.hold_back()
    experts = [0, 1, 2, 3]
    fetch = tiers.cache.begin(0, experts)
    arrivals = fetch.arrivals()
    for number in range(4):
        assert sum(read.ended for read in fetch.reads) == number
        tiers.copies.let_through(1)
        (position,) = next(arrivals)
        tiers.check(0, [experts[position]], [fetch.slots[position]])


@pytest.mark.parametrize("ram", [(1, 1), (3, 1), (4, 2), (9, 5)])
@pytest.mark.parametrize("step", [1, 3, None])
def test_an_eviction_whose_copies_are_held_back_spoils_nothing(
    open_tiers: Callable[..., Tiers], ram: tuple[int, int], step: int | None
) -> None:
    tiers = open_tiers(*ram)
    tiers.fetch(0, 0, 1, 2, 3)
    tiers.copies.hold_back()
    fetch = tiers.cache.begin(3, [0, 1, 2, 3])  # in the slots of the others, who are on their way out
    assert not any(read.ended for read in fetch.reads)
    done = threading.Event()

    def let_through() -> None:
        while not done.is_set():
            tiers.copies.let_through(step)

    stepping = threading.Thread(target=let_through)
    stepping.start()
    fetch.wait()
    done.set()
    stepping.join()
    tiers.check(3, range(4), fetch.slots)
    tiers.copies.let_through()
    tiers.fetch(0, 0, 1, 2, 3)
    tiers.fetch(3, 0, 1, 2, 3)


def test_what_comes_back_before_its_way_out_has_ended_is_whole(open_tiers: Callable[..., Tiers]) -> None:
    tiers = open_tiers(5, 2)
    tiers.fetch(0, 3, 2, 1, 0)  # 0 will be the first to go
    tiers.copies.hold_back()
    tiers.cache.begin(3, [0])
    assert tiers.in_ram(0) == [0]
    (guess,) = tiers.cache.prefetch(0, [0])
    while 0 in tiers.in_ram(0):
        os.sched_yield()  # until a thread has taken it
    assert not guess.ended
    tiers.copies.let_through()
    tiers.fetch(0, 0)
    assert tiers.store.ram.hits == 1


def test_an_expert_that_ram_holds_is_not_read_from_the_drive_again(open_tiers: Callable[..., Tiers]) -> None:
    tiers = open_tiers(9, 5)
    for _ in range(3):
        for layer in (0, 3):
            tiers.fetch(layer, 0, 1, 2, 3)
    assert tiers.cache.misses == 24
    assert tiers.store.ram.hits == 16
    assert tiers.cache.bytes_read == 8 * tiers.pack.manifest.layer(0).stride


def test_a_guess_in_vain_goes_to_ram(open_tiers: Callable[..., Tiers]) -> None:
    tiers = open_tiers(8, 2)
    for read in tiers.cache.prefetch(0, [4]):
        read.wakeup.get()
    tiers.fetch(0, 0)
    tiers.fetch(3, 0, 1, 2, 3)
    assert 4 in tiers.in_ram(0)
    assert tiers.cache.wasted_guesses == 1


def test_the_policy_of_the_tier_says_who_leaves_it(open_tiers: Callable[..., Tiers]) -> None:
    tiers = open_tiers(2, 1)
    tiers.fetch(0, 0)
    tiers.fetch(0, 1)
    tiers.fetch(0, 2)
    for expert in range(4):
        tiers.fetch(3, expert)  # 0, 1 and 2 go, in this order, and each newcomer needs a slot on its way
    assert tiers.in_ram(0) == [2]


@settings(max_examples=40)
@given(
    calls=st.lists(
        st.sampled_from([(0, 5), (1, 3), (3, 4), (4, 2)]).flatmap(
            lambda layer: st.tuples(
                st.just(layer[0]),
                st.lists(st.integers(0, layer[1] - 1), min_size=1, max_size=3, unique=True).map(tuple),
                st.lists(st.integers(0, layer[1] - 1), max_size=2, unique=True).map(tuple),
            )
        ),
        max_size=30,
    ),
    device=st.tuples(st.integers(4, 9), st.integers(3, 5)),
    ram=st.tuples(st.integers(1, 9), st.integers(1, 5)),
)
def test_whatever_is_asked_for_the_bytes_are_right_and_nothing_is_kept_twice(
    pack: Pack,
    calls: list[tuple[int, tuple[int, ...], tuple[int, ...]]],
    device: tuple[int, int],
    ram: tuple[int, int],
) -> None:
    tiers = Tiers(pack, device, ram)
    for layer, experts, guesses in calls:
        tiers.fetch(layer, *experts)
        assert not set(tiers.in_ram(layer)) & set(experts)
        tiers.cache.prefetch(layer, guesses)
    resident = set(tiers.cache.retire())
    assert not [key for key in resident if key in tiers.store.ram]
    kept = sum(len(tiers.in_ram(layer)) for layer in (0, 3))
    assert kept <= ram[0]
    tiers.close()


def test_a_read_that_fails_leaves_both_tiers_as_they_were(
    tmp_path: Path, open_tiers: Callable[..., Tiers]
) -> None:
    tiers = Tiers(write_expert_pack(tmp_path / "experts.lmpack"), DEVICE, (3, 2))
    tiers.fetch(3, 0, 1, 2, 3)
    bad = tiers.pack.expert_path(ExpertKey(0, 2))
    aside = bad.rename(tmp_path / "aside")
    for _ in range(5):
        with pytest.raises(StorageError, match="L000/E0002"):
            tiers.cache.fetch(0, [0, 1, 2, 3])
    assert 2 not in tiers.in_ram(0)
    tiers.fetch(3, 0, 1, 2, 3)
    aside.rename(bad)
    tiers.fetch(0, 0, 1, 2, 3)
    tiers.close()


def test_closing_ends_copies_that_are_held_back_and_joins_their_thread(pack: Pack) -> None:
    before = set(threading.enumerate())
    tiers = Tiers(pack, DEVICE, (4, 2))
    key = ExpertKey(0, 1)
    slot = tiers.store.acquire(key)
    assert slot is not None
    tiers.store.read(key, slot)
    tiers.copies.hold_back()
    tiers.store.release(key, slot)
    tiers.cache.close()
    tiers.cache.close()
    assert not set(threading.enumerate()) - before

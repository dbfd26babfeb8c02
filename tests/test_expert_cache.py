"""The expert cache over both stores: what is asked for is there, and nothing else has to be."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmpack.errors import BudgetError, StorageError
from lmpack.expert_key import ExpertKey
from profiles.policies.lru import LRU
from runtime.expert_cache import ExpertCache
from runtime.expert_store import open_store
from tests.expert_packs import budget_with_slots, write_expert_pack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from lmpack.pack import Pack

STORES = ("mmap", "direct")
ROOMY = (9, 5)  # a slot for every expert: layers 0 and 3 have nine together, layers 1 and 4 have five
NARROW = (4, 2)


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    return write_expert_pack(tmp_path_factory.mktemp("experts") / "experts.lmpack")


@pytest.fixture(params=STORES)
def make_cache(request: pytest.FixtureRequest, pack: Pack) -> Iterator[Callable[..., ExpertCache]]:
    """Open a cache with so many slots per layout; closed after the test."""
    opened: list[ExpertCache] = []

    def make(*slots: int, clock: Callable[[], float] = time.perf_counter) -> ExpertCache:
        budget = budget_with_slots(pack.manifest, *slots)
        store = open_store(request.param, pack, budget)
        opened.append(ExpertCache(store, budget, make_policy=lambda pool: LRU(), clock=clock))
        return opened[-1]

    yield make
    for cache in opened:
        cache.close()


def slot_bytes(cache: ExpertCache, layer: int, slot: int) -> bytes:
    bank = cache.bank(layer)
    return bank.storage[slot * bank.stride : (slot + 1) * bank.stride].numpy().tobytes()


class TestEveryStore:
    def test_the_slots_hold_the_experts_in_the_order_they_were_asked_for(
        self, make_cache: Callable[..., ExpertCache], pack: Pack
    ) -> None:
        cache = make_cache(*NARROW)
        experts = [3, 0, 2]
        slots = cache.fetch(0, experts)
        assert len(set(slots)) == 3
        for expert, slot in zip(experts, slots, strict=True):
            assert slot_bytes(cache, 0, slot) == pack.read_expert(ExpertKey(0, expert))

    def test_an_expert_asked_for_twice_has_one_slot_and_counts_once(
        self, make_cache: Callable[..., ExpertCache]
    ) -> None:
        cache = make_cache(*ROOMY)
        first, second, third = cache.fetch(0, [1, 2, 1])
        assert first == third != second
        assert (cache.hits, cache.misses) == (0, 2)
        assert cache.fetch(0, [2, 2]) == [second, second]
        assert (cache.hits, cache.misses) == (1, 2)

    def test_it_counts_hits_misses_evictions_bytes_and_the_time_of_reads(
        self, make_cache: Callable[..., ExpertCache]
    ) -> None:
        ticks = iter(range(100))
        cache = make_cache(*NARROW, clock=lambda: float(next(ticks)))
        stride = cache.bank(0).stride
        cache.fetch(0, [0, 1, 2])
        cache.fetch(0, [1, 2])
        cache.fetch(3, [0, 1])
        assert (cache.hits, cache.misses, cache.evictions) == (2, 5, 1)
        assert cache.bytes_read == 5 * stride
        assert cache.read_s == 2.0  # two reads of one tick each; the fetch without a miss asks for no time

    def test_the_longest_unused_expert_of_the_layout_goes_first(
        self, make_cache: Callable[..., ExpertCache]
    ) -> None:
        cache = make_cache(*NARROW)
        for layer, expert in ((0, 0), (0, 1), (3, 0), (3, 1), (0, 0), (3, 2)):  # the last one needs a place
            cache.fetch(layer, [expert])
        misses = cache.misses
        for layer, expert in ((0, 0), (3, 0), (3, 1), (3, 2)):
            cache.fetch(layer, [expert])
        assert cache.misses == misses
        cache.fetch(0, [1])
        assert cache.misses == misses + 1

    def test_layouts_do_not_take_each_others_places(self, make_cache: Callable[..., ExpertCache]) -> None:
        cache = make_cache(*NARROW)
        cache.fetch(1, [0, 1])
        for expert in range(5):
            cache.fetch(0, [expert])
        cache.fetch(1, [0, 1])
        assert cache.hits == 2

    def test_the_experts_of_a_call_never_go_for_each_other(
        self, make_cache: Callable[..., ExpertCache], pack: Pack
    ) -> None:
        cache = make_cache(*NARROW)
        cache.fetch(0, [0])  # the oldest by now, and asked for again with three new ones
        cache.fetch(3, [0, 1, 2])
        slots = cache.fetch(0, [1, 2, 3, 0])
        assert len(set(slots)) == 4
        for expert, slot in zip([1, 2, 3, 0], slots, strict=True):
            assert slot_bytes(cache, 0, slot) == pack.read_expert(ExpertKey(0, expert))

    def test_more_experts_than_slots_are_refused_and_nothing_is_lost(
        self, make_cache: Callable[..., ExpertCache]
    ) -> None:
        cache = make_cache(*NARROW)
        assert cache.capacity(0) == 4
        cache.fetch(0, [0, 1, 2, 3])
        with pytest.raises(BudgetError, match="layer 0: 5 experts at once do not fit 4 slots"):
            cache.fetch(0, [0, 1, 2, 3, 4])
        cache.fetch(0, [3, 3, 2, 1, 0])
        assert (cache.hits, cache.misses) == (4, 4)

    def test_a_closed_cache_holds_nothing_and_can_be_closed_again(
        self, make_cache: Callable[..., ExpertCache]
    ) -> None:
        cache = make_cache(*ROOMY)
        cache.fetch(0, [0])
        cache.close()
        cache.close()
        with pytest.raises(ValueError, match="closed"):
            cache.fetch(0, [0])

    def test_its_policy_can_be_named(self, make_cache: Callable[..., ExpertCache]) -> None:
        assert make_cache(*ROOMY).policy_name == "lru"

    def test_a_warm_start_reads_the_first_that_fit_and_keeps_the_first_longest(
        self, make_cache: Callable[..., ExpertCache], pack: Pack
    ) -> None:
        cache = make_cache(*NARROW)
        cache.warm([ExpertKey(3, 1), ExpertKey(0, 4), ExpertKey(1, 2), ExpertKey(0, 0), ExpertKey(3, 0)])
        assert cache.warmed == 5
        assert (cache.hits, cache.misses, cache.bytes_read) == (0, 0, 0)
        for layer, experts in ((0, [0, 4]), (3, [1, 0]), (1, [2])):
            for expert, slot in zip(experts, cache.fetch(layer, experts), strict=True):
                assert slot_bytes(cache, layer, slot) == pack.read_expert(ExpertKey(layer, expert))
        assert (cache.hits, cache.misses) == (5, 0)

    def test_the_order_at_the_end_is_from_the_best_to_the_next_victim(
        self, make_cache: Callable[..., ExpertCache]
    ) -> None:
        cache = make_cache(*NARROW)
        first = [ExpertKey(0, 2), ExpertKey(3, 0), ExpertKey(0, 1), ExpertKey(1, 1)]
        cache.warm(first)
        assert cache.retire() == first
        cache.close()


@pytest.mark.parametrize("store", STORES)
def test_after_a_failed_warm_start_the_cache_is_empty_and_whole(tmp_path: Path, store: str) -> None:
    pack = write_expert_pack(tmp_path / "experts.lmpack")
    budget = budget_with_slots(pack.manifest, *NARROW)
    cache = ExpertCache(open_store(store, pack, budget), budget)
    bad = pack.expert_path(ExpertKey(3, 2))
    aside = bad.rename(tmp_path / "aside")
    with pytest.raises(StorageError, match="L003/E0002"):
        cache.warm([ExpertKey(0, 1), ExpertKey(3, 2), ExpertKey(0, 2)])
    aside.rename(bad)
    assert cache.warmed == 0
    slots = cache.fetch(0, [0, 1, 2, 3])
    assert (cache.hits, cache.misses, cache.evictions) == (0, 4, 0)
    for expert, slot in enumerate(slots):
        assert slot_bytes(cache, 0, slot) == pack.read_expert(ExpertKey(0, expert))
    cache.close()


@pytest.mark.parametrize("store", STORES)
def test_after_a_failed_read_the_cache_goes_on_with_all_its_slots(tmp_path: Path, store: str) -> None:
    pack = write_expert_pack(tmp_path / "experts.lmpack")
    budget = budget_with_slots(pack.manifest, *NARROW)
    cache = ExpertCache(open_store(store, pack, budget), budget)
    cache.fetch(0, [0])
    bad = pack.expert_path(ExpertKey(0, 2))
    aside = bad.rename(tmp_path / "aside")
    for _ in range(3):
        with pytest.raises(StorageError, match="L000/E0002"):
            cache.fetch(0, [0, 1, 2, 3])
    assert (cache.hits, cache.misses) == (0, 1)
    aside.rename(bad)
    slots = cache.fetch(0, [0, 1, 2, 3])
    assert (cache.hits, cache.misses, cache.evictions) == (1, 4, 0)
    for expert, slot in enumerate(slots):
        assert slot_bytes(cache, 0, slot) == pack.read_expert(ExpertKey(0, expert))
    cache.close()


@settings(max_examples=40)
@given(
    calls=st.lists(
        st.sampled_from([(0, 5), (1, 3), (3, 4), (4, 2)]).flatmap(
            lambda layer: st.tuples(
                st.just(layer[0]), st.lists(st.integers(0, layer[1] - 1), max_size=6).map(tuple)
            )
        ),
        max_size=30,
    ),
    slots=st.tuples(st.integers(4, 9), st.integers(3, 5)),
)
def test_whatever_is_asked_for_both_stores_give_the_right_bytes_and_the_same_figures(
    pack: Pack, calls: list[tuple[int, tuple[int, ...]]], slots: tuple[int, int]
) -> None:
    figures = []
    for store in STORES:
        budget = budget_with_slots(pack.manifest, *slots)
        cache = ExpertCache(open_store(store, pack, budget), budget, make_policy=lambda pool: LRU())
        for layer, experts in calls:
            if len(set(experts)) > cache.capacity(layer):
                continue
            for expert, slot in zip(experts, cache.fetch(layer, experts), strict=True):
                assert slot_bytes(cache, layer, slot) == pack.read_expert(ExpertKey(layer, expert))
        figures.append((cache.hits, cache.misses, cache.evictions, cache.bytes_read))
        cache.close()
    assert figures == [_simulated(pack, calls, slots)] * 2


def _simulated(
    pack: Pack, calls: list[tuple[int, tuple[int, ...]]], slots: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Hits, misses, evictions and bytes read by the same policy class over keys alone."""
    policies = (LRU(), LRU())
    resident: tuple[set[ExpertKey], set[ExpertKey]] = (set(), set())
    hits = misses = evictions = nbytes = 0
    for layer, experts in calls:
        layout = 0 if layer in (0, 3) else 1
        wanted = dict.fromkeys(ExpertKey(layer, expert) for expert in experts)
        if len(wanted) > slots[layout]:
            continue
        missing = [key for key in wanted if key not in resident[layout]]
        for key in reversed(wanted):
            if key not in missing:
                policies[layout].touch(key)
                hits += 1
        while len(resident[layout]) + len(missing) > slots[layout]:
            victim = policies[layout].victim(missing[0], wanted)
            policies[layout].forget(victim)
            resident[layout].remove(victim)
            evictions += 1
        for key in reversed(missing):
            policies[layout].touch(key)
            resident[layout].add(key)
            misses += 1
            nbytes += pack.manifest.layer(layer).stride
    return hits, misses, evictions, nbytes

"""What the expert stores promise, and what each promises beyond that."""

from __future__ import annotations

import itertools
import mmap
import os
import resource
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from lmpack.errors import StorageError, UsageError
from lmpack.expert_key import ExpertKey
from lmpack.pack import Pack
from profiles.policies.lru import LRU
from runtime.device_store import DeviceStore
from runtime.direct_store import DirectStore, refusal_of_direct_reads
from runtime.expert_store import open_store
from runtime.mmap_store import MmapStore
from runtime.twin_copies import TwinCopies
from tests.expert_packs import (
    SMALL,
    all_keys,
    budget_with_slots,
    load,
    write_expert_pack,
    write_identical_experts,
)
from tests.page_cache import forget, pages_in_cache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from runtime.expert_store import ExpertStore
    from runtime.memory_budget import MemoryBudget

TINY = [("down", "F32", (4, 4))]  # one page


def twin_store(pack: Pack, budget: MemoryBudget) -> DeviceStore:
    """Slots in a device's memory, over a RAM tier of three and two."""
    ram_budget = budget_with_slots(pack.manifest, *(3, 2)[: len(budget.layouts)])
    return DeviceStore.open(pack, budget, ram_budget, lambda pool: LRU(), TwinCopies())


STORES: dict[str, Callable[..., ExpertStore]] = {
    "mmap": MmapStore,
    "mmap on an old kernel": partial(MmapStore, populate=False),
    "direct": DirectStore,
    "direct buffered": partial(DirectStore, buffered=True),
    "device": twin_store,
}


@pytest.fixture(scope="module")
def whole_pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    return write_expert_pack(tmp_path_factory.mktemp("experts") / "experts.lmpack")


@pytest.fixture
def pack(whole_pack: Pack, tmp_path: Path) -> Pack:
    """A copy that a test may damage."""
    return Pack.open(shutil.copytree(whole_pack.path, tmp_path / "experts.lmpack"))


@pytest.fixture(params=STORES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def store(kind: str, pack: Pack) -> Iterator[ExpertStore]:
    """A store with room for every expert."""
    store = STORES[kind](pack, budget_with_slots(pack.manifest))
    yield store
    store.close()


@pytest.fixture
def narrow_store(kind: str, pack: Pack) -> Iterator[ExpertStore]:
    """A store with four slots for the experts of layers 0 and 3, and two for those of layers 1 and 4."""
    store = STORES[kind](pack, budget_with_slots(pack.manifest, 4, 2))
    yield store
    store.close()


def acquire(store: ExpertStore, keys: Sequence[ExpertKey]) -> list[int]:
    slots = [store.acquire(key) for key in keys]
    return [slot for slot in slots if slot is not None]


def slot_bytes(store: ExpertStore, key: ExpertKey, slot: int) -> bytes:
    bank = store.bank(key.layer)
    return bank.storage[slot * bank.stride : (slot + 1) * bank.stride].numpy().tobytes()


def resident_nbytes() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) * 1024


def is_mapped(address: int) -> bool:
    """Whether a mapping has this address; the kernel merges neighbours, so it may begin before it."""
    lines = Path("/proc/self/maps").read_text(encoding="ascii").splitlines()
    ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
    return any(start <= address < stop for start, stop in ranges)


class TestEveryStore:
    def test_a_loaded_expert_has_the_bytes_of_its_file(self, store: ExpertStore, pack: Pack) -> None:
        keys = all_keys(pack)
        slots = acquire(store, keys)
        load(store, keys, slots)
        for key, slot in zip(keys, slots, strict=True):
            assert slot_bytes(store, key, slot) == pack.read_expert(key)

    def test_it_still_has_them_after_an_eviction(self, narrow_store: ExpertStore, pack: Pack) -> None:
        for _ in range(2):
            for key in all_keys(pack):
                (slot,) = acquire(narrow_store, [key])
                load(narrow_store, [key], [slot])
                assert slot_bytes(narrow_store, key, slot) == pack.read_expert(key)
                narrow_store.release(key, slot)

    def test_a_layers_slots_lie_in_its_bank(
        self, store: ExpertStore, narrow_store: ExpertStore, pack: Pack
    ) -> None:
        for either in (store, narrow_store):
            for entry in pack.manifest.layers:
                bank = either.bank(entry.layer)
                assert (bank.stride, bank.parts) == (entry.stride, entry.parts)
                assert bank.storage.shape == (bank.num_slots * bank.stride,)
                assert bank.storage.data_ptr() % mmap.PAGESIZE == 0
                slot = either.acquire(ExpertKey(entry.layer, 1))
                assert slot is not None
                assert 0 <= slot < bank.num_slots

    def test_layers_with_one_layout_share_the_slots_that_the_budget_gives(
        self, narrow_store: ExpertStore
    ) -> None:
        assert [narrow_store.num_slots(layer) for layer in (0, 1, 3, 4)] == [4, 2, 4, 2]
        keys = [ExpertKey(0, 0), ExpertKey(3, 0), ExpertKey(0, 1), ExpertKey(3, 1)]
        slots = acquire(narrow_store, keys)
        assert len(slots) == 4
        assert narrow_store.acquire(ExpertKey(0, 2)) is None
        assert narrow_store.acquire(ExpertKey(1, 2)) is not None
        narrow_store.release(keys[1], slots[1])
        assert narrow_store.acquire(ExpertKey(0, 2)) is not None
        assert narrow_store.acquire(ExpertKey(0, 3)) is None

    def test_identical_experts_are_each_loaded_from_their_one_file(
        self, store: ExpertStore, pack: Pack
    ) -> None:
        keys = [ExpertKey(0, 0), ExpertKey(0, 4)]
        assert pack.expert_path(keys[0]) == pack.expert_path(keys[1])
        slots = acquire(store, keys)
        load(store, keys, slots)
        store.release(keys[0], slots[0])
        assert slot_bytes(store, keys[1], slots[1]) == pack.read_expert(keys[1])

    @pytest.mark.parametrize("damage", ["missing", "truncated", "grown", "a link", "a folder", "a pipe"])
    def test_a_damaged_file_is_named_and_the_others_are_still_read(
        self, store: ExpertStore, pack: Pack, damage: str
    ) -> None:
        bad = ExpertKey(3, 2)
        path = pack.expert_path(bad)
        raw = path.read_bytes()
        path.unlink()
        if damage in ("truncated", "grown"):
            path.write_bytes(raw[:-4096] if damage == "truncated" else raw + bytes(4096))
        elif damage == "a link":
            path.symlink_to(pack.expert_path(ExpertKey(3, 1)).name)
        elif damage == "a folder":
            path.mkdir()
        elif damage == "a pipe":
            os.mkfifo(path)
        keys = all_keys(pack)
        slots = acquire(store, keys)
        with pytest.raises(StorageError, match=rf"L003/E0002.*{path.name}.*lmpack validate"):
            load(store, keys, slots)
        with pytest.raises(StorageError, match="L003/E0002"):
            load(store, [bad], [slots[keys.index(bad)]])
        for key, slot in zip(keys, slots, strict=True):
            store.release(key, slot)
        good = [key for key in keys if key != bad]
        slots = acquire(store, good)
        load(store, good, slots)
        for key, slot in zip(good, slots, strict=True):
            assert slot_bytes(store, key, slot) == pack.read_expert(key)

    def test_the_first_of_several_failures_is_the_one_raised(self, store: ExpertStore, pack: Pack) -> None:
        keys = all_keys(pack)
        for key in (keys[9], keys[3]):
            pack.expert_path(key).unlink()
        with pytest.raises(StorageError, match=str(keys[3])):
            load(store, keys, acquire(store, keys))

    def test_closing_gives_the_addresses_back(self, kind: str, whole_pack: Pack) -> None:
        store = STORES[kind](whole_pack, budget_with_slots(whole_pack.manifest))
        keys = all_keys(whole_pack)
        load(store, keys, acquire(store, keys))
        first = store.bank(0).storage.data_ptr()
        assert is_mapped(first)
        store.close()
        assert not is_mapped(first)

    def test_a_closed_store_says_so_and_can_be_closed_again(self, store: ExpertStore) -> None:
        store.close()
        store.close()
        key = ExpertKey(0, 0)
        for call in (
            lambda: store.bank(0),
            lambda: store.acquire(key),
            lambda: store.read(key, 0),
            lambda: store.release(key, 0),
        ):
            with pytest.raises(ValueError, match="closed"):
                call()

    def test_few_descriptors_are_enough_for_many_experts(self, kind: str, tmp_path: Path) -> None:
        pack = write_identical_experts(tmp_path / "many.lmpack", {0: (400, SMALL), 1: (400, SMALL)})
        store = STORES[kind](pack, budget_with_slots(pack.manifest))
        keys = all_keys(pack)
        slots = acquire(store, keys)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        taken = {int(name) for name in os.listdir("/proc/self/fd")}
        free = (number for number in itertools.count() if number not in taken)
        resource.setrlimit(resource.RLIMIT_NOFILE, (next(itertools.islice(free, 16, None)), hard))
        try:
            load(store, keys, slots)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        store.close()

    def test_a_pack_without_experts_needs_no_slots(self, kind: str, whole_pack: Pack) -> None:
        dense = replace(whole_pack, manifest=replace(whole_pack.manifest, layers=()))
        store = STORES[kind](dense, budget_with_slots(dense.manifest))
        store.close()

    def test_the_page_cache_keeps_nothing_that_the_budget_does_not_count(
        self, kind: str, narrow_store: ExpertStore, pack: Pack
    ) -> None:
        forget(pack.expert_path(key) for key in all_keys(pack))
        first, second = [ExpertKey(0, 1), ExpertKey(0, 2)], [ExpertKey(3, 1), ExpertKey(3, 2)]
        slots = acquire(narrow_store, first)
        load(narrow_store, first, slots)
        for key, slot in zip(first, slots, strict=True):
            narrow_store.release(key, slot)
        load(narrow_store, second, acquire(narrow_store, second))
        kept = {key for key in all_keys(pack) if pages_in_cache(pack.expert_path(key))}
        assert kept == (set(second) if kind.startswith("mmap") else set())


class TestMmapStore:
    def test_an_expert_is_in_the_slot_of_its_number(self, whole_pack: Pack) -> None:
        store = MmapStore(whole_pack, budget_with_slots(whole_pack.manifest, 2, 2))
        assert store.acquire(ExpertKey(0, 3)) == 3
        assert store.bank(0).num_slots == 5
        store.close()

    def test_released_experts_leave_no_mapping_behind(self, tmp_path: Path) -> None:
        pack = write_identical_experts(tmp_path / "many.lmpack", {0: (300, SMALL)})
        store = MmapStore(pack, budget_with_slots(pack.manifest))
        before = num_mappings()
        every_other = all_keys(pack)[::2]
        slots = acquire(store, every_other)
        load(store, every_other, slots)
        assert num_mappings() - before >= 2 * len(every_other) - 2
        for key, slot in zip(every_other, slots, strict=True):
            store.release(key, slot)
        assert num_mappings() - before < 20
        store.close()

    def test_a_limit_of_mappings_limits_the_slots_and_is_said(self, whole_pack: Pack) -> None:
        budget = budget_with_slots(whole_pack.manifest, 9, 1)
        store = MmapStore(whole_pack, budget, max_mappings=12)
        assert [store.num_slots(0), store.num_slots(1)] == [3, 1]
        assert store.name == "mmap (4 experts at a time, by vm.max_map_count)"
        store.close()
        assert MmapStore(whole_pack, budget, max_mappings=14).name == "mmap"

    def test_more_experts_than_the_kernel_allows_mappings(self, tmp_path: Path) -> None:
        pack = write_identical_experts(tmp_path / "many.lmpack", {0: (31_000, TINY), 1: (31_000, TINY)})
        store = MmapStore(pack, budget_with_slots(pack.manifest))
        num_slots = store.num_slots(0)
        if "max_map_count" not in store.name:
            store.close()
            pytest.skip("this kernel allows more mappings than that")
        every_other = all_keys(pack)[::2][:num_slots]  # nothing to merge: the most mappings there can be
        load(store, every_other, acquire(store, every_other))
        assert num_mappings() > 1.9 * num_slots
        store.close()


class TestDirectStore:
    def test_it_says_whether_it_reads_past_the_page_cache(self, whole_pack: Pack) -> None:
        budget = budget_with_slots(whole_pack.manifest)
        store = DirectStore(whole_pack, budget, buffered=True)
        assert not store.direct
        assert store.name == "direct (buffered: asked for)"
        store.close()
        store = DirectStore(whole_pack, budget)
        assert store.name == (
            "direct" if store.direct else "direct (buffered: the file system refuses O_DIRECT)"
        )
        store.close()

    def test_a_file_system_that_refuses_direct_reads_is_recognised(self, whole_pack: Pack) -> None:
        assert refusal_of_direct_reads(Path("/proc/self/status"), 0) == "the file system refuses O_DIRECT"
        assert refusal_of_direct_reads(whole_pack.path / "missing", 0) == ""

    def test_memory_is_taken_when_a_slot_is_first_filled(self, tmp_path: Path) -> None:
        pack = write_identical_experts(tmp_path / "large.lmpack", {0: (400, [("down", "F32", (512, 256))])})
        before = resident_nbytes()
        store = DirectStore(pack, budget_with_slots(pack.manifest))
        assert store.bank(0).storage.numel() == 200 << 20
        assert resident_nbytes() - before < 100 << 20
        store.close()

    def test_where_all_experts_fit_each_layer_has_its_own_bank(self, whole_pack: Pack) -> None:
        store = DirectStore(whole_pack, budget_with_slots(whole_pack.manifest))
        assert [store.bank(layer).num_slots for layer in (0, 1, 3, 4)] == [5, 3, 4, 2]
        assert store.acquire(ExpertKey(3, 2)) == 2
        store.close()
        store = DirectStore(whole_pack, budget_with_slots(whole_pack.manifest, 8, 5))
        assert [store.bank(layer).num_slots for layer in (0, 1, 3, 4)] == [8, 3, 8, 2]
        store.close()


def num_mappings() -> int:
    return Path("/proc/self/maps").read_text(encoding="ascii").count("\n")


@pytest.mark.parametrize(("name", "opened"), [("mmap", MmapStore), ("direct", DirectStore)])
def test_stores_are_opened_by_name(whole_pack: Pack, name: str, opened: type[ExpertStore]) -> None:
    store = open_store(name, whole_pack, budget_with_slots(whole_pack.manifest))
    assert isinstance(store, opened)
    store.close()


def test_an_unknown_store_is_refused_with_the_known_ones(whole_pack: Pack) -> None:
    with pytest.raises(UsageError, match="'nfs'; expected mmap or direct"):
        open_store("nfs", whole_pack, budget_with_slots(whole_pack.manifest))

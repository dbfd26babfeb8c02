"""How experts are read: asked for, or measured once for each drive and remembered."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from lmpack.errors import UsageError
from runtime import io_choice
from runtime.drive_memory import drive_id, drive_memory_file, recall_rates, remember_rates
from runtime.io_choice import DEPTHS, choose_io, fastest, measure_stores
from tests.expert_packs import SMALL, budget_with_slots, write_expert_pack

if TYPE_CHECKING:
    from pathlib import Path

    from lmpack.pack import Pack

RATES = {"direct": {4: 1.0, 8: 1.9, 16: 2.0}, "mmap": {4: 1.0, 8: 1.1, 16: 1.2}}


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    return write_expert_pack(tmp_path_factory.mktemp("experts") / "experts.lmpack", {0: (64, SMALL)})


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No figures of the user's; every pack is large enough to be measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(io_choice, "_SMALLEST_NBYTES", 0)
    return tmp_path / "cache"


def test_the_faster_store_is_chosen_with_the_fewest_reads_that_are_near_its_best() -> None:
    choice = fastest(RATES, "measured now")
    assert (choice.store, choice.num_readers) == ("direct", 8)
    assert choice.reason == "measured now: direct 2.00 GB/s, mmap 1.20"


def test_mapping_must_be_worth_it() -> None:
    assert fastest({"direct": {8: 1.0}, "mmap": {8: 1.05}}, "").store == "direct"
    assert fastest({"direct": {8: 1.0}, "mmap": {4: 1.5, 8: 1.51}}, "").num_readers == 4


def test_what_is_asked_for_is_not_measured(pack: Pack, cache_home: Path) -> None:
    budget = budget_with_slots(pack.manifest, 8)
    assert choose_io("mmap", pack, budget).store == "mmap"
    assert choose_io("direct", pack, budget).reason == "asked for"
    with pytest.raises(UsageError, match="'nfs'; expected auto, mmap or direct"):
        choose_io("nfs", pack, budget)
    assert not cache_home.exists()


def test_a_drive_is_measured_once(pack: Pack, cache_home: Path) -> None:
    budget = budget_with_slots(pack.manifest, 8)
    first = choose_io("auto", pack, budget)
    assert first.reason.startswith("measured now: direct ")
    again = choose_io("auto", pack, budget)
    assert again.reason.startswith("measured before: direct ")
    assert (again.store, again.num_readers) == (first.store, first.num_readers)
    (rates,) = json.loads((cache_home / "lmpack" / "drives.json").read_bytes()).values()
    assert rates.keys() == {"direct", "mmap"}
    assert choose_io("auto", pack, budget, anew=True).reason.startswith("measured now: ")


def test_both_stores_are_measured_at_every_depth(pack: Pack) -> None:
    rates = measure_stores(pack, budget_with_slots(pack.manifest, 8))
    assert {store: tuple(by_depth) for store, by_depth in rates.items()} == dict.fromkeys(
        ("direct", "mmap"), DEPTHS
    )
    assert all(rate > 0 for by_depth in rates.values() for rate in by_depth.values())


def test_where_all_of_it_fits_the_page_cache_keeps_it(pack: Pack, cache_home: Path) -> None:
    assert choose_io("auto", pack, budget_with_slots(pack.manifest)).store == "mmap"
    assert not cache_home.exists()  # nothing to measure
    assert choose_io("auto", pack, budget_with_slots(pack.manifest, 63)).reason.startswith("measured now: ")


def test_a_small_pack_is_not_measured(pack: Pack, cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    choice = choose_io("auto", pack, budget_with_slots(pack.manifest))
    assert (choice.store, choice.reason) == ("direct", "below 256.0 MiB it is not measured")


def test_figures_are_kept_apart_by_drive_and_size(tmp_path: Path) -> None:
    assert recall_rates(tmp_path, 3 << 20) is None
    assert remember_rates(tmp_path, 3 << 20, RATES) == ""
    assert recall_rates(tmp_path, 3 << 20) == RATES
    assert recall_rates(tmp_path, 4 << 20) == RATES  # to the same power of two
    assert recall_rates(tmp_path, 5 << 20) is None
    assert remember_rates(tmp_path, 5 << 20, RATES) == ""
    assert recall_rates(tmp_path, 3 << 20) == RATES
    assert drive_id(tmp_path, 1 << 20) != drive_id(tmp_path.__class__("/proc"), 1 << 20)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"no json",
        b"[]",
        b"{}",
        b'{"x": 1}',
        b'{"ID": {"direct": {"8": 1.0}}}',
        b'{"ID": {"direct": {"8": 1.0}, "mmap": 1}}',
        b'{"ID": {"direct": {"8": 1.0}, "mmap": {}}}',
        b'{"ID": {"direct": {"8": 1.0}, "mmap": {"8": "1"}}}',
        b'{"ID": {"direct": {"8": 1.0}, "mmap": {"0": 1.0}}}',
    ],
)
def test_figures_that_cannot_be_read_are_measured_again_and_that_is_said(pack: Pack, raw: bytes) -> None:
    budget = budget_with_slots(pack.manifest, 8)
    file = drive_memory_file()
    file.parent.mkdir(parents=True)
    file.write_bytes(raw.replace(b"ID", drive_id(pack.path, budget.layouts[0].stride).encode()))
    assert choose_io("auto", pack, budget).reason.startswith(f"measured now ({file} was damaged: ")
    assert choose_io("auto", pack, budget).reason.startswith("measured before: ")


def test_figures_that_cannot_be_kept_are_used_and_that_is_said(pack: Pack, cache_home: Path) -> None:
    cache_home.write_bytes(b"a file where a folder should be")
    choice = choose_io("auto", pack, budget_with_slots(pack.manifest, 8))
    assert choice.reason.startswith("measured now, but not remembered: ")


@pytest.mark.usefixtures("a_user_without_a_home")
def test_a_user_without_a_home_measures_each_time_and_is_told_why(pack: Pack) -> None:
    for _ in range(2):
        choice = choose_io("auto", pack, budget_with_slots(pack.manifest, 8))
        assert choice.reason.startswith("measured now, but not remembered: user ")
        assert "set HOME or XDG_CACHE_HOME" in choice.reason

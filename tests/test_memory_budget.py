"""The memory budget: what it gives to whom, the smallest that works, and what is free on a machine."""

from __future__ import annotations

import mmap
import re
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmpack.byte_size import parse_byte_size
from lmpack.errors import BudgetError
from runtime.free_memory import free_memory_nbytes, peak_resident_nbytes
from runtime.memory_budget import Memory, MemoryBudget, process_nbytes
from tests.expert_packs import LAYERS, SMALL, identical_experts
from tests.smallest_budget import smallest_budget

if TYPE_CHECKING:
    from pathlib import Path

    from lmpack.manifest import Manifest

MIB = 1 << 20
GIB = 1 << 30
FIXED: dict[str, Any] = {"dense_nbytes": 7 * MIB, "kv_nbytes": 5 * MIB, "buffers_nbytes": 3 * MIB}


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """Up to six layers of up to 40 experts, in up to three layouts."""
    sizes = draw(st.lists(st.tuples(st.integers(1, 40), st.sampled_from([1, 3, 700])), max_size=6))
    return identical_experts(
        {
            layer: (num_experts, [("down", "F32", (pages, 1024))])
            for layer, (num_experts, pages) in enumerate(sizes)
        }
    )


def plan(manifest: Manifest, ram_nbytes: int | None, top_k: int = 2) -> MemoryBudget:
    return MemoryBudget.plan(manifest, ram_nbytes=ram_nbytes, top_k=top_k, **FIXED)


def smallest_nbytes(manifest: Manifest, top_k: int = 2) -> int:
    """What the error for a budget of nothing names."""
    return smallest_budget(lambda: plan(manifest, 0, top_k))


def spent_nbytes(budget: MemoryBudget) -> int:
    return (
        budget.process_nbytes
        + budget.dense_nbytes
        + budget.kv_nbytes
        + budget.buffers_nbytes
        + budget.experts_nbytes
    )


@given(manifest=manifests(), top_k=st.integers(1, 8), extra_nbytes=st.integers(0, 200 * MIB))
def test_every_budget_from_the_smallest_on_is_legal_and_kept(
    manifest: Manifest, top_k: int, extra_nbytes: int
) -> None:
    budget = plan(manifest, smallest_nbytes(manifest, top_k) + extra_nbytes, top_k)
    assert spent_nbytes(budget) <= budget.total_nbytes
    for layout, num_slots in zip(budget.layouts, budget.slots, strict=True):
        assert min(top_k, layout.num_experts) <= num_slots <= layout.num_experts


@given(manifest=manifests(), top_k=st.integers(1, 8))
def test_the_smallest_works_and_a_byte_less_does_not(manifest: Manifest, top_k: int) -> None:
    smallest = smallest_nbytes(manifest, top_k)
    assert spent_nbytes(plan(manifest, smallest, top_k)) == smallest
    with pytest.raises(BudgetError, match=f"the smallest is {smallest} bytes"):
        plan(manifest, smallest - 1, top_k)


@given(manifest=manifests(), first=st.integers(0, 200 * MIB), more=st.integers(0, 20 * MIB))
def test_no_layout_loses_slots_when_the_budget_grows(manifest: Manifest, first: int, more: int) -> None:
    smallest = smallest_nbytes(manifest)
    smaller, larger = plan(manifest, smallest + first), plan(manifest, smallest + first + more)
    assert all(a <= b for a, b in zip(smaller.slots, larger.slots, strict=True))


def test_the_error_names_a_size_that_can_be_typed_and_works() -> None:
    manifest = identical_experts(LAYERS)
    with pytest.raises(BudgetError) as caught:
        plan(manifest, 300 * MIB)
    assert "the memory budget is 300.0 MiB" in str(caught.value)
    named = re.search(r"--ram (\S+) or more", str(caught.value))
    assert named is not None
    assert plan(manifest, parse_byte_size(named[1])).slots >= (2, 2)


def test_with_enough_memory_every_expert_has_a_slot() -> None:
    budget = plan(identical_experts(LAYERS), 1 << 40)
    assert budget.slots == (9, 5)
    assert budget.resident_share == 1
    assert "100% resident" in budget.describe()


def test_layouts_share_by_the_bytes_they_hold() -> None:
    manifest = identical_experts(
        {0: (40, [("down", "F32", (1, 1024))]), 1: (40, [("down", "F32", (3, 1024))])}
    )
    everything = sum(entry.num_experts * entry.stride for entry in manifest.layers)
    fixed = process_nbytes() + sum(FIXED.values())
    assert plan(manifest, fixed + everything // 2).slots == (20, 20)


def test_a_layer_with_fewer_experts_than_top_k_needs_only_those() -> None:
    assert plan(identical_experts({0: (3, SMALL)}), 1 << 40, top_k=8).slots == (3,)


def test_a_dense_model_needs_no_slots() -> None:
    manifest = identical_experts({})
    budget = plan(manifest, smallest_nbytes(manifest))
    assert budget.slots == ()
    assert (budget.experts_nbytes, budget.resident_share) == (0, 1)


def test_the_default_leaves_a_tenth_of_what_is_free() -> None:
    memory = Memory("memory", "--ram", process_nbytes, lambda: 10 * GIB)
    budget = MemoryBudget.plan(identical_experts(LAYERS), ram_nbytes=None, top_k=2, memory=memory, **FIXED)
    assert budget.total_nbytes == 9 * GIB


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """The files of a machine with 8 GiB free and a process of 1 GiB."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text(
        "MemTotal:       33554432 kB\nMemAvailable:    8388608 kB\nHugePages_Total:       0\n"
    )
    (tmp_path / "proc" / "self" / "status").write_text("Name:\tpython3\nVmRSS:\t 1048576 kB\n")
    (tmp_path / "proc" / "self" / "cgroup").write_text("0::/\n")
    return tmp_path


def write_cgroup(folder: Path, figures: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in figures.items():
        (folder / name).write_text(text)


class TestFreeMemory:
    def test_what_the_process_has_counts_as_its_own(self, machine: Path) -> None:
        assert free_memory_nbytes(machine) == 9 * GIB

    @pytest.mark.parametrize("level", ["", "app.slice", "app.slice/run.scope"])
    def test_the_tightest_cgroup_above_the_process_counts(self, machine: Path, level: str) -> None:
        (machine / "proc" / "self" / "cgroup").write_text("0::/app.slice/run.scope\n")
        mount = machine / "sys" / "fs" / "cgroup"
        for folder in ("app.slice", "app.slice/run.scope"):
            write_cgroup(mount / folder, {"memory.max": "max\n", "memory.current": f"{7 * GIB}\n"})
        write_cgroup(
            mount / level,
            {
                "memory.max": f"{4 * GIB}\n",
                "memory.current": f"{3 * GIB}\n",
                "memory.stat": f"anon {GIB}\nfile {2 * GIB}\ninactive_file {GIB}\nactive_file {GIB // 2}\n",
            },
        )
        for folder in ("app.slice", "app.slice/run.scope"):
            if not (mount / folder / "memory.stat").exists():
                (mount / folder / "memory.stat").write_text("anon 0\n")
        assert free_memory_nbytes(machine) == GIB + GIB + GIB // 2 + GIB

    def test_what_is_charged_elsewhere_does_not_raise_a_cgroups_limit(self, machine: Path) -> None:
        write_cgroup(
            machine / "sys" / "fs" / "cgroup",
            {"memory.max": f"{2 * GIB}\n", "memory.current": f"{GIB // 2}\n", "memory.stat": "\n"},
        )
        assert free_memory_nbytes(machine) == 2 * GIB

    def test_a_throttling_limit_counts_too(self, machine: Path) -> None:
        write_cgroup(
            machine / "sys" / "fs" / "cgroup",
            {
                "memory.max": "max\n",
                "memory.high": f"{2 * GIB}\n",
                "memory.current": f"{GIB}\n",
                "memory.stat": "inactive_file 0\n",
            },
        )
        assert free_memory_nbytes(machine) == 2 * GIB

    @pytest.mark.parametrize("path", ["/docker/0a1b", "/"])
    def test_version_1_counts_also_where_a_container_sees_only_its_own_group(
        self, machine: Path, path: str
    ) -> None:
        (machine / "proc" / "self" / "cgroup").write_text(
            f"8:pids:{path}\n4:memory:{path}\n1:name=systemd:{path}\n0::{path}\n"
        )
        write_cgroup(
            machine / "sys" / "fs" / "cgroup" / "memory",
            {
                "memory.limit_in_bytes": f"{3 * GIB}\n",
                "memory.usage_in_bytes": f"{2 * GIB}\n",
                "memory.stat": f"inactive_file 0\ntotal_inactive_file {GIB // 4}\ntotal_active_file 0\n",
            },
        )
        assert free_memory_nbytes(machine) == GIB + GIB // 4 + GIB

    def test_a_cgroup_above_its_limit_leaves_nothing(self, machine: Path) -> None:
        write_cgroup(
            machine / "sys" / "fs" / "cgroup",
            {"memory.max": f"{GIB}\n", "memory.current": f"{2 * GIB}\n", "memory.stat": "\n"},
        )
        assert free_memory_nbytes(machine) == GIB

    def test_this_machine_has_some(self) -> None:
        assert 0 < free_memory_nbytes() < 1 << 50


def test_the_peak_is_this_processs_own_and_stays_when_memory_is_freed() -> None:
    before = peak_resident_nbytes()
    with mmap.mmap(-1, before) as memory:
        memory.write(bytes(before))
    assert peak_resident_nbytes() >= before * 1.5

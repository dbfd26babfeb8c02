"""--ram is a hard limit: on what a run takes where there is more, and in a memory cgroup of that size it lives."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import lmpack
from converters.conversion import convert
from runtime.engine import Engine
from tests.memory_cgroup import NoCgroupError, memory_cgroup
from tests.page_cache import forget
from tests.smallest_budget import smallest_budget

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.memory_cgroup import MemoryCgroup

SLACK = 1.05
CONTEXT = 256
PROMPT = (Path(lmpack.__file__).parent / "demo" / "heldout.txt").read_text(encoding="utf-8")[:600]


@contextmanager
def cgroup_of(nbytes: int) -> Iterator[MemoryCgroup]:
    try:
        with memory_cgroup(nbytes) as cgroup:
            yield cgroup
    except NoCgroupError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")


def run(cgroup: MemoryCgroup, pack: Path, *options: str) -> dict[str, Any]:
    """The stats of a run whose prompt needs most experts of the model."""
    command = [sys.executable, "-m", "lmpack", "run", str(pack), "-p", PROMPT, "--json"]
    fixed = ["-n", "4", "--context", str(CONTEXT), "--threads", "1", "--ignore-eos"]
    done = cgroup.run([*command, *fixed, *options], timeout_s=300)
    assert done.returncode == 0, done.stderr
    stats: dict[str, Any] = json.loads(done.stdout)["stats"]
    return stats


@pytest.fixture(scope="module")
def large_pack(demo_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """440 MiB of experts: more than what a budget sets aside for a process and the process does not take."""
    folder = tmp_path_factory.mktemp("large")
    source = folder / "m.gguf"
    shape = "--layers 6 --experts 56 --top-k 4 --hidden 1024 --expert-width 768 --heads 8 --kv-heads 2 --quant Q4_K"
    subprocess.run(
        [
            sys.executable,
            "-m",
            "benchmarks.random_gguf",
            str(source),
            "--vocab-from",
            str(demo_gguf),
            *shape.split(),
        ],
        cwd=Path(__file__).parents[1],
        check=True,
    )
    convert(source, folder / "m.lmpack")
    source.unlink()
    return folder / "m.lmpack"


@pytest.mark.parametrize("io", ["direct", "mmap"])
def test_a_run_takes_no_more_than_its_budget_where_there_is_more(large_pack: Path, io: str) -> None:
    ram_nbytes = smallest_budget(lambda: Engine.load(large_pack, ram=1, context_length=CONTEXT)) + (16 << 20)
    forget((large_pack / "experts").rglob("*.bin"))  # what is in the page cache already is charged to others
    with cgroup_of(4 * ram_nbytes) as cgroup:
        stats = run(cgroup, large_pack, "--ram", str(ram_nbytes), "--io", io)
        assert cgroup.peak_nbytes() <= ram_nbytes * SLACK
    assert stats["peak_rss_nbytes"] <= ram_nbytes * SLACK
    assert stats["bytes_read"] > 400 << 20  # kept, they would not have fitted


@pytest.mark.parametrize("io", ["direct", "mmap"])
def test_a_run_lives_within_a_cgroup_of_its_budget(demo_pack: Path, io: str) -> None:
    ram_nbytes = smallest_budget(lambda: Engine.load(demo_pack, ram=1, context_length=CONTEXT)) + (4 << 20)
    with cgroup_of(ram_nbytes) as cgroup:
        stats = run(cgroup, demo_pack, "--ram", str(ram_nbytes), "--io", io)
        assert cgroup.num_killed() == 0
    assert stats["evictions"] > 0

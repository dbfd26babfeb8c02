"""--ram is a hard limit: a run inside a memory cgroup of that size neither dies nor is charged more."""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING

import pytest

from lmpack.errors import BudgetError
from runtime.engine import Engine
from tests.memory_cgroup import NoCgroupError, memory_cgroup

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("io", ["direct", "mmap"])
def test_a_run_lives_within_a_cgroup_of_its_budget(demo_pack: Path, io: str) -> None:
    with pytest.raises(BudgetError) as refusal:
        Engine.load(demo_pack, ram=1)
    smallest_nbytes = int(re.findall(r"(\d+) bytes", str(refusal.value))[-1])
    ram_nbytes = smallest_nbytes + (4 << 20)
    command = [
        sys.executable,
        "-m",
        "lmpack",
        "run",
        str(demo_pack),
        "-p",
        "One day a fox",
        "-n",
        "8",
        "--json",
    ]
    options = ["--ram", str(ram_nbytes), "--io", io, "--threads", "1", "--ignore-eos"]
    try:
        with memory_cgroup(ram_nbytes) as cgroup:
            done = cgroup.run([*command, *options], timeout_s=300)
            assert done.returncode == 0, done.stderr
            assert cgroup.num_killed() == 0
            assert cgroup.peak_nbytes() <= ram_nbytes
    except NoCgroupError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    stats = json.loads(done.stdout)["stats"]
    assert stats["evictions"] > 0
    assert stats["peak_rss_nbytes"] <= ram_nbytes * 1.05

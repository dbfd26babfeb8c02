"""A mapped file that is cut short while the model runs: a line that names the expert, and exit code 1."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DEADLINE_S = 300
EXPERT = "L003/E0007"
CUT_SHORT = """
import os, sys
import torch
from lmpack.cli.bus_errors import name_bus_errors
from runtime.engine import Engine

pack, kernels, num_threads, reader = sys.argv[1:]
with Engine.load(pack, io="mmap", kernels=kernels, num_threads=int(num_threads)) as engine:
    name_bus_errors(engine)
    (slot,), bank = engine.cache.fetch(3, [7]), engine.cache.bank(3)
    os.truncate(f"{pack}/experts/L003/E0007.bin", 4096)
    if reader == "python":
        bytes(bank.storage.numpy()[slot * bank.stride + 8192 :][:1])
    else:
        engine.kernels.expert_ffn(torch.ones(1, engine.plan.config.hidden_size), [[slot]], bank)
"""
OTHER_MAPPING = """
import mmap, os, sys
from lmpack.cli.bus_errors import name_bus_errors
from runtime.engine import Engine

with Engine.load(sys.argv[1], io="mmap") as engine, open(sys.argv[2], "w+b") as file:
    name_bus_errors(engine)
    file.truncate(8192)
    mapped = mmap.mmap(file.fileno(), 8192)
    file.truncate(4096)
    mapped[5000]
"""


@pytest.fixture
def pack(demo_pack: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return shutil.copytree(demo_pack, tmp_path / "demo.lmpack")


def python(script: str, *args: str) -> tuple[int, str]:
    """Exit code and stderr of a script of its own."""
    command = [sys.executable, "-c", script, *args]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=DEADLINE_S, check=False)
    return ended.returncode, ended.stderr


@pytest.mark.parametrize(
    ("kernels", "num_threads", "reader"),
    [("ggml", "1", "kernels"), ("ggml", "4", "kernels"), ("torch", "2", "kernels"), ("torch", "1", "python")],
)
def test_the_expert_is_named_whoever_reads_it(
    pack: Path, kernels: str, num_threads: str, reader: str
) -> None:
    exit_code, errors = python(CUT_SHORT, str(pack), kernels, num_threads, reader)
    assert exit_code == 1
    assert errors == (
        f"lmpack: error: expert {EXPERT}: {pack}/experts/{EXPERT}.bin: cut short, or its drive failed, while it was "
        f"mapped; run: lmpack validate {pack}\n"
    )


def test_what_is_no_expert_ends_the_process_as_ever(pack: Path, tmp_path: Path) -> None:
    exit_code, errors = python(OTHER_MAPPING, str(pack), str(tmp_path / "file"))
    assert exit_code == -7  # SIGBUS
    assert "lmpack: error" not in errors


def test_a_run_ends_with_the_line(pack: Path) -> None:
    command = [sys.executable, "-m", "lmpack", "run", str(pack), "-p", "Once upon a time", "--io", "mmap"]
    with subprocess.Popen(
        [*command, "-n", "4000", "--ignore-eos", "--threads", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        maps = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8")
        files = set(re.findall(rf"{re.escape(str(pack))}/experts/\S+", maps))
        assert files
        for file in files:
            os.truncate(file, 4096)
        _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    line = errors.decode().splitlines()[-1]
    assert re.match(r"lmpack: error: expert L00\d/E00\d\d: .*; run: lmpack validate", line)

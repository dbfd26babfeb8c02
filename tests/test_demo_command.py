"""lmpack demo does the four jobs, and leaves what it was asked to keep."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from lmpack.cli.main import run
from lmpack.pack import Pack

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_the_demo_does_the_four_jobs_and_writes_readable_text(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["demo", "--keep", str(tmp_path)]) == 0
    shown, told = capfd.readouterr()
    jobs = re.findall(r"^\[\d/6\] (\w+):.*\n\$ lmpack (\w+) ", shown, re.MULTILINE)
    assert [job.lower() for job, _ in jobs] == [command for _, command in jobs]
    assert [command for _, command in jobs] == ["convert", "validate", "profile", "run", "run", "run"]
    steps = re.split(r"^\$ lmpack .*\n", shown, flags=re.MULTILINE)
    story, same_story, answer = steps[-3].split("\n\n[")[0], steps[-2].split("\n\n[")[0], steps[-1]
    assert len(story.split()) > 60
    assert story == same_story
    assert answer.strip() == "The capital of France is Paris."
    assert Pack.open(tmp_path / "demo.lmpack").manifest.architecture == "qwen3moe"
    assert (tmp_path / "demo.profile.safetensors").is_file()
    all_in_memory, half_in_memory = re.findall(r"([\d.]+ MiB) peak resident", told)
    assert all_in_memory != half_in_memory  # a process that ran both would report the larger one twice


def test_a_demo_never_starts_over_what_it_made(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "demo.lmpack").mkdir()
    assert run(["demo", "--keep", str(tmp_path)]) == 2
    shown, told = capfd.readouterr()
    assert not shown
    assert (
        told
        == f"lmpack: error: {tmp_path / 'demo.lmpack'}: exists; choose another folder, or delete it first\n"
    )


def test_a_demo_that_fails_stops_there_with_the_exit_code(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "demo.lmpack.partial").mkdir()  # as an interrupted demo leaves it
    assert run(["demo", "--keep", str(tmp_path)]) in {1, 2}
    shown, told = capfd.readouterr()
    assert "[1/6]" in shown
    assert "[2/6]" not in shown
    assert told.startswith("lmpack: error: ")

"""The options that load a model and draw tokens: what they take, and what their help says."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from lmpack.byte_size import format_nbytes
from lmpack.cli import perplexity, run
from lmpack.cli.sampling_options import sampling_params
from lmpack.errors import UsageError
from runtime.free_memory import free_memory_nbytes

if TYPE_CHECKING:
    from pathlib import Path

    import click

MIB = 1 << 20


def told(pack: Path, *options: str) -> str:
    """What a run of one token says on stderr."""
    result = CliRunner().invoke(run.command, [str(pack), "-p", "x", "-n", "1", *options])
    assert result.exit_code == 0
    return result.stderr


def budget_mib(shown: str) -> float:
    number, unit = re.findall(r"budget ([\d.]+) ([MG])iB", shown)[0]
    return float(number) * {"M": 1, "G": 1024}[unit]


def test_a_percentage_of_ram_is_one_of_what_is_free(demo_pack: Path) -> None:
    before = free_memory_nbytes() / MIB
    given = budget_mib(told(demo_pack, "--ram", "50%"))
    after = free_memory_nbytes() / MIB
    assert 0.4 * min(before, after) < given < 0.6 * max(before, after)  # other programs run beside this one


def test_more_ram_than_is_free_is_said_and_cut(demo_pack: Path) -> None:
    shown = told(demo_pack, "--ram", "100TiB")
    assert re.search(r"^--ram 100TiB: only [\d.]+ [MG]iB are free for this process, so that", shown)
    assert budget_mib(shown) * MIB < 100 << 40


def test_enough_ram_is_taken_as_it_is(demo_pack: Path) -> None:
    shown = told(demo_pack, "--ram", "900MiB")
    assert f"budget {format_nbytes(900 * MIB)}" in shown
    assert "--ram" not in shown


def test_more_threads_than_processors_are_said(demo_pack: Path) -> None:
    num_processors = len(os.sched_getaffinity(0))
    assert "--threads" not in told(demo_pack, "--threads", str(num_processors))
    shown = told(demo_pack, "--threads", str(num_processors + 1))
    assert f"--threads {num_processors + 1}: this process may use {num_processors} processor" in shown


@pytest.mark.parametrize(
    ("option", "most", "too_much"),
    [("temperature", 100, 100.1), ("top_p", 1, 1.1), ("min_p", 1, 1.1), ("repetition_penalty", 100, 101)],
)
def test_the_ranges_in_the_help_are_those_of_the_sampler(option: str, most: float, too_much: float) -> None:
    shown = CliRunner().invoke(run.command, ["--help"]).stdout
    flag = option.replace("_", "-")
    assert re.search(rf"--{flag} FLOAT RANGE[^-]*<=?x<={most}\]", shown)
    sampling_params({option: most})
    with pytest.raises(UsageError, match=option):
        sampling_params({option: too_much})


@pytest.mark.parametrize("command", [run.command, perplexity.command], ids=["run", "perplexity"])
def test_a_help_text_names_one_default_per_option(command: click.Command) -> None:
    shown = " ".join(CliRunner().invoke(command, ["--help"]).stdout.split())
    options = re.split(r" (?=--?[a-z])", shown.split("Options:")[1].split("Examples:")[0])
    assert not [option for option in options if len(re.findall("default", option, re.IGNORECASE)) > 1]
    assert "(default" not in shown.split("Options:")[0]

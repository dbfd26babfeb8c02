"""lmpack bench: a table, a JSON document and a chart, each budget in a process of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

from lmpack.cli.fresh_process import call_fresh
from lmpack.cli.main import run
from lmpack.errors import LmpackError
from runtime.memory_budget import process_nbytes

if TYPE_CHECKING:
    from pathlib import Path

SHORT = ["-p", "16", "-n", "4", "-r", "2", "--threads", "1"]
SMALL_MIB = (process_nbytes() >> 20) + 28  # not all experts fit
LARGE_MIB = 900


def test_budgets_run_apart_smallest_first_with_the_options_that_were_given(
    demo_pack: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    chart = tmp_path / "chart.svg"
    budgets = ["--ram", f"{LARGE_MIB}MiB,{SMALL_MIB}MiB", "--io", "mmap", "--no-warmup"]
    assert run(["bench", str(demo_pack), *SHORT, *budgets, "--json", "--plot", str(chart)]) == 0
    document = json.loads(capfd.readouterr().out)
    asked = {"prompt_tokens": 16, "answer_tokens": 4, "repetitions": 2, "warmup": False}
    assert asked.items() <= document.items()
    small, large = document["runs"]
    assert (small["ram_nbytes"], large["ram_nbytes"]) == (SMALL_MIB << 20, LARGE_MIB << 20)
    assert small["resident_share"] < large["resident_share"] == 1
    for measured in document["runs"]:
        assert measured["num_threads"] == 1
        assert "mmap" in measured["store"]
        assert measured["prompt"]["tokens_per_s"] > 0
        assert 0 <= measured["answer"]["hit_rate"] <= 1
        assert measured["peak_rss_nbytes"] > 100 << 20
    assert small["answer"]["read_nbytes"] > 0
    shown = [element.text for element in ElementTree.parse(chart).iter("{http://www.w3.org/2000/svg}text")]
    assert {f"{SMALL_MIB}.0 MiB", f"{LARGE_MIB}.0 MiB", "tokens per second", "hit rate"} <= set(shown)


def test_one_budget_is_one_line_under_a_heading(demo_pack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", str(demo_pack), *SHORT, "--ram", f"{LARGE_MIB}MiB"]) == 0
    heading, row, setting = capsys.readouterr().out.splitlines()
    assert re.split(r" {2,}", heading.strip())[2:4] == ["pp16 tokens/s", "tg4 tokens/s"]
    assert re.fullmatch(
        rf"{LARGE_MIB}\.0 MiB +100% +[\d.]+ ± [\d.]+ +[\d.]+ ± [\d.]+ +[\d.]+% +[\d.]+ +\d+% +[\d.]+ [MG]iB",
        row,
    )
    assert setting.startswith("qwen3moe, ggml kernels, ")
    assert setting.endswith("1 thread")


def test_a_budget_that_is_too_small_is_found_out_first(
    demo_pack: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", str(demo_pack), *SHORT, "--ram", f"{LARGE_MIB}MiB,1MiB"]) == 2
    shown, told = capfd.readouterr()
    assert not shown
    assert re.fullmatch(r"lmpack: error: the memory budget is 1\.0 MiB, .+\n", told)


def test_told_to_end_it_ends_the_process_of_the_budget_too(demo_pack: Path) -> None:
    threads = len(os.sched_getaffinity(0)) + 1  # which each process says when it has loaded the model
    command = [
        sys.executable,
        "-m",
        "lmpack",
        "bench",
        str(demo_pack),
        "--ram",
        f"{SMALL_MIB}MiB,{LARGE_MIB}MiB",
    ]
    command += ["-p", "4", "-n", "4", "-r", "1000000", "--threads", str(threads)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as bench:
        assert bench.stderr is not None
        assert bench.stderr.readline().startswith("--threads")
        bench.terminate()
        shown, told = bench.communicate(timeout=120)  # up to the last process that has these streams
    assert (bench.returncode, shown, told) == (143, "", "")


def test_a_budget_whose_process_is_killed_is_an_error_of_one_line() -> None:
    with pytest.raises(LmpackError, match="its process: ended by SIGKILL; the system may be out of memory"):
        call_fresh(signal.raise_signal, signal.SIGKILL)


def test_a_chart_that_cannot_be_written_is_found_out_first(
    demo_pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_bytes(b"")
    for chart, expected in (
        (tmp_path / "file" / "chart.svg", "is a file, not a folder"),
        (demo_pack / "chart.svg", "would damage the pack"),
        (demo_pack / "new" / "chart.svg", "would damage the pack"),
    ):
        assert run(["bench", str(demo_pack), *SHORT, "--plot", str(chart)]) == 2
        shown, told = capsys.readouterr()
        assert not shown
        assert expected in told


def test_a_chart_names_its_pack_in_what_xml_can_hold(demo_pack: Path, tmp_path: Path) -> None:
    pack = tmp_path / "a\x1b\udcff.lmpack"
    pack.symlink_to(demo_pack)
    chart = tmp_path / "chart.svg"
    assert run(["bench", str(pack), "-p", "4", "-n", "0", "-r", "1", "--plot", str(chart)]) == 0
    texts = [element.text for element in ElementTree.parse(chart).iter("{http://www.w3.org/2000/svg}text")]
    assert r"a\x1b\udcff.lmpack: prompts of 4 tokens" in texts


def test_what_cannot_be_measured_is_wrong_usage(
    demo_pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_bytes(b"")
    for options, expected in (
        (["--plot", "chart.png"], "expected a name that ends with .svg"),
        (["-p", "9", "--context", "8"], "the prompt and the answer have 73 tokens"),
        (["-p", "9", "-f", str(empty)], "the text is empty"),
        (["--ram", "1GiB,"], "size ''"),
    ):
        assert run(["bench", str(demo_pack), *options]) == 2
        assert expected in capsys.readouterr().err

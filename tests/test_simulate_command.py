"""lmpack simulate, as a user calls it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from lmpack.cli import simulate
from lmpack.cli.main import run
from lmpack.pack import Pack
from profiles.policy_choice import ORDERS
from profiles.routing_shape import RoutingShape
from tests.tiny_routing import ORIGIN, record

if TYPE_CHECKING:
    from pathlib import Path

PROMPTS = [[9, *[1] * 20], [5, *[1] * 10]]


@pytest.fixture
def trace(demo_pack: Path, tmp_path: Path) -> Path:
    """Random choices among the demo model's experts, and their profile beside it."""
    shape = RoutingShape.of_manifest(Pack.open(demo_pack).manifest)
    recorder = record(PROMPTS, shape=shape)
    origin = replace(ORIGIN, architecture="qwen3moe")
    recorder.trace(origin).save(tmp_path / "t.safetensors")
    recorder.profile(origin).save(tmp_path / "p.safetensors")
    return tmp_path / "t.safetensors"


def simulate_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert run(["simulate", *map(str, arguments), "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def refusal(capsys: pytest.CaptureFixture[str], code: int, *arguments: object) -> str:
    assert run(["simulate", *map(str, arguments)]) == code
    return capsys.readouterr().err


def test_json_has_the_documented_keys_and_every_policy(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = simulate_json(capsys, trace, "--capacity", "10%,50%")
    assert simulate.__doc__ is not None
    for key in [*document, *document["runs"][0]]:
        assert key in simulate.__doc__
    assert (document["num_tokens"], document["num_decoded"]) == (44, 30)
    names = [row["policy"] for row in document["runs"]]
    assert len(names) == 2 * (1 + 2 * len(ORDERS))
    assert {*ORDERS, "layer+lru", "belady"} < set(names)
    assert [row["num_slots"] for row in document["runs"]] == [19] * 11 + [96] * 11
    assert document["runs"][0]["nbytes_read"] is None


def test_each_capacity_begins_with_beladys_bound_and_goes_on_by_what_is_read(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for capacity in ("5%", "10%", "20%"):
        bound, *rows = simulate_json(capsys, trace, "--capacity", capacity)["runs"]
        assert bound["policy"] == "belady"
        assert bound["reads_to_least"] == 1
        misses = [row["misses"] for row in rows]
        assert misses == sorted(misses)
        assert misses[0] >= bound["misses"]
        assert all(row["reads_to_least"] == row["misses"] / bound["misses"] for row in rows)
        assert len({row["hits"] + row["misses"] for row in [bound, *rows]}) == 1


def test_the_pack_gives_bytes_and_the_slots_that_a_run_has(
    trace: Path, demo_pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = Pack.open(demo_pack).manifest
    all_nbytes = sum(entry.num_experts * entry.stride for entry in manifest.layers)
    options = (trace, "--pack", demo_pack, "--policy", "lru", "--capacity")
    bound, row = simulate_json(capsys, *options, "50%")["runs"]
    assert 0.45 * all_nbytes < row["capacity_nbytes"] <= 0.5 * all_nbytes
    strides = [entry.stride for entry in manifest.layers]
    assert min(strides) * row["misses"] <= row["nbytes_read"] <= max(strides) * row["misses"]
    assert simulate_json(capsys, *options, f"{all_nbytes // 2}")["runs"][1]["misses"] == row["misses"]
    (whole,) = simulate_json(capsys, *options, "100%")["runs"][1:]
    assert (whole["capacity_nbytes"], whole["evictions"]) == (all_nbytes, 0)
    assert bound["nbytes_read"] <= row["nbytes_read"]


def test_a_profile_adds_the_pinned_policies_and_a_warm_start(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = trace.with_name("p.safetensors")
    cold = simulate_json(capsys, trace, "--profile", profile, "--capacity", "50%")["runs"]
    assert {row["policy"] for row in cold} > {"pin+lru", "pin+layer+lrfu"}
    warm = simulate_json(capsys, trace, "--profile", profile, "--capacity", "50%", "--warm")["runs"]
    assert sum(row["misses"] for row in warm) < sum(row["misses"] for row in cold)


def test_the_table_has_a_line_per_run(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", str(trace), "--policy", "lru, layer+lrfu", "--capacity", "10%,100%"]) == 0
    title, head, *lines = capsys.readouterr().out.splitlines()
    assert title == (
        "t.safetensors: qwen3moe, 192 experts in 6 layers, 4 a token; 44 tokens, 30 of them one by one"
    )
    assert head.split()[:3] == ["capacity", "experts", "policy"]
    assert [line.split()[2] for line in lines[:3:3]] == ["belady"]
    assert len(lines) == 6
    assert all(len(line) == len(head) for line in lines)
    assert lines[3].split()[-2:] == ["1.00", "x"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policy", "mru"], "no cache policy is called 'mru'"),
        (["--policy", "lru,"], "no cache policy is called ''"),
        (["--policy", "pin+lru"], "needs --profile"),
        (["--warm"], "--warm needs --profile"),
        (["--capacity", "4GiB"], "bytes need --pack"),
        (["--capacity", "1%"], "1 of 192 experts; a token needs 4"),
        (["--capacity", "101%"], "at most 100%"),
        (["--capacity", ""], "it is empty"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(
    trace: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    error = refusal(capsys, 2, trace, *options)
    assert message in error
    assert error.count("\n") == 1


def test_a_capacity_too_small_for_the_packs_layers_names_one_that_works(
    trace: Path, demo_pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refusal(capsys, 2, trace, "--pack", demo_pack, "--capacity", "1%")
    smallest = error.rsplit("use ", 1)[1].split(" ")[0]
    simulate_json(capsys, trace, "--pack", demo_pack, "--policy", "lru", "--capacity", smallest)


def test_files_of_other_models_are_refused(
    trace: Path, demo_pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.safetensors"
    record(PROMPTS).trace(ORIGIN).save(other)
    assert "is of another model than" in refusal(capsys, 1, other, "--pack", demo_pack)
    assert "is of another model than" in refusal(capsys, 1, other, "--profile", tmp_path / "p.safetensors")
    assert "routing_trace" in refusal(capsys, 1, tmp_path / "p.safetensors")


def test_an_empty_trace_reads_nothing(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record([]).trace(ORIGIN).save(trace)
    rows = simulate_json(capsys, trace, "--capacity", "50%")["runs"]
    assert rows
    for row in rows:
        assert (row["hits"], row["misses"], row["reads_to_least"]) == (0, 0, None)


def test_the_command_needs_no_torch(trace: Path) -> None:
    program = (
        "import sys; from lmpack.cli.main import run\n"
        f"code = run(['simulate', {str(trace)!r}, '--policy', 'lru'])\n"
        "sys.exit(code or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0

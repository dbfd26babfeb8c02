"""Two profiles on the command line: merge adds them up, diff compares them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from lmpack.cli.main import run
from profiles.routing_profile import RoutingProfile
from profiles.routing_shape import RoutingShape
from tests.tiny_routing import ORIGIN, SHAPE, record

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Three profiles of one model, by number of tokens."""
    paths = [tmp_path / f"{num_tokens}.safetensors" for num_tokens in (3, 5, 9)]
    for seed, path in enumerate(paths):
        record([[int(path.stem)]], seed=seed).profile(replace(ORIGIN, pack_ids=(f"{seed:064}",))).save(path)
    return paths


@pytest.fixture
def stranger(tmp_path: Path) -> Path:
    path = tmp_path / "stranger.safetensors"
    record([[3]], shape=RoutingShape((1, 2, 4), (6, 4, 6), 2)).profile(ORIGIN).save(path)
    return path


def test_merged_profiles_hold_the_choices_of_all(
    files: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    output = files[0].with_name("all.safetensors")
    assert run(["merge", *map(str, files), "-o", str(output), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "profile": str(output),
        "merged": [str(file) for file in files],
        "num_tokens": 17,
        "num_prompt_tokens": 17,
    }
    merged, parts = RoutingProfile.load(output), [RoutingProfile.load(file) for file in files]
    assert np.array_equal(merged.counts, sum(part.counts for part in parts))
    assert merged.origin.pack_ids == tuple(f"{seed:064}" for seed in range(3))


def test_a_merge_says_what_it_did(files: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    output = files[0].with_name("all.safetensors")
    assert run(["merge", *map(str, files), "-o", str(output)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == "3 profiles of 17 tokens"
    assert second.startswith(f"wrote {output} (")


@pytest.mark.parametrize("command", ["merge", "diff"])
def test_profiles_of_two_models_are_named_with_what_differs(
    files: list[Path], stranger: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    output = files[0].with_name("both.safetensors")
    options = ["-o", str(output)] if command == "merge" else []
    assert run([command, str(files[0]), str(stranger), *options]) == 1
    done = "merged" if command == "merge" else "compared"
    assert capsys.readouterr().err == (
        f"lmpack: error: {files[0]} and {stranger}: profiles cannot be {done}: "
        "num_experts [6, 4, 5] (3) and [6, 4, 6] (3)\n"
    )
    assert not output.exists()


def test_a_merge_is_not_written_into_a_pack(
    files: list[Path], demo_pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["merge", str(files[0]), "-o", str(demo_pack / "p")]) == 2
    assert "would damage the pack" in capsys.readouterr().err


def test_a_diff_of_profiles_is_the_divergence_of_each_layer(
    files: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = files[:2]
    assert run(["diff", str(a), str(b), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["a"], document["b"], document["equal"]) == (str(a), str(b), False)
    p, q = (torch.tensor(RoutingProfile.load(path).counts / (2.0 * int(path.stem))) for path in (a, b))
    entropies = torch.special.entr(torch.stack([p, q, (p + q) / 2])).sum(2) / math.log(2)
    expected = (entropies[2] - entropies[:2].mean(0)).numpy()
    found = {layer["layer"]: layer["divergence_bits"] for layer in document["layers"]}
    assert found == pytest.approx(dict(zip(SHAPE.layers, expected, strict=True)))
    assert document["mean_divergence_bits"] == pytest.approx(expected.mean())
    assert run(["diff", str(a), str(b)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["layer", "L001", "L002", "L004", "mean"]


def test_a_profile_equals_itself(files: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["diff", str(files[0]), str(files[0])]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["mean", "0.0000"]


def test_a_pack_is_not_compared_with_a_profile(
    files: list[Path], demo_pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["diff", str(demo_pack), str(files[0])]) == 2
    assert "a pack and a profile; name two of one kind" in capsys.readouterr().err


def test_a_checkpoint_is_no_profile(
    demo_gguf: Path, files: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["diff", str(demo_gguf), str(files[0])]) == 2
    assert "is a GGUF checkpoint, not a pack" in capsys.readouterr().err

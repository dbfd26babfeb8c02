"""lmpack profile on the demo model, as a user calls it."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from converters.conversion import convert
from lmpack.cli.heat_map import draw_heat_map
from lmpack.cli.main import run
from lmpack.pack import Pack
from profiles.routing_profile import RoutingProfile
from profiles.routing_trace import RoutingTrace
from runtime.tokenizer import load_tokenizer
from tests.tiny_routing import ORIGIN, record

if TYPE_CHECKING:
    from pathlib import Path

TEXT = "Once upon a time there was a little rabbit."
QUESTION = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f"{json.dumps({'prompt': TEXT})}\n{json.dumps(QUESTION)}\n", encoding="utf-8")
    return path


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "p.safetensors"


def profile_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    words = [str(argument) for argument in arguments]
    # One thread: two would wait for each other on a busy CPU.
    assert run(["profile", *words, "--threads", "1", "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_profile_and_trace_hold_the_same_choices(
    demo_pack: Path, prompts: Path, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace_file = output.with_name("t.safetensors")
    document = profile_json(
        capsys, demo_pack, "--prompts", prompts, "-n", 12, "-o", output, "--trace", trace_file
    )
    profile, trace = RoutingProfile.load(output), RoutingTrace.load(trace_file)
    assert RoutingProfile.from_trace(trace) == profile
    tokenizer = load_tokenizer(Pack.open(demo_pack))
    ids = tokenizer.encode(TEXT)
    assert trace.prompt_lengths[0] == len(ids)
    assert trace.token_ids[: len(ids)].tolist() == ids
    assert trace.prompt_offsets[1] == len(ids) + 11  # the twelfth token was chosen, not run
    answer = trace.token_ids[trace.prompt_offsets[1] + trace.prompt_lengths[1] :]
    assert tokenizer.decode(answer.tolist()) == "The capital of France is Paris."  # its end token was not run
    assert set(np.diff(trace.chunk_offsets)) == {1, *trace.prompt_lengths.tolist()}
    assert document["num_tokens"] == profile.num_tokens == trace.num_tokens
    assert document["num_generated_tokens"] == 12 + len(answer)


def test_json_has_the_documented_keys(
    demo_pack: Path, prompts: Path, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = profile_json(capsys, demo_pack, "--prompts", prompts, "-n", 4, "-o", output)
    manifest = Pack.open(demo_pack).manifest
    profile = RoutingProfile.load(output)
    assert document["profile"] == str(output)
    assert document["trace"] is None
    assert document["architecture"] == "qwen3moe"
    assert (document["pack_id"],) == profile.origin.pack_ids == (manifest.pack_id,)
    assert (document["tokenizer_sha256"],) == profile.origin.tokenizers_sha256
    tokenizer = load_tokenizer(Pack.open(demo_pack))
    tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
    tokens_sha256 = hashlib.sha256(b"".join(struct.pack("<I", len(token)) + token for token in tokens))
    assert document["tokenizer_sha256"] == tokens_sha256.hexdigest()
    assert document["prompt_set_sha256"] == hashlib.sha256(prompts.read_bytes()).hexdigest()
    assert document["num_prompts"] == 2
    assert document["num_prompt_tokens"] == profile.num_prompt_tokens
    assert document["top_k"] == 4
    assert [layer["layer"] for layer in document["layers"]] == list(range(6))
    assert document["stats"]["hits"] + document["stats"]["misses"] > 0
    for layer, counts in zip(document["layers"], profile.counts, strict=True):
        assert layer["num_experts"] == 32
        assert counts[layer["busiest_expert"]] == counts.max()
        assert layer["busiest_to_mean"] == pytest.approx(counts.max() / counts.mean())
        assert 0 <= layer["entropy_bits"] <= 5
        assert 0 <= layer["gini"] < 1
        assert layer["never_chosen"] == np.flatnonzero(counts == 0).tolist()
        quarter = layer["coverage"][1]
        assert (quarter["percent"], quarter["num_experts"]) == (25, 8)
        assert quarter["share"] == pytest.approx(np.sort(counts)[-8:].sum() / counts.sum())
    assert [entry["num_experts"] for entry in document["coverage"]] == [20, 48, 96]


def test_the_tables_are_on_stdout_and_say_how_many_tokens_were_counted(
    demo_pack: Path, prompts: Path, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "profile",
        str(demo_pack),
        "--prompts",
        str(prompts),
        "-n",
        "4",
        "-o",
        str(output),
        "--heatmap",
    ]
    assert run(arguments) == 0
    out = capsys.readouterr().out
    profile = RoutingProfile.load(output)
    first_line = (
        f"2 prompts of {profile.num_prompt_tokens} tokens, 8 tokens generated; {profile.num_tokens} tokens "
    )
    assert out.startswith(first_line)
    assert f"\nL005        32    E{profile.counts[5].argmax():04d}" in out
    assert "█" in out
    assert f"wrote {output}" in out


def test_the_heat_map_is_drawn_only_for_people(
    demo_pack: Path, prompts: Path, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["profile", str(demo_pack), "--prompts", str(prompts), "-n", "0", "-o", str(output)]) == 0
    assert "█" not in capsys.readouterr().out


def test_without_generation_only_the_prompts_are_counted(
    demo_pack: Path, prompts: Path, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = profile_json(capsys, demo_pack, "--prompts", prompts, "-n", 0, "-o", output)
    assert document["num_tokens"] == document["num_prompt_tokens"]
    assert document["num_generated_tokens"] == 0


def test_a_text_file_gives_the_same_profile_as_json_lines(
    demo_pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, lines = tmp_path / "p.txt", tmp_path / "p.jsonl"
    text.write_text(f"{TEXT}\n", encoding="utf-8")
    lines.write_text(json.dumps({"prompt": TEXT}), encoding="utf-8")
    for path in (text, lines):
        profile_json(
            capsys, demo_pack, "--prompts", path, "-n", 2, "-o", path.with_suffix(f"{path.suffix}.out")
        )
    one, other = (RoutingProfile.load(path.with_suffix(f"{path.suffix}.out")) for path in (text, lines))
    assert np.array_equal(one.counts, other.counts)
    assert one.origin.prompt_sets_sha256 != other.origin.prompt_sets_sha256
    assert one.divergence(other).tolist() == [0.0] * 6


def test_special_tokens_in_a_text_count_when_asked_for(
    demo_pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, output = tmp_path / "p.txt", tmp_path / "out"
    path.write_text("<|im_start|>user", encoding="utf-8")
    arguments = (demo_pack, "--prompts", path, "-n", 0, "-o", output)
    assert profile_json(capsys, *arguments)["num_tokens"] > 3
    assert profile_json(capsys, *arguments, "--parse-special")["num_tokens"] <= 3


def test_a_prompt_beyond_the_context_is_named_before_anything_runs(
    demo_pack: Path, tmp_path: Path, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.txt"
    path.write_text(f"Hello.\n\n{TEXT * 5}\n", encoding="utf-8")
    arguments = ["profile", str(demo_pack), "--prompts", str(path), "-o", str(output), "--context", "20"]
    assert run(arguments) == 2
    assert f"{path}:3: 50 tokens do not fit a context of 20; use --context 50" in capsys.readouterr().err
    assert not output.exists()


def test_a_chat_that_the_template_refuses_is_named(
    models_dir: Path, tmp_path: Path, prompts: Path, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "hf"
    shutil.copytree(models_dir / "families" / "qwen3_moe" / "hf", folder)
    config_file = folder / "tokenizer_config.json"
    config = json.loads(config_file.read_text(encoding="utf-8"))
    config["chat_template"] = "{{ raise_exception('system first') }}"
    config_file.write_text(json.dumps(config), encoding="utf-8")
    convert(folder, tmp_path / "m.lmpack")
    assert run(["profile", str(tmp_path / "m.lmpack"), "--prompts", str(prompts), "-o", str(output)]) == 2
    error = capsys.readouterr().err
    assert f"{prompts}:2: " in error
    assert "system first" in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-o", "{folder}/p", "--trace", "{folder}/p"], "profile and trace need two files"),
        (["-o", "{folder}/p", "--ram", "8G"], "8GiB"),
    ],
)
def test_options_that_cannot_work_are_refused_before_the_run(
    demo_pack: Path,
    prompts: Path,
    tmp_path: Path,
    options: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    filled = [option.format(folder=tmp_path) for option in options]
    assert run(["profile", str(demo_pack), "--prompts", str(prompts), *filled]) == 2
    assert message.format(folder=tmp_path) in capsys.readouterr().err


def test_a_dense_model_has_nothing_to_profile(
    models_dir: Path, prompts: Path, output: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert(models_dir / "families" / "qwen3" / "qwen3-bf16.gguf", tmp_path / "dense.lmpack")
    assert run(["profile", str(tmp_path / "dense.lmpack"), "--prompts", str(prompts), "-o", str(output)]) == 1
    assert "is dense" in capsys.readouterr().err


def test_a_heat_map_has_a_row_a_layer_and_a_dot_where_nothing_was_chosen() -> None:
    profile = record([[1]]).profile(ORIGIN)
    rows = draw_heat_map(profile, 80).splitlines()
    assert [row[:6] for row in rows] == ["L001  ", "L002  ", "L004  "]
    for row, num_experts in zip(rows, (6, 4, 5), strict=True):
        assert sorted(row[6:]) == sorted("█" * 2 + "·" * (num_experts - 2))


def test_a_heat_map_fits_the_terminal() -> None:
    from profiles.routing_shape import RoutingShape

    profile = record([[50]], shape=RoutingShape((0, 1), (512, 300), 8)).profile(ORIGIN)
    assert {len(row) for row in draw_heat_map(profile, 100).splitlines()} == {96}
    assert math.prod(profile.counts.shape) == 1024


def test_a_model_that_does_not_fit_into_memory_gives_the_same_profile(
    demo_pack: Path, prompts: Path, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(demo_pack), "--prompts", str(prompts), "-n", "4", "--context", "64"]
    assert run(["profile", *arguments, "-o", str(output), "--ram", "1MiB"]) == 2
    smallest = re.findall(r"(\d+) bytes", capsys.readouterr().err)[-1]
    tight = output.with_name("tight.safetensors")
    document = profile_json(capsys, *arguments, "-o", tight, "--ram", smallest)
    assert document["stats"]["evictions"] > 0
    profile_json(capsys, *arguments, "-o", output)
    assert tight.read_bytes() == output.read_bytes()


def test_the_pack_and_the_prompts_are_never_written_over(
    demo_pack: Path, prompts: Path, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest, asked = (demo_pack / "manifest.json").read_bytes(), prompts.read_bytes()
    for target, reason in (
        (demo_pack / "manifest.json", "would damage the pack"),
        (demo_pack / "experts" / "p", "would damage the pack"),
        (demo_pack / "profiles", "would damage the pack"),
        (prompts, "holds the prompts"),
    ):
        for flags in (["-o", str(target)], ["-o", str(output), "--trace", str(target)]):
            assert run(["profile", str(demo_pack), "--prompts", str(prompts), *flags]) == 2
            assert reason in capsys.readouterr().err
    assert (demo_pack / "manifest.json").read_bytes() == manifest
    assert prompts.read_bytes() == asked

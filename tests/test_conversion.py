"""Conversion: every layout becomes the same kind of pack, whatever the threads, and the bytes are the source's."""

from __future__ import annotations

import hashlib
import json
import os
from typing import TYPE_CHECKING, Any, Literal

import pytest
from click.testing import CliRunner

import converters.copy_lanes
from converters.checkpoint import open_checkpoint
from converters.conversion import convert
from lmpack.cli.convert import command
from lmpack.errors import CheckpointError, UnsupportedError, UsageError
from lmpack.expert_key import ExpertKey
from lmpack.pack import Pack
from tests.gguf_fixtures import METADATA, Endian, Tensor, gguf_bytes, moe_tensors, write_shards
from tests.round_trip import round_trip
from tests.safetensors_fixtures import Tensor as HFTensor
from tests.safetensors_fixtures import moe_tensors as hf_moe_tensors
from tests.safetensors_fixtures import safetensors_bytes, write_hf_folder

if TYPE_CHECKING:
    from pathlib import Path


def write_gguf(path: Path, tensors: list[Tensor], **options: Any) -> Path:
    path.write_bytes(gguf_bytes(tensors, METADATA, **options))
    return path


def part_of(pack: Pack, layer: int, expert: int, role: str) -> bytes:
    part = pack.manifest.layer(layer).part(role)
    return pack.read_expert(ExpertKey(layer, expert))[part.offset : part.offset + part.nbytes]


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("endian", ["little", "big"])
@pytest.mark.parametrize("alignment", [8, 32, 64, 4096])
def test_every_version_byte_order_and_alignment_comes_back(
    tmp_path: Path, version: int, endian: Endian, alignment: int
) -> None:
    src = write_gguf(
        tmp_path / "m.gguf",
        moe_tensors(),
        version=version,
        endian=endian,
        alignment=alignment,
        gap=1,
        trailing=b"end",
    )
    pack = round_trip(src, tmp_path)
    assert [entry.num_experts for entry in pack.manifest.layers] == [4, 4]


@pytest.mark.parametrize("layout", ["stacked", "fused", "single"])
def test_every_layout_of_experts_is_cut_into_the_same_bytes(
    tmp_path: Path, layout: Literal["stacked", "fused", "single"]
) -> None:
    tensors = moe_tensors(layout=layout)
    pack = round_trip(write_gguf(tmp_path / "m.gguf", tensors), tmp_path)
    raw = {tensor.name: tensor.raw for tensor in tensors}
    for layer in range(2):
        for part in pack.manifest.layer(layer).parts:
            for expert in range(4):
                if layout == "single":
                    wanted = raw[f"blk.{layer}.ffn_{part.role}.{expert}.weight"]
                else:
                    slab = raw[f"blk.{layer}.ffn_{part.role}_exps.weight"]
                    wanted = slab[expert * part.nbytes : (expert + 1) * part.nbytes]
                assert part_of(pack, layer, expert, part.role) == wanted
    for name in ("token_embd.weight", "blk.1.ffn_gate_inp.weight"):
        assert pack.read_tensor(name).tobytes() == raw[name]


def test_biases_scales_shared_experts_dense_and_prediction_layers_find_their_place(tmp_path: Path) -> None:
    tensors = moe_tensors(num_layers=3, extras=("bias", "scale", "probs", "shexp", "dense", "mtp"))
    pack = round_trip(write_gguf(tmp_path / "m.gguf", tensors), tmp_path)
    assert [entry.layer for entry in pack.manifest.layers] == [1, 2, 3]
    roles = [part.role for part in pack.manifest.layer(1).parts]
    assert roles == [f"{role}{end}" for role in ("gate", "up", "down") for end in ("", "_bias", "_scale")]
    assert [part.role for part in pack.manifest.layer(3).parts] == ["gate", "up", "down"]
    assert pack.manifest.layer(1).part("gate_scale").shape == ()
    for name in (
        "exp_probs_b.bias",
        "ffn_up_shexp.weight",
        "ffn_gate_inp_shexp.weight",
        "ffn_gate_inp.weight",
    ):
        assert pack.manifest.has_tensor(f"blk.1.{name}")
    assert pack.manifest.has_tensor("blk.3.nextn.eh_proj.weight")
    assert pack.manifest.has_tensor("blk.0.ffn_up.weight")


@pytest.mark.parametrize(
    "dtype", ["Q4_0", "Q8_0", "Q6_K", "MXFP4", "NVFP4", "IQ2_XS", "IQ4_NL", "BF16", "F32"]
)
def test_block_types_are_cut_between_experts(tmp_path: Path, dtype: str) -> None:
    tensors = moe_tensors(hidden=256, width=256, dtype=dtype, num_layers=1)
    pack = round_trip(write_gguf(tmp_path / "m.gguf", tensors), tmp_path)
    assert {part.dtype for part in pack.manifest.layer(0).parts} == {dtype}


def test_types_may_differ_between_parts_and_layers_and_numbers_of_experts_too(tmp_path: Path) -> None:
    tensors = [
        Tensor("blk.0.ffn_up_exps.weight", "Q4_0", (3, 8, 32)),
        Tensor("blk.0.ffn_down_exps.weight", "F16", (3, 32, 8)),
        Tensor("blk.1.ffn_up_exps.weight", "Q8_0", (512, 1, 32)),
        Tensor("blk.2.ffn_up_exps.weight", "F32", (1024, 1, 3)),
    ]
    pack = round_trip(write_gguf(tmp_path / "m.gguf", tensors), tmp_path)
    assert [entry.num_experts for entry in pack.manifest.layers] == [3, 512, 1024]
    assert [part.dtype for part in pack.manifest.layer(0).parts] == ["Q4_0", "F16"]


def test_a_dense_model_is_a_pack_without_experts(tmp_path: Path) -> None:
    tensors = [Tensor("token_embd.weight", "F32", (4, 8)), Tensor("blk.0.ffn_up.weight", "F16", (8, 8))]
    pack = round_trip(write_gguf(tmp_path / "m.gguf", tensors), tmp_path)
    assert pack.manifest.layers == ()


@pytest.mark.parametrize("cuts", [(5, 6), (0, 9), (1, 12)])
def test_split_sets_come_back_wherever_they_are_cut(tmp_path: Path, cuts: tuple[int, int]) -> None:
    tensors = moe_tensors(extras=("bias", "shexp"))
    first, second = cuts
    folder = tmp_path / "set"
    folder.mkdir()
    write_shards(folder, [tensors[:first], tensors[first:second], tensors[second:]])
    pack = round_trip(folder, tmp_path)
    whole = write_gguf(tmp_path / "m.gguf", tensors)
    convert(whole, tmp_path / "whole.lmpack")
    experts = [entry.experts for entry in Pack.open(tmp_path / "whole.lmpack").manifest.layers]
    assert [entry.experts for entry in pack.manifest.layers] == experts


def test_zero_size_tensors_come_back(tmp_path: Path) -> None:
    tensors = [Tensor("blk.0.nothing", "F32", (0, 4)), Tensor("a", "F32", (4,)), Tensor("z", "F16", (0,))]
    pack = round_trip(write_gguf(tmp_path / "m.gguf", tensors), tmp_path)
    assert pack.manifest.tensor("z").nbytes == 0


def test_hf_folders_come_back_with_their_small_files(tmp_path: Path) -> None:
    tensors = hf_moe_tensors()
    folder = write_hf_folder(tmp_path / "m", [tensors[:11], tensors[11:]])
    pack = round_trip(folder, tmp_path)
    raw = {tensor.name: tensor.raw for tensor in tensors}
    assert [part.role for part in pack.manifest.layer(0).parts] == ["down", "gate", "up"]
    assert part_of(pack, 1, 3, "gate") == raw["model.layers.1.mlp.experts.3.gate_proj.weight"]
    kept = pack.kept_file("tokenizer.json")
    assert kept is not None
    assert kept.read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_odd_safetensors_come_back(tmp_path: Path) -> None:
    at = "model.layers.0.mlp.experts."
    tensors = [
        HFTensor(at + "gate_up_proj_blocks", "U8", (4, 6, 2, 16)),
        HFTensor(at + "gate_up_proj_scales", "U8", (4, 6, 2)),
        HFTensor(at + "gate_up_proj_bias", "BF16", (4, 6)),
        HFTensor("größe", "F8_E4M3", (3, 5)),
        HFTensor("packed", "F4", (3, 2)),
        HFTensor("empty", "F32", (0, 5)),
        HFTensor("scalar", "I64", ()),
    ]
    path = tmp_path / "odd.safetensors"
    path.write_bytes(safetensors_bytes(tensors))
    pack = round_trip(path, tmp_path)
    assert [part.role for part in pack.manifest.layer(0).parts] == [
        "gate_up_blocks",
        "gate_up_scales",
        "gate_up_bias",
    ]
    assert pack.manifest.tensor("scalar").shape == ()


def test_the_pack_is_the_same_whatever_the_number_of_jobs(tmp_path: Path, demo_gguf: Path) -> None:
    ids = {convert(demo_gguf, tmp_path / f"{jobs}.lmpack", jobs=jobs).pack_id for jobs in (1, 2, 3, 7)}
    assert len(ids) == 1


def test_buffers_that_are_much_too_small_change_nothing(
    tmp_path: Path, demo_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = convert(demo_gguf, tmp_path / "a.lmpack").pack_id
    monkeypatch.setattr("converters.conversion.BUFFER_NBYTES", 5000)
    monkeypatch.setattr(converters.copy_lanes, "BUFFERS_NBYTES", 1)
    assert convert(demo_gguf, tmp_path / "b.lmpack").pack_id == wanted


@pytest.mark.parametrize("buffer_nbytes", [5000, 8 << 20])
def test_a_source_outside_the_page_cache_gives_the_same_pack(
    tmp_path: Path, demo_gguf: Path, monkeypatch: pytest.MonkeyPatch, buffer_nbytes: int
) -> None:
    wanted = convert(demo_gguf, tmp_path / "a.lmpack").pack_id
    cold = tmp_path / demo_gguf.name
    cold.write_bytes(demo_gguf.read_bytes())
    with cold.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    monkeypatch.setattr("converters.conversion.BUFFER_NBYTES", buffer_nbytes)
    assert convert(cold, tmp_path / "b.lmpack").pack_id == wanted


def test_the_report_and_the_progress_count_every_byte(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "m", [hf_moe_tensors()])
    (folder / "pytorch_model.bin").write_bytes(b"left out")
    done: list[int] = []
    report = convert(folder, tmp_path / "m.lmpack", progress=done.append)
    total = sum(path.stat().st_size for path in folder.iterdir()) - len(b"left out")
    assert sum(done) == report.source_nbytes == total
    assert (report.num_layers, report.num_experts, report.left_out) == (2, 8, ("pytorch_model.bin",))
    hashes = {file.name: file.sha256 for file in Pack.open(report.path).manifest.source.files}
    assert hashes == {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in hashes}


def hf(tmp_path: Path, *tensors: HFTensor) -> Path:
    path = tmp_path / "m.safetensors"
    path.write_bytes(safetensors_bytes(tensors))
    return path


def up(expert: int, dtype: str = "F16", rows: int = 4) -> HFTensor:
    return HFTensor(f"model.layers.2.mlp.experts.{expert}.up_proj.weight", dtype, (rows, 8))


def test_an_incomplete_layer_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="layer 2 has 4 experts, but expert 1 has no 'up'"):
        convert(hf(tmp_path, up(0), up(2), up(3)), tmp_path / "m.lmpack")
    down = HFTensor("model.layers.2.mlp.experts.0.down_proj.weight", "F16", (8, 4))
    with pytest.raises(CheckpointError, match="layer 2 has 2 experts, but expert 1 has no 'down'"):
        convert(hf(tmp_path, up(0), up(1), down), tmp_path / "m.lmpack")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.safetensors"]


@pytest.mark.parametrize("other", [up(1, dtype="BF16"), up(1, rows=5)])
def test_experts_of_unlike_layouts_in_one_layer_are_refused(tmp_path: Path, other: HFTensor) -> None:
    with pytest.raises(UnsupportedError, match="all experts of a layer must have one layout"):
        convert(hf(tmp_path, up(0), other), tmp_path / "m.lmpack")


def test_two_tensors_for_one_part_are_refused(tmp_path: Path) -> None:
    other = HFTensor("model.layers.2.mlp.experts.0.w3.weight", "F16", (4, 8))
    with pytest.raises(CheckpointError, match="are both 'up' of one expert"):
        convert(hf(tmp_path, up(0), other), tmp_path / "m.lmpack")


def test_an_empty_expert_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="belongs to experts but is empty"):
        convert(hf(tmp_path, up(0, rows=0)), tmp_path / "m.lmpack")


@pytest.mark.parametrize("name", ["x" * 600, "two\nlines", "\x1b[31m"])
def test_a_name_that_the_manifest_cannot_hold_is_refused_at_once(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="a pack cannot hold this"):
        convert(hf(tmp_path, HFTensor(name, "F16", (4,))), tmp_path / "m.lmpack")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.safetensors"]


def test_a_file_that_changes_meanwhile_is_noticed(tmp_path: Path) -> None:
    src = write_gguf(tmp_path / "m.gguf", moe_tensors())
    checkpoint = open_checkpoint(src)
    os.utime(src, ns=(1, 1))
    with pytest.raises(CheckpointError, match="changed while it was being converted"):
        convert(checkpoint, tmp_path / "m.lmpack")
    assert not (tmp_path / "m.lmpack").exists()


def test_a_file_that_is_replaced_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    src = write_gguf(tmp_path / "m.gguf", moe_tensors())
    with pytest.raises(CheckpointError, match="changed while it was being converted"):
        convert(src, tmp_path / "m.lmpack", progress=lambda _: os.utime(src, ns=(1, 1)))
    assert not (tmp_path / "m.lmpack").exists()


def test_a_failure_in_a_writing_thread_is_raised(tmp_path: Path, demo_gguf: Path) -> None:
    def take_away(_: int) -> None:
        for path in (tmp_path / "m.lmpack.partial" / "experts").glob("L*"):
            path.rename(tmp_path / path.name)

    with pytest.raises(Exception, match="L00"):
        convert(demo_gguf, tmp_path / "m.lmpack", progress=take_away)
    assert not (tmp_path / "m.lmpack").exists()


def test_a_destination_that_exists_is_refused(tmp_path: Path, demo_gguf: Path) -> None:
    (tmp_path / "m.lmpack").mkdir()
    with pytest.raises(UsageError, match="exists"):
        convert(demo_gguf, tmp_path / "m.lmpack")


def test_the_command_says_what_it_made(tmp_path: Path, demo_gguf: Path) -> None:
    result = CliRunner().invoke(command, [str(demo_gguf), str(tmp_path / "m.lmpack"), "--jobs", "2"])
    assert result.exit_code == 0
    assert "qwen3moe, 192 experts in 6 layers" in result.output
    assert Pack.open(tmp_path / "m.lmpack").manifest.pack_id in result.output


@pytest.mark.parametrize("options", [["--page-size", "5000"], ["--page-size", "4 cows"]])
def test_options_that_mean_nothing_are_wrong_usage(
    tmp_path: Path, demo_gguf: Path, options: list[str]
) -> None:
    result = CliRunner().invoke(command, [str(demo_gguf), str(tmp_path / "m.lmpack"), *options])
    assert isinstance(result.exception, UsageError)
    assert not (tmp_path / "m.lmpack").exists()


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ((), ""),
        (("tokenizer.json",), "lacks: a tokenizer.json or tokenizer.model\n"),
        (("config.json",), "lacks: its config.json\n"),
        (
            ("config.json", "tokenizer.json"),
            "lacks: its config.json and a tokenizer.json or tokenizer.model\n",
        ),
    ],
)
def test_the_command_says_what_the_pack_cannot_be_run_without(
    tmp_path: Path, missing: tuple[str, ...], message: str
) -> None:
    folder = write_hf_folder(tmp_path / "m", [hf_moe_tensors()])
    for name in missing:
        (folder / name).unlink()
    result = CliRunner().invoke(command, [str(folder), str(tmp_path / "m.lmpack")])
    assert result.exit_code == 0
    warning = "lmpack run will need what this checkpoint "
    assert result.stderr.partition(warning)[2] == message
    result = CliRunner().invoke(command, [str(folder), str(tmp_path / "again.lmpack"), "--json"])
    assert len(json.loads(result.stdout)["missing"]) == len(missing)


def test_a_gguf_without_a_vocabulary_is_converted_with_a_warning(tmp_path: Path) -> None:
    src = write_gguf(tmp_path / "m.gguf", moe_tensors())
    result = CliRunner().invoke(command, [str(src), str(tmp_path / "m.lmpack")])
    assert result.exit_code == 0
    assert "lacks: a tokenizer (the metadata have no tokenizer.ggml.model)" in result.stderr


@pytest.mark.parametrize(
    "name", ["model.layers.2.mlp.experts.65536.up_proj.weight", "model.layers.2.mlp.experts.up_proj"]
)
def test_more_experts_than_a_pack_can_have_are_refused_before_they_are_counted(
    tmp_path: Path, name: str
) -> None:
    with pytest.raises(UnsupportedError, match="makes 65537 experts, a layer has at most 65536"):
        convert(hf(tmp_path, HFTensor(name, "U8", (65_537, 1, 1))), tmp_path / "m.lmpack")

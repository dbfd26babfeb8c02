"""Safetensors checkpoints: headers are the truth, an index only names the files, and every lie is refused."""

from __future__ import annotations

import json
import struct
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest
from safetensors import safe_open

from converters.checkpoint import open_checkpoint
from converters.conversion import convert
from lmpack.cli.main import run
from lmpack.errors import CheckpointError, LmpackError, UnsupportedError, UsageError
from lmpack.pack import read_manifest
from tests.safetensors_fixtures import (
    CONFIG,
    SMALL_FILES,
    Tensor,
    moe_tensors,
    safetensors_bytes,
    safetensors_header,
    with_header,
    write_hf_folder,
)

if TYPE_CHECKING:
    from pathlib import Path

TENSORS = moe_tensors()
HALVES = [TENSORS[:9], TENSORS[9:]]
SMALL = sorted(["config.json", *SMALL_FILES])


def test_a_folder_gives_every_tensors_place(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "m", HALVES)
    checkpoint = open_checkpoint(folder)
    assert [tensor.name for tensor in checkpoint.tensors] == [tensor.name for tensor in TENSORS]
    for placed, tensor in zip(checkpoint.tensors, TENSORS, strict=True):
        raw = checkpoint.files[placed.file].path.read_bytes()
        assert raw[placed.offset : placed.offset + placed.nbytes] == tensor.raw
    weights = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    others = sorted([*SMALL, "model.safetensors.index.json"])
    assert [file.name for file in checkpoint.files] == weights + others


def test_the_safetensors_package_reads_the_same(models_dir: Path) -> None:
    checkpoint = open_checkpoint(models_dir / "families" / "gpt_oss" / "hf")
    for number, file in enumerate(checkpoint.files[:2]):
        ours = {tensor.name: list(tensor.shape) for tensor in checkpoint.tensors if tensor.file == number}
        with safe_open(file.path, "np") as oracle:
            assert ours == {name: oracle.get_slice(name).get_shape() for name in oracle.keys()}  # noqa: SIM118


@pytest.mark.parametrize("name", ["model-00002-of-00002.safetensors", "model.safetensors.index.json"])
def test_a_shard_or_the_index_stands_for_its_folder(tmp_path: Path, name: str) -> None:
    folder = write_hf_folder(tmp_path / "m", HALVES)
    assert open_checkpoint(folder / name).files == open_checkpoint(folder).files


def test_without_an_index_all_files_count(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_hf_folder(tmp_path / "m", HALVES, index=False))
    assert len(checkpoint.tensors) == len(TENSORS)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ["m-00001-of-00003", "m-00003-of-00003"],
            r"lacks m-00002-of-00003\.safetensors of 3 shards, and has no",
        ),
        (["m-00002-of-00003"], r"lacks m-00001-of-00003\.safetensors, m-00003-of-00003\.safetensors of"),
        (
            ["m-00001-of-00009"],
            r"lacks m-00002-\S+, m-00003-\S+, m-00004-of-00009\.safetensors and 5 more of",
        ),
        (
            ["m-00001-of-00002", "m-00002-of-00003"],
            r"two sets are mixed, m-\*-of-00002 and m-\*-of-00003; keep",
        ),
        (
            ["m-00001-of-00001", "m-00004-of-00003"],
            r"m-00004-of-00003\.safetensors: the name claims shard 00004 of",
        ),
        (["m", "m-00000-of-00001"], r"m-00000-of-00001\.safetensors: the name claims shard 00000 of"),
        (["a-00001-of-00001", "b-00002-of-00002"], r"lacks b-00001-of-00002\.safetensors of"),
    ],
)
def test_a_set_without_an_index_that_is_not_whole_is_refused_and_nothing_written(
    tmp_path: Path, names: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    for number, name in enumerate(names):
        (folder / f"{name}.safetensors").write_bytes(safetensors_bytes(TENSORS[number :: len(names)]))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)
    assert run(["convert", str(folder), str(tmp_path / "m.lmpack")]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_whole_sets_and_other_files_go_together_without_an_index(tmp_path: Path) -> None:
    names = ["consolidated", "m-00001-of-00002", "m-00002-of-00002", "n-00001-of-00001"]
    for number, name in enumerate(names):
        (tmp_path / f"{name}.safetensors").write_bytes(safetensors_bytes(TENSORS[number :: len(names)]))
    assert [file.name for file in open_checkpoint(tmp_path).files] == [
        f"{name}.safetensors" for name in names
    ]


def test_an_index_says_which_shards_count(tmp_path: Path) -> None:
    write_hf_folder(tmp_path, [TENSORS])
    (tmp_path / "m-00001-of-00003.safetensors").write_bytes(b"stray")
    index = {"weight_map": {tensor.name: "model.safetensors" for tensor in TENSORS}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "m-00001-of-00003.safetensors" in open_checkpoint(tmp_path).left_out


def test_a_lone_file_needs_no_config(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    path.write_bytes(safetensors_bytes(TENSORS))
    (tmp_path / "notes.txt").write_text("not of this model")
    checkpoint = open_checkpoint(path)
    assert [file.name for file in checkpoint.files] == ["weights.safetensors"]
    assert checkpoint.describe().architecture == "unknown"


def test_a_file_beside_a_config_brings_the_small_files(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "m", [TENSORS], index=False)
    checkpoint = open_checkpoint(folder / "model.safetensors")
    assert [file.name for file in checkpoint.files] == ["model.safetensors", *SMALL]


def test_small_files_in_folders_are_kept_and_other_weights_left_out(tmp_path: Path) -> None:
    files = {
        "assets/a/vocab.txt": b"x",
        ".cache/huggingface/x": b"",
        "pytorch_model.bin": b"x",
        "old.gguf": b"x",
    }
    folder = write_hf_folder(tmp_path / "m", HALVES, small_files=files)
    (folder / "stray.safetensors").write_bytes(safetensors_bytes([Tensor("x", "F32", (1,))]))
    (folder / "old.gguf").unlink()
    checkpoint = open_checkpoint(folder)
    assert "assets/a/vocab.txt" in [file.name for file in checkpoint.files]
    assert checkpoint.left_out == ("pytorch_model.bin", "stray.safetensors")


def test_links_of_a_download_cache_are_followed_but_not_to_folders(tmp_path: Path) -> None:
    blobs = write_hf_folder(tmp_path / "blobs", HALVES, small_files={})
    (tmp_path / "snapshot").mkdir()
    for path in blobs.iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(path)
    (tmp_path / "snapshot" / "elsewhere").symlink_to(blobs, target_is_directory=True)
    checkpoint = open_checkpoint(tmp_path / "snapshot")
    assert sorted(file.name for file in checkpoint.files) == sorted(path.name for path in blobs.iterdir())
    assert checkpoint.left_out == ("elsewhere",)


def test_an_index_that_names_a_wrong_file_does_not_matter(tmp_path: Path) -> None:
    swapped = {
        TENSORS[0].name: "model-00002-of-00002.safetensors",
        TENSORS[-1].name: "model-00001-of-00002.safetensors",
    }
    checkpoint = open_checkpoint(write_hf_folder(tmp_path / "m", HALVES, index=swapped))
    assert len(checkpoint.tensors) == len(TENSORS)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (
            {"gone.weight": "model-00001-of-00002.safetensors"},
            "index names tensor 'gone.weight', but no file holds it",
        ),
        ({"a": "model-00003-of-00002.safetensors"}, r"shard model-00003-of-00002\.safetensors is missing"),
        ({"a": "../../etc/secret.safetensors"}, "expected one of its own folder"),
        ({"a": "/etc/passwd"}, "expected one of its own folder"),
        ({"a": 3}, "expected one of its own folder"),
    ],
)
def test_a_stale_or_hostile_index_is_refused(tmp_path: Path, index: dict[str, Any], message: str) -> None:
    folder = write_hf_folder(tmp_path / "m", HALVES, index=index)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)


def test_two_indexes_are_ambiguous(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "m", HALVES)
    (folder / "other.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(UsageError, match="holds 2 indexes"):
        open_checkpoint(folder)


def test_a_name_in_two_files_is_refused(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "m", [TENSORS[:5], TENSORS[4:]], index=False)
    with pytest.raises(CheckpointError, match=f"tensor {TENSORS[4].name} is also in"):
        open_checkpoint(folder)


@pytest.mark.parametrize("raw", [b"{", b"[1]", b"\xff{}", b"[" * 100_000])
def test_a_config_that_is_no_json_object_is_refused(tmp_path: Path, raw: bytes) -> None:
    folder = write_hf_folder(tmp_path / "m", HALVES)
    (folder / "config.json").write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"config\.json: is not"):
        open_checkpoint(folder)


def test_every_dtype_empty_tensors_scalars_and_unicode_names_are_read(tmp_path: Path) -> None:
    dtypes = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "BOOL", "I64", "U8", "F16")
    tensors = [Tensor(f"größe.{dtype}", dtype, (2, 4)) for dtype in dtypes]
    tensors += [Tensor("empty", "F32", (0, 3)), Tensor("scalar", "F32", ())]
    path = tmp_path / "m.safetensors"
    path.write_bytes(safetensors_bytes(tensors))
    found = {tensor.name: (tensor.dtype, tensor.shape) for tensor in open_checkpoint(path).tensors}
    assert found == {tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors}


A = [Tensor("a", "F32", (2,)), Tensor("b", "F32", (3,))]
DATA = b"".join(tensor.raw for tensor in A)


def changed(name: str, **fields: Any) -> bytes:
    header = safetensors_header(A)
    header[name] = {key: value for key, value in (header[name] | fields).items() if value is not ...}
    return with_header(header, DATA)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "git lfs pull"),
        (b"<html><body>404</body></html>" * 3, "web page"),
        (struct.pack("<Q", 1 << 62) + b"{}", "header is said to have 4611686018427387904 bytes"),
        (struct.pack("<Q", 100) + b"{}" + bytes(50), "truncated, or not a safetensors file"),
        (with_header(b"[]", b""), "must start with {"),
        (with_header(b'{"a": 1', b""), "is not JSON"),
        (
            with_header(b'{"a": {"dtype": "U8", "shape": [], "data_offsets": [0, 1]}, "a": 1}', b""),
            "stands twice",
        ),
        (with_header(b'{"a": ' + b"[" * 100_000, b""), "nested too deeply"),
        (with_header({"a": 1}, b""), "expected dtype, shape and data_offsets"),
        (changed("a", dtype=...), "expected dtype, shape and data_offsets"),
        (changed("a", extra=1), "expected dtype, shape and data_offsets"),
        (changed("a", shape=[True, 2]), "is malformed"),
        (changed("a", shape=[-2]), "is malformed"),
        (changed("a", shape=[2.0]), "is malformed"),
        (changed("a", data_offsets=[0, 8, 8]), "is malformed"),
        (changed("a", data_offsets=[8, 0]), "lie outside the file"),
        (changed("b", data_offsets=[8, 24]), "lie outside the file"),
        (changed("a", shape=[3]), "8 bytes, but F32 of shape .3. takes 12"),
        (changed("a", shape=[1 << 62]), "is beyond"),
        (changed("a", shape=[1 << 50, 1 << 50]), "8 bytes, but F32"),
        (changed("b", data_offsets=[4, 16]), "overlaps the one before it"),
        (changed("a", shape=[1], data_offsets=[0, 4]), "leaves a gap before it"),
        (safetensors_bytes(A) + b"x", "goes on after its tensors"),
        (safetensors_bytes(A)[:-1], "lie outside the file"),
    ],
    ids=count(),
)
def test_a_header_that_lies_is_refused_with_the_reason(tmp_path: Path, raw: bytes, message: str) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)


def test_a_dtype_without_a_known_size_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(changed("a", dtype="F3"))
    with pytest.raises(UnsupportedError, match=r"tensor 'a': dtype 'F3' is not known"):
        open_checkpoint(path)


def test_inverting_any_byte_of_a_header_gives_a_checkpoint_or_an_error_of_ours(tmp_path: Path) -> None:
    whole = bytearray(safetensors_bytes(A, {"format": "pt"}))
    path = tmp_path / "m.safetensors"
    for at in range(len(whole) - len(DATA)):
        whole[at] ^= 0xFF
        path.write_bytes(whole)
        with pytest.raises(LmpackError):
            open_checkpoint(path)
        whole[at] ^= 0xFF


@pytest.mark.parametrize("num_experts", ["4", 0, -2, 0.5, True, [4]])
def test_a_number_of_experts_that_is_none_cuts_nothing(tmp_path: Path, num_experts: object) -> None:
    flat = Tensor("transformer.blocks.0.ffn.experts.mlp.v1", "F16", (8, 2))
    config = {"model_type": "dbrx", "ffn_config": {"moe_num_experts": num_experts}}
    folder = write_hf_folder(tmp_path / "m", [[flat]], config=config)
    with pytest.raises(CheckpointError, match="speaks of experts in a way that lmpack does not know"):
        open_checkpoint(folder).roles()


def test_the_config_is_that_of_config_json(tmp_path: Path) -> None:
    description = open_checkpoint(write_hf_folder(tmp_path / "m", HALVES)).describe()
    assert description.architecture == CONFIG["model_type"]
    assert description.config["num_experts"] == 4
    assert description.config["moe_intermediate_size"] == 64  # from the experts' shapes
    assert json.loads((tmp_path / "m" / "config.json").read_text()) == CONFIG


@pytest.mark.parametrize("value", ["2e308", "NaN", '[2e308, ""]', "[1.0, -Infinity]"])
def test_a_number_that_is_not_finite_is_left_out_of_the_config(tmp_path: Path, value: str) -> None:
    folder = write_hf_folder(tmp_path / "m", HALVES)
    text = json.dumps(CONFIG | {"rms_norm_eps": "HERE"}).replace('"HERE"', value)
    (folder / "config.json").write_text(text)
    convert(folder, tmp_path / "m.lmpack")
    assert "rms_norm_eps" not in read_manifest(tmp_path / "m.lmpack").config


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"


def test_a_small_file_that_was_not_fetched_is_refused(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "m", HALVES, small_files={"tokenizer.json": LFS_POINTER})
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: is a Git LFS pointer, .* git lfs pull"):
        open_checkpoint(folder)


def test_a_small_file_cannot_bring_in_another_file_of_the_machine(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "m", HALVES)
    (tmp_path / "secret").write_text("a key")
    (folder / "notes.md").symlink_to("../secret")
    with pytest.raises(CheckpointError, match=r"notes\.md: is a link to .*secret, outside of the checkpoint"):
        open_checkpoint(folder)
    (folder / "notes.md").unlink()
    (folder / "notes.md").symlink_to("README.md")
    assert "notes.md" in [file.name for file in open_checkpoint(folder).files]


def test_a_pack_beside_the_weights_is_no_part_of_them(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "hf", [moe_tensors()])
    (folder / "app").mkdir()
    (folder / "app" / "manifest.json").write_text('{"name": "another program"}', "ascii")
    first = convert(folder, folder / "pack")  # whatever it is called
    second = convert(folder, tmp_path / "again.lmpack")
    assert second.pack_id == first.pack_id
    assert not second.left_out
    assert "app/manifest.json" in [
        file.name for file in read_manifest(tmp_path / "again.lmpack").source.files
    ]

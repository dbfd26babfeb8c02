"""GGUF checkpoints: sets are opened by any of their files, and incomplete or mixed ones are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from converters.checkpoint import open_checkpoint
from lmpack.errors import CheckpointError, UnsupportedError, UsageError
from tests.gguf_fixtures import METADATA, Tensor, gguf_bytes, moe_tensors, write_shards

if TYPE_CHECKING:
    from pathlib import Path

TENSORS = moe_tensors()
THIRDS = [TENSORS[:5], TENSORS[5:6], TENSORS[6:]]


def test_a_single_file_gives_every_tensors_place(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(TENSORS, METADATA, gap=2))
    checkpoint = open_checkpoint(path)
    raw = path.read_bytes()
    assert [file.name for file in checkpoint.files] == ["m.gguf"]
    assert [tensor.name for tensor in checkpoint.tensors] == [tensor.name for tensor in TENSORS]
    for placed, tensor in zip(checkpoint.tensors, TENSORS, strict=True):
        assert (placed.dtype, placed.shape) == (tensor.dtype, tensor.shape)
        assert raw[placed.offset : placed.offset + placed.nbytes] == tensor.raw


def test_a_set_is_opened_by_any_shard_or_its_folder(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, THIRDS)
    whole = open_checkpoint(tmp_path)
    assert [file.path for file in whole.files] == paths
    assert len(whole.tensors) == len(TENSORS)
    for path in paths:
        assert open_checkpoint(path).tensors == whole.tensors


def test_links_of_a_download_cache_are_followed(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    for number, path in enumerate(write_shards(tmp_path / "blobs", THIRDS)):
        path.rename(tmp_path / "blobs" / f"{number:064}")
        (tmp_path / "snapshot" / path.name).symlink_to(f"../blobs/{number:064}")
    checkpoint = open_checkpoint(tmp_path / "snapshot" / "model-00002-of-00003.gguf")
    assert [file.name for file in checkpoint.files] == [f"model-0000{i}-of-00003.gguf" for i in (1, 2, 3)]


def test_an_empty_first_shard_is_sound(tmp_path: Path) -> None:
    write_shards(tmp_path, [[], TENSORS])
    assert len(open_checkpoint(tmp_path).tensors) == len(TENSORS)


def test_one_shard_of_one_needs_no_split_keys(tmp_path: Path) -> None:
    path = tmp_path / "m-00001-of-00001.gguf"
    path.write_bytes(gguf_bytes(TENSORS, METADATA))
    assert len(open_checkpoint(path).tensors) == len(TENSORS)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, THIRDS)
    paths[1].unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.gguf is missing"):
        open_checkpoint(paths[2])


def test_a_dangling_link_is_a_missing_shard(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, THIRDS)
    paths[1].unlink()
    paths[1].symlink_to("nowhere")
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.gguf is missing"):
        open_checkpoint(paths[0])


def test_swapped_shards_are_noticed(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, THIRDS)
    paths[1].rename(tmp_path / "x")
    paths[2].rename(paths[1])
    (tmp_path / "x").rename(paths[2])
    with pytest.raises(CheckpointError, match=r"split\.no is 2, its name says 1"):
        open_checkpoint(tmp_path)


def test_a_shard_of_another_model_is_noticed(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, THIRDS)
    (tmp_path / "other").mkdir()
    other = write_shards(tmp_path / "other", [TENSORS[:5], TENSORS[5:7], TENSORS[6:]])
    other[1].rename(paths[1])
    with pytest.raises(CheckpointError, match="is a shard of another model"):
        open_checkpoint(tmp_path)


def test_a_set_with_too_few_tensors_is_refused(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, THIRDS)
    (tmp_path / "other").mkdir()
    split = {
        "split.no": np.uint16(1),
        "split.count": np.uint16(3),
        "split.tensors.count": np.int32(len(TENSORS)),
    }
    paths[1].write_bytes(gguf_bytes([], split))
    with pytest.raises(CheckpointError, match=r"split\.tensors\.count is \d+, the 3 shards hold \d+"):
        open_checkpoint(tmp_path)


def test_a_renamed_shard_is_refused(tmp_path: Path) -> None:
    path = write_shards(tmp_path, THIRDS)[0].rename(tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match="keep the names that llama-gguf-split gave"):
        open_checkpoint(path)


def test_several_models_in_a_folder_are_ambiguous(tmp_path: Path) -> None:
    write_shards(tmp_path, THIRDS)
    (tmp_path / "b.gguf").write_bytes(gguf_bytes(TENSORS, METADATA))
    with pytest.raises(UsageError, match=r"holds 2 models; name one: b[.]gguf, model-of-00003"):
        open_checkpoint(tmp_path)


def test_a_name_in_two_shards_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path, [TENSORS[:3], TENSORS[2:]])
    with pytest.raises(CheckpointError, match=r"blk[.]0[.]ffn_norm[.]weight is also in"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([Tensor("a", "F32", (4,)), Tensor("a", "F32", (4,))], "tensor a is there twice"),
        ([Tensor("a", "F32", (4,), offset=1 << 40)], "tensor a ends at byte"),
        ([Tensor("a", "F32", (4,), offset=(1 << 64) - 32)], "tensor a ends at byte"),
        ([Tensor("a", "F32", (1 << 50,), data=b"")], "truncated or damaged"),
        ([Tensor("a", "F32", (64,)), Tensor("b", "F32", (64,), offset=32)], "inside a"),
        ([Tensor("a", "Q4_K", (2, 64), data=b"")], "multiple of 256"),
    ],
)
def test_tensors_in_impossible_places_are_refused(
    tmp_path: Path, tensors: list[Tensor], message: str
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(tensors, METADATA))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)


@pytest.mark.parametrize("ggml_type", [4, 36, 43, 1 << 31])
def test_a_type_without_a_known_size_is_refused(tmp_path: Path, ggml_type: int) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes([Tensor("a", "F32", (4,), ggml_type=ggml_type)], METADATA))
    with pytest.raises(UnsupportedError, match=f"tensor a has ggml type {ggml_type}"):
        open_checkpoint(path)


def test_a_truncated_file_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(TENSORS, METADATA)[:-5000])
    with pytest.raises(CheckpointError, match="truncated"):
        open_checkpoint(path)


def test_a_path_that_is_no_checkpoint_is_wrong_usage(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        open_checkpoint(tmp_path / "absent.gguf")
    with pytest.raises(UsageError, match=r"no \*\.gguf or \*\.safetensors"):
        open_checkpoint(tmp_path)
    (tmp_path / "a.gguf").touch()
    (tmp_path / "a.safetensors").touch()
    with pytest.raises(UsageError, match="holds GGUF and safetensors"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("number", [0, 4])
def test_a_shard_beyond_the_count_is_refused(tmp_path: Path, number: int) -> None:
    paths = write_shards(tmp_path, THIRDS)
    extra = tmp_path / f"model-{number:05}-of-00003.gguf"
    extra.write_bytes(paths[2].read_bytes())
    for path in (extra, tmp_path, *paths):
        with pytest.raises(CheckpointError, match=f"{extra.name}: the name claims shard {number} of 3"):
            open_checkpoint(path)


def test_a_set_of_another_count_beside_it_is_another_set(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, THIRDS)
    halves = write_shards(tmp_path, [TENSORS[:5], TENSORS[5:]])
    whole = tmp_path / "model.gguf"
    whole.write_bytes(gguf_bytes(TENSORS, METADATA))
    for path, number in [(paths[1], 3), (halves[1], 2), (whole, 1)]:
        assert len(open_checkpoint(path).files) == number
    with pytest.raises(UsageError, match="holds 3 models; name one"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["x" * 513, "two\nlines", "\x1b[31m"])
def test_a_name_that_no_pack_can_hold_is_refused_in_one_short_line(tmp_path: Path, name: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes([Tensor(name, "F32", (1 << 40,), data=b"")], METADATA))
    with pytest.raises(CheckpointError, match="a pack cannot hold this") as caught:
        open_checkpoint(path)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400

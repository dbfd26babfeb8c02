"""Unpacking: a compressed pack leads back to the plain one and to its source, byte for byte."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from converters.export import export
from lmpack.errors import PackError, UsageError
from lmpack.expert_key import ExpertKey
from lmpack.unpacking import unpack
from lmpack.validation import validate
from tests.compressed_packs import plain_and_compressed, trained_tensors, write_gguf
from tests.expert_packs import all_keys
from tests.round_trip import files_below
from tests.test_validation import flip

if TYPE_CHECKING:
    from pathlib import Path

    from lmpack.pack import Pack

KEY = ExpertKey(1, 1)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "Q8_0"])
def test_unpacking_gives_the_plain_pack_and_export_the_source(dtype: str, tmp_path: Path) -> None:
    tensors = trained_tensors("F32") if dtype != "Q8_0" else trained_tensors("BF16")
    if dtype == "Q8_0":
        tensors = [replace(t, dtype="Q8_0", data=None) if t.dtype == "BF16" else t for t in tensors]
    elif dtype != "F32":
        tensors = trained_tensors(dtype)
    src = write_gguf(tmp_path / "model.gguf", tensors)
    plain, compressed = plain_and_compressed(src, tmp_path)
    assert validate(compressed.path).ok
    report = unpack(compressed, tmp_path / "unpacked.lmpack")
    assert report.pack_id == plain.manifest.pack_id == compressed.manifest.uncompressed().pack_id
    assert files_below(tmp_path / "unpacked.lmpack") == files_below(plain.path)
    export(compressed, tmp_path / "out")
    assert files_below(tmp_path / "out") == {"model.gguf": src.read_bytes()}
    for key in all_keys(plain):
        assert compressed.read_expert(key) == plain.read_expert(key)


def test_identical_experts_of_other_parts_keep_a_file_for_each(tmp_path: Path) -> None:
    tensors = [replace(t, data=bytes(t.nbytes)) for t in trained_tensors("F16")]
    halves = [
        replace(t, dtype="BF16") if t.name.startswith("blk.1.") and t.dtype == "F16" else t for t in tensors
    ]
    fused = [t for t in halves if not t.name.startswith("blk.1.ffn_up_exps.bias")]
    plain, compressed = plain_and_compressed(write_gguf(tmp_path / "zeros.gguf", fused), tmp_path)
    assert {expert.file for layer in compressed.manifest.layers for expert in layer.experts} == {
        "experts/L000/E0000.bin",
        "experts/L001/E0000.bin",
    }
    assert len({expert.file for layer in plain.manifest.layers for expert in layer.experts}) == 1
    unpack(compressed, tmp_path / "unpacked.lmpack")
    assert files_below(tmp_path / "unpacked.lmpack") == files_below(plain.path)


def test_unpacking_keeps_profiles(compressed: Pack, tmp_path: Path) -> None:
    (compressed.path / "profiles" / "mine").mkdir(parents=True)
    for name in ("profiles/a.safetensors", "profiles/mine/b.safetensors"):
        (compressed.path / name).write_bytes(name.encode())
    unpack(compressed, tmp_path / "unpacked.lmpack")
    for name in ("profiles/a.safetensors", "profiles/mine/b.safetensors"):
        assert (tmp_path / "unpacked.lmpack" / name).read_bytes() == name.encode()


def test_unpacking_does_not_wait_for_a_pipe(compressed: Pack, tmp_path: Path) -> None:
    (compressed.path / "profiles").mkdir()
    os.mkfifo(compressed.path / "profiles" / "pipe")
    with pytest.raises(PackError, match="profiles/pipe: not a regular file"):
        unpack(compressed, tmp_path / "unpacked.lmpack")
    assert not list(tmp_path.glob("unpacked*"))


def test_two_processes_do_not_unpack_to_one_name(compressed: Pack, tmp_path: Path) -> None:
    refused = []

    def second(_: int) -> None:
        try:
            unpack(compressed, tmp_path / "unpacked.lmpack")
        except UsageError as error:
            refused.append(str(error))

    unpack(compressed, tmp_path / "unpacked.lmpack", progress=second)
    assert set(refused) == {
        f"{tmp_path / 'unpacked.lmpack.partial'}: another process is writing it; wait for it"
    }
    assert validate(tmp_path / "unpacked.lmpack").ok


def test_what_cannot_be_unpacked_is_refused_and_leaves_nothing(
    packs: tuple[Pack, Pack], compressed: Pack, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="is not compressed"):
        unpack(packs[0], tmp_path / "again.lmpack")
    with pytest.raises(UsageError, match="exists"):
        unpack(compressed, compressed.path)
    (tmp_path / "broken.lmpack.partial").mkdir()
    with pytest.raises(
        UsageError, match=r"partial: exists; a command that was killed left it; delete it first"
    ):
        unpack(compressed, tmp_path / "broken.lmpack")
    (tmp_path / "broken.lmpack.partial").rmdir()
    flip(compressed.path / KEY.file, 100)
    with pytest.raises(PackError, match=rf"{KEY.file}: .*; run: lmpack validate"):
        unpack(compressed, tmp_path / "broken.lmpack")
    assert not list(tmp_path.glob("broken*"))

"""Reading a pack: every tensor comes back, and a pack whose files are not there does not open."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import pytest

from lmpack.errors import ManifestError, PackError, StorageError
from lmpack.expert_key import ExpertKey
from lmpack.manifest import Source, SourceFile
from lmpack.pack import Pack
from lmpack.pack_writer import PackWriter

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import TinyPack


def test_every_tensor_comes_back(tiny_pack: TinyPack) -> None:
    pack = Pack.open(tiny_pack.path)
    for name, raw in tiny_pack.tensors.items():
        kind, _, rest = name.partition(":")
        if kind == "shared":
            assert pack.read_tensor(rest).tobytes() == raw
        else:
            layer, expert, role = rest.split(":")
            part = pack.manifest.layer(int(layer)).part(role)
            whole = pack.read_expert(ExpertKey(int(layer), int(expert)))
            assert whole[part.offset : part.offset + part.nbytes] == raw
            assert len(whole) == pack.manifest.layer(int(layer)).stride


def test_a_tensor_is_a_read_only_view_of_the_mapped_file(tiny_pack: TinyPack) -> None:
    pack = Pack.open(str(tiny_pack.path))
    tensor = pack.read_tensor("output.weight")
    assert tensor.dtype == np.uint8
    assert tensor.shape == (5000,)
    assert tensor.base is not None
    with pytest.raises(ValueError, match="read-only"):
        tensor[0] = 1


def test_identical_experts_share_a_file(tiny_pack: TinyPack) -> None:
    pack = Pack.open(tiny_pack.path)
    assert pack.expert_path(ExpertKey(1, 2)) == tiny_pack.path / "experts" / "L001" / "E0000.bin"
    assert pack.read_expert(ExpertKey(1, 2)) == pack.read_expert(ExpertKey(1, 0))


def test_an_expert_that_is_not_there_is_named(tiny_pack: TinyPack) -> None:
    pack = Pack.open(tiny_pack.path)
    for expert in (3, -1):
        with pytest.raises(
            PackError, match=rf"expert L001/E0*{expert}: layer 1 has only 3|expert L001/E-001"
        ):
            pack.read_expert(ExpertKey(1, expert))
    with pytest.raises(PackError, match=r"layer 0 .* no routed experts"):
        pack.expert_path(ExpertKey(0, 0))


def test_kept_files_are_found_by_their_name_in_the_source(tiny_pack: TinyPack) -> None:
    pack = Pack.open(tiny_pack.path)
    config = pack.kept_file("config.json")
    assert config is not None
    assert config.read_bytes() == tiny_pack.sources["config.json"]
    assert pack.kept_file("tokenizer.json") is None
    assert pack.kept_file("model-00001-of-00002.safetensors") is None
    rest = pack.kept_path(pack.manifest.source.files[0])
    assert rest.read_bytes() == tiny_pack.sources["model-00001-of-00002.safetensors"][:1032]


def test_a_dense_model_without_shared_tensors_is_a_pack_too(tmp_path: Path) -> None:
    with PackWriter(tmp_path / "empty.lmpack") as writer:
        nbytes, sha256 = writer.keep("source/vocab.gguf", b"GGUF")
        writer.finish(
            architecture="llama",
            config={},
            source=Source(
                "gguf", (SourceFile("vocab.gguf", 4, sha256, "source/vocab.gguf", nbytes, sha256, ()),)
            ),
        )
    pack = Pack.open(tmp_path / "empty.lmpack")
    assert pack.manifest.layers == ()
    assert (tmp_path / "empty.lmpack" / "shared.bin").stat().st_size == 0
    with pytest.raises(PackError, match="no shared tensor 'x'"):
        pack.read_tensor("x")


def test_a_tensor_without_elements_is_read_as_nothing(tmp_path: Path) -> None:
    with PackWriter(tmp_path / "hollow.lmpack") as writer:
        writer.add_shared("hollow", "F32", (0, 4))
        writer.add_shared("solid", "F32", (1,))
        writer.add_shared("last", "F32", (0,))
        writer.write_shared("solid", 0, b"four")
        nbytes, sha256 = writer.keep("source/a", b"")
        writer.finish(
            architecture="llama",
            config={},
            source=Source("safetensors", (SourceFile("a", 0, sha256, "source/a", nbytes, sha256, ()),)),
        )
    pack = Pack.open(tmp_path / "hollow.lmpack")
    assert pack.read_tensor("hollow").size == 0
    assert pack.read_tensor("last").size == 0
    assert pack.read_tensor("solid").tobytes() == b"four"


@pytest.mark.parametrize("file", ["experts/L001/E0001.bin", "shared.bin", "source/config.json"])
def test_a_missing_file_is_named_when_the_pack_opens(tiny_pack: TinyPack, file: str) -> None:
    (tiny_pack.path / file).unlink()
    with pytest.raises(PackError, match=rf"{file}.*missing.*; run: lmpack validate"):
        Pack.open(tiny_pack.path)


@pytest.mark.parametrize("file", ["experts/L001/E0001.bin", "shared.bin", "source/config.json"])
def test_a_file_of_another_size_is_named_when_the_pack_opens(tiny_pack: TinyPack, file: str) -> None:
    os.truncate(tiny_pack.path / file, 3)
    with pytest.raises(PackError, match=rf"{file}.*truncated: 3 bytes"):
        Pack.open(tiny_pack.path)
    os.truncate(tiny_pack.path / file, 1 << 20)
    with pytest.raises(PackError, match=rf"{file}.*too long: 1048576 bytes"):
        Pack.open(tiny_pack.path)


def test_links_are_refused_wherever_they_point(tiny_pack: TinyPack, tmp_path: Path) -> None:
    expert = tiny_pack.path / "experts" / "L001" / "E0001.bin"
    expert.rename(tmp_path / "elsewhere.bin")
    expert.symlink_to(tmp_path / "elsewhere.bin")
    with pytest.raises(PackError, match=r"expert L001/E0001 .*not a regular file"):
        Pack.open(tiny_pack.path)


def test_a_folder_that_is_a_link_is_refused(tiny_pack: TinyPack, tmp_path: Path) -> None:
    (tiny_pack.path / "experts").rename(tmp_path / "elsewhere")
    (tiny_pack.path / "experts").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PackError, match=r"experts: not a folder; a pack holds no links"):
        Pack.open(tiny_pack.path)


def test_an_expert_replaced_after_opening_is_not_followed(tiny_pack: TinyPack, tmp_path: Path) -> None:
    pack = Pack.open(tiny_pack.path)
    expert = pack.expert_path(ExpertKey(1, 1))
    (tmp_path / "secret").write_bytes(bytes(4096))
    expert.unlink()
    expert.symlink_to(tmp_path / "secret")
    with pytest.raises(PackError, match="not a regular file"):
        pack.read_expert(ExpertKey(1, 1))
    expert.unlink()
    os.mkfifo(expert)  # would block a reader that waits for a writer
    with pytest.raises(PackError, match="not a regular file"):
        pack.read_expert(ExpertKey(1, 1))


def test_an_expert_that_shrinks_after_opening_is_a_storage_error(tiny_pack: TinyPack) -> None:
    pack = Pack.open(tiny_pack.path)
    os.truncate(pack.expert_path(ExpertKey(1, 1)), 100)
    with pytest.raises(StorageError, match=r"expert L001/E0001: .* gave 100 of 4096 bytes"):
        pack.read_expert(ExpertKey(1, 1))


def test_a_pack_with_extra_files_opens(tiny_pack: TinyPack) -> None:
    (tiny_pack.path / "README.md").write_text("a model card")
    assert Pack.open(tiny_pack.path).manifest == tiny_pack.manifest


def test_what_is_no_pack_does_not_open(tmp_path: Path) -> None:
    with pytest.raises(PackError, match="not a folder"):
        Pack.open(tmp_path / "nothing")
    with pytest.raises(ManifestError, match=r"no manifest\.json"):
        Pack.open(tmp_path)

"""Export: the source's files again, hash for hash, or an error and nothing under their names."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from converters.conversion import convert
from converters.export import export
from lmpack.cli.export import command
from lmpack.errors import PackError, UsageError
from lmpack.unpacking import unpack
from lmpack.validation import validate
from tests.compressed_packs import trained_tensors, write_gguf
from tests.gguf_fixtures import METADATA, gguf_bytes, moe_tensors
from tests.round_trip import round_trip
from tests.safetensors_fixtures import moe_tensors as hf_moe_tensors
from tests.safetensors_fixtures import write_hf_folder
from tests.test_validation import flip

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(moe_tensors(), METADATA))
    return path


@pytest.fixture
def pack(tmp_path: Path, source: Path) -> Path:
    convert(source, tmp_path / "m.lmpack")
    return tmp_path / "m.lmpack"


def test_every_model_of_every_family_comes_back(models_dir: Path, tmp_path: Path) -> None:
    sources = sorted(models_dir.glob("families/*/hf")) + sorted(models_dir.glob("families/*/*.gguf"))
    sources += [models_dir / "tiny" / "hf", models_dir / "tiny" / "tiny-Q4_K_M.gguf"]
    assert len(sources) > 50
    for number, path in enumerate(sources):
        work = tmp_path / str(number)
        work.mkdir()
        round_trip(path, work)


@pytest.mark.parametrize("shard", [None, 1, 3])
def test_a_split_set_comes_back_whichever_shard_opened_it(
    models_dir: Path, tmp_path: Path, shard: int | None
) -> None:
    folder = models_dir / "families" / "qwen3_moe" / "split"
    names = [f"qwen3_moe-bf16-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    pack = round_trip(folder if shard is None else folder / names[shard - 1], tmp_path, names=names)
    assert [file.name for file in pack.manifest.source.files] == names


@pytest.mark.parametrize("name", ["x" * 248, "x" * 255, "ü" * 127, f"sub/{'y' * 255}"])
def test_the_longest_names_come_back(tmp_path: Path, name: str) -> None:
    folder = write_hf_folder(tmp_path / "hf", [hf_moe_tensors()], small_files={name: b"kept"})
    round_trip(folder, tmp_path)
    assert (folder / name).read_bytes() == b"kept"


def test_a_damaged_compressed_pack_is_to_be_validated(tmp_path: Path) -> None:
    convert(write_gguf(tmp_path / "t.gguf", trained_tensors("F16")), tmp_path / "z.lmpack", compress=True)
    flip(tmp_path / "z.lmpack" / "experts/L000/E0001.bin", 200)
    with pytest.raises(
        PackError, match=r"E0001\.bin: a compressed tensor is damaged .*; run lmpack validate on"
    ):
        export(tmp_path / "z.lmpack", tmp_path / "out")


def test_a_file_that_exists_is_never_overwritten(tmp_path: Path, pack: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "m.gguf").write_text("mine")
    with pytest.raises(UsageError, match=r"m\.gguf: exists; export overwrites nothing"):
        export(pack, tmp_path / "out")
    assert (tmp_path / "out" / "m.gguf").read_text() == "mine"


def test_what_a_killed_export_left_is_called_so(tmp_path: Path, pack: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "m.gguf.partial").write_bytes(b"half")
    with pytest.raises(
        UsageError, match=r"m\.gguf\.partial: exists; an export that was killed left it; delete it"
    ):
        export(pack, tmp_path / "out")


def test_two_processes_do_not_export_into_one_folder(tmp_path: Path, source: Path, pack: Path) -> None:
    refused = []

    def second(_: int) -> None:
        try:
            export(pack, tmp_path / "out")
        except UsageError as error:
            refused.append(str(error))

    export(pack, tmp_path / "out", progress=second)
    assert set(refused) == {f"{tmp_path / 'out'}: another process is exporting into it; wait for it"}
    assert (tmp_path / "out" / "m.gguf").read_bytes() == source.read_bytes()


@pytest.mark.parametrize("folder", ["m.lmpack", "m.lmpack/experts/new", "other.lmpack"])
def test_nothing_is_exported_into_a_pack(tmp_path: Path, source: Path, pack: Path, folder: str) -> None:
    convert(source, tmp_path / "other.lmpack")
    with pytest.raises(UsageError, match=f"{folder}: would damage the pack"):
        export(pack, tmp_path / folder)
    assert validate(pack).ok


@pytest.mark.parametrize("place", ["m.lmpack/x", "m.lmpack/profiles/x", "m.lmpack/new/x", "link/x"])
def test_no_pack_is_made_inside_of_a_pack(tmp_path: Path, source: Path, pack: Path, place: str) -> None:
    convert(source, tmp_path / "zstd.lmpack", compress=True)
    (tmp_path / "link").symlink_to(pack / "experts")
    before = sorted(tmp_path.rglob("*"))
    for write in (
        lambda: convert(source, tmp_path / place),
        lambda: unpack(tmp_path / "zstd.lmpack", tmp_path / place),
    ):
        with pytest.raises(UsageError, match=r"x: would damage the pack .*m\.lmpack; write outside of it"):
            write()
    assert sorted(tmp_path.rglob("*")) == before


def test_a_pack_is_not_converted_again(tmp_path: Path, pack: Path) -> None:
    with pytest.raises(
        UsageError, match=r"m\.lmpack: is a pack already; lmpack export gives its source back"
    ):
        convert(pack, tmp_path / "again.lmpack")


def test_another_programs_manifest_is_no_pack(tmp_path: Path, source: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"manifest_version": 3}')
    assert validate(convert(source, tmp_path / "m.lmpack").path).ok


@pytest.mark.parametrize("file", ["experts/L001/E0002.bin", "shared.bin", "source/m.gguf.rest"])
def test_a_damaged_pack_gives_an_error_and_no_file(tmp_path: Path, pack: Path, file: str) -> None:
    raw = bytearray((pack / file).read_bytes())
    raw[40] ^= 0xFF
    (pack / file).write_bytes(raw)
    with pytest.raises(PackError, match="run: lmpack validate"):
        export(pack, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_progress_counts_every_byte(tmp_path: Path, source: Path, pack: Path) -> None:
    done: list[int] = []
    report = export(pack, tmp_path / "out", progress=done.append)
    assert sum(done) == report.nbytes == source.stat().st_size


def test_the_command_names_the_files(tmp_path: Path, source: Path, pack: Path) -> None:
    out = tmp_path / "out"
    result = CliRunner().invoke(command, [str(pack), str(out), "--json"])
    assert result.exit_code == 0
    document = json.loads(result.output)
    assert [file["name"] for file in document["files"]] == ["m.gguf"]
    assert (out / "m.gguf").read_bytes() == source.read_bytes()
    result = CliRunner().invoke(command, [str(pack), str(tmp_path / "again")])
    assert str(tmp_path / "again" / "m.gguf") in result.output

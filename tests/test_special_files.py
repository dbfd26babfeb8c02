"""Special files: what is no file, or only stands for one, is named in one line and never passed over or waited for."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import pytest

from lmpack.cli.main import run
from tests.gguf_fixtures import METADATA, gguf_bytes
from tests.gguf_fixtures import moe_tensors as gguf_tensors
from tests.safetensors_fixtures import moe_tensors, write_hf_folder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TENSORS = moe_tensors()
KINDS = ["a pipe", "a socket", "a device", "a link to nothing"]
PARSED = ["config.json", "model.safetensors.index.json"]
KEPT = ["tokenizer.json", "generation_config.json", "sub/added.json"]
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A Hugging Face folder below the current one, where nothing else may appear."""
    monkeypatch.chdir(tmp_path)
    yield write_hf_folder(tmp_path / "hf", [TENSORS[:9], TENSORS[9:]])
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith("out.lmpack")]


def make_special(path: Path, kind: str) -> None:
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a socket":
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(os.path.relpath(path))  # an address has room for a hundred characters
    else:
        path.symlink_to("/dev/null" if kind == "a device" else "nowhere")


def refusal(args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of a command that fails."""
    assert run(args) == 1
    shown = capsys.readouterr()
    assert not shown.out
    (line,) = shown.err.splitlines()
    return line


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*PARSED, *KEPT])
def test_what_is_no_file_in_a_folder_is_named(
    folder: Path, name: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make_special(folder / name, kind)
    assert f"{name}: is {kind}" in refusal(["convert", "hf", "out.lmpack"], capsys)


@pytest.mark.parametrize("kind", KINDS[:3])
@pytest.mark.parametrize("name", ["m.gguf", "m.safetensors"])
@pytest.mark.parametrize("line", ["convert {} out.lmpack", "inspect {}", "validate pack --source {}"])
def test_what_is_no_file_is_no_checkpoint(
    tmp_path: Path,
    demo_pack: Path,
    name: str,
    line: str,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pack").symlink_to(demo_pack)
    make_special(tmp_path / name, kind)
    assert f"{name}: is {kind}, expected a regular file" in refusal(line.format(name).split(), capsys)


def test_a_name_too_long_for_a_pack_is_refused_before_anything_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model-00002-of-00002.safetensors").rename(folder / f"{'z' * 239}.safetensors")
    (folder / "model-00001-of-00002.safetensors").rename(folder / "a.safetensors")
    line = refusal(["convert", "hf", "out.lmpack"], capsys)
    assert (
        "kept: expected a relative path with / that stays inside its folder, of names of at most 255 bytes"
        in line
    )


@pytest.mark.parametrize("kind", KINDS[:3])
def test_a_manifest_that_is_no_file_is_named_and_repaired(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(gguf_tensors(), METADATA))
    pack, copy = str(tmp_path / "a.lmpack"), str(tmp_path / "b.lmpack")
    for one in (pack, copy):
        assert run(["convert", str(tmp_path / "m.gguf"), one]) == 0
    make_special(tmp_path / "a.lmpack" / "manifest.json", kind)
    capsys.readouterr()
    for args in (["inspect", pack], ["export", pack, str(tmp_path / "x")], ["diff", pack, copy]):
        assert "manifest.json: " in refusal(args, capsys)
    (tmp_path / "b.lmpack" / "shared.bin").write_bytes(b"")
    assert run(["validate", copy, "--repair", pack]) == 0  # its other files are good
    assert run(["validate", pack, "--repair", copy]) == 0


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (POINTER, "is a Git LFS pointer, not the file itself; run: git lfs pull"),
        (b"\n <!doctype html><html></html>", "is a web page (HTML), not JSON; download the file itself"),
    ],
)
@pytest.mark.parametrize("name", [*PARSED, *KEPT])
def test_what_a_download_left_in_place_of_json_is_said(
    folder: Path, name: str, raw: bytes, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(raw)
    assert f"{name}: {message}" in refusal(["convert", "hf", "out.lmpack"], capsys)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "is empty, expected JSON; download it again"),
        (b'{\n"a": 1', "is not JSON at line 2 column 7, damaged or cut short; download it again"),
        (b'{"a": "\xff"}', "is not JSON that can be read; download it again"),
    ],
)
@pytest.mark.parametrize("name", PARSED)
def test_json_that_cannot_be_read_is_said_where(
    folder: Path, name: str, raw: bytes, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / name).write_bytes(raw)
    assert f"{name}: {message}" in refusal(["convert", "hf", "out.lmpack"], capsys)

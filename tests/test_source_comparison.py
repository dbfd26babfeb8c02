"""validate --source: whether a pack holds the very bytes of a checkpoint, and where it does not."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING

import pytest

from lmpack.cli.main import run
from tests.gguf_fixtures import METADATA, gguf_bytes, moe_tensors
from tests.safetensors_fixtures import moe_tensors as hf_moe_tensors
from tests.safetensors_fixtures import write_hf_folder
from tests.test_validation import flip

if TYPE_CHECKING:
    from pathlib import Path


def compared(src: Path, pack: Path, capsys: pytest.CaptureFixture[str]) -> list[tuple[str, str]]:
    """Return the files and messages of validate --source."""
    capsys.readouterr()
    code = run(["validate", str(pack), "--source", str(src), "--json"])
    problems = json.loads(capsys.readouterr().out)["problems"]
    assert code == bool(problems)
    return [(problem["file"], problem["message"]) for problem in problems]


def test_every_byte_of_the_source_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    src, pack = tmp_path / "m.gguf", tmp_path / "m.lmpack"
    src.write_bytes(gguf_bytes(moe_tensors(extras=("bias", "shexp")), METADATA, gap=1, trailing=b"end"))
    assert run(["convert", str(src), str(pack)]) == 0
    assert compared(src, pack, capsys) == []
    nbytes, files = src.stat().st_size, set()
    for position in {*range(nbytes // 4, nbytes, 997), nbytes - 1}:
        flip(src, position)
        ((file, message),) = compared(src, pack, capsys)
        assert message == (
            f"is what the manifest says, but {src}: m.gguf has another byte {position}; the source has changed"
        )
        files.add(file)
        flip(src, position)
    assert {"shared.bin", "source/m.gguf.rest", "experts/L000/E0000.bin"} <= files


def test_missing_and_resized_files_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    src, pack = write_hf_folder(tmp_path / "hf", [hf_moe_tensors()]), tmp_path / "m.lmpack"
    assert run(["convert", str(src), str(pack)]) == 0
    assert compared(src, pack, capsys) == []
    nbytes = (src / "config.json").stat().st_size
    os.truncate(src / "tokenizer.json", 0)
    with (src / "config.json").open("ab") as file:
        file.write(b"\n")
    (src / "merges.txt").unlink(missing_ok=True)
    messages = dict(compared(src, pack, capsys))
    assert messages["source/config.json"] == (
        f"{src}: config.json has {nbytes + 1} bytes, the source had {nbytes}"
    )
    assert "tokenizer.json has 0 bytes" in messages["source/tokenizer.json"]


@pytest.mark.parametrize("what", ["another size", "another name", "other weights"])
def test_another_checkpoint_is_refused_in_one_line(
    tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    src, pack = write_hf_folder(tmp_path / "hf", [hf_moe_tensors()]), tmp_path / "m.lmpack"
    assert run(["convert", str(src), str(pack)]) == 0
    weights = src / "model.safetensors"
    nbytes = weights.stat().st_size
    if what == "another size":
        shutil.rmtree(src)
        write_hf_folder(src, [hf_moe_tensors(num_layers=3)])
        message = f"model.safetensors has {weights.stat().st_size} bytes, the source's has {nbytes} bytes; name that"
    elif what == "another name":
        shutil.rmtree(src)
        tensors = hf_moe_tensors()
        write_hf_folder(src, [tensors[:5], tensors[5:]])
        message = f"model.safetensors is missing, the source's has {nbytes} bytes; name that checkpoint"
    else:
        raw = weights.read_bytes()
        header_nbytes = 8 + int.from_bytes(raw[:8], "little")
        weights.write_bytes(raw[:header_nbytes] + bytes(byte ^ 0xFF for byte in raw[header_nbytes:]))
        message = "its files have the same names and sizes, and none of the tensors has the same bytes"
    capsys.readouterr()
    assert run(["validate", str(pack), "--source", str(src)]) == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert f"{src}: is not what {pack} was made from: {message}" in error


def test_a_bad_pack_is_not_compared_and_a_pack_is_no_source(
    tmp_path: Path, demo_gguf: Path, demo_pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["validate", str(demo_pack), "--source", str(demo_pack)]) == 2
    assert f"is a pack, not a source; run: lmpack diff {demo_pack} {demo_pack}" in capsys.readouterr().err
    assert run(["validate", str(demo_pack), "--source", str(demo_gguf)]) == 0
    assert "good, 195 files" in capsys.readouterr().out

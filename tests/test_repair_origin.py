"""The origin of a repair: another model, other weights or another form of the pack is refused in one line."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from converters.conversion import convert
from converters.quantization import Quantization
from lmpack.cli.main import run
from tests.compressed_packs import trained_tensors, write_gguf
from tests.gguf_fixtures import METADATA, gguf_bytes, moe_tensors, write_shards
from tests.test_repair import state
from tests.test_validation import flip

if TYPE_CHECKING:
    from pathlib import Path


def altered(raw: bytes) -> bytes:
    """As a fine-tuned model is: of the same names, types and sizes."""
    return bytes(byte ^ 1 for byte in raw)


@pytest.mark.parametrize(
    "options", [{}, {"compress": True}, {"quantization": Quantization.parse("experts=q8_0")}]
)
@pytest.mark.parametrize("damaged", ["one expert", "all experts", "shared.bin"])
@pytest.mark.parametrize("kind", ["checkpoint", "pack without a manifest"])
def test_other_weights_under_the_same_names_are_refused_in_one_line(
    tmp_path: Path, options: dict[str, Any], damaged: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = trained_tensors("F16")
    pack, origin = tmp_path / "m.lmpack", tmp_path / "other.gguf"
    convert(write_gguf(tmp_path / "src.gguf", tensors), pack, **options)
    write_gguf(origin, [replace(tensor, data=altered(tensor.raw)) for tensor in tensors])
    if kind != "checkpoint":
        convert(origin, tmp_path / "other.lmpack", **options)
        origin = tmp_path / "other.lmpack"
        (origin / "manifest.json").write_bytes(b"{")
    files = sorted(path.relative_to(pack).as_posix() for path in pack.glob("experts/*/*"))
    for file in {"one expert": files[:1], "all experts": files, "shared.bin": ["shared.bin"]}[damaged]:
        flip(pack / file, 5)
    before = state(pack)
    assert run(["validate", str(pack), "--repair", str(origin)]) == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert f"{origin}: is not what {pack} was made from, good files differ from it as well: " in error
    assert state(pack) == before


STRANGERS: dict[str, tuple[dict[str, Any] | None, str]] = {
    "other.gguf": (
        None,
        r"is not what .*m\.lmpack was made from: src\.gguf has \d+ bytes, the source's has \d+",
    ),
    "other": (None, r"is not what .*m\.lmpack was made from: src\.gguf is missing, the source's has \d+"),
    "other.lmpack": ({}, r"is no copy of .*m\.lmpack: the sources differ in \w+\.gguf; name a copy, or the"),
    "zstd.lmpack": (
        {"compress": True},
        r"is compressed, in pages of 4096, and .*m\.lmpack, of the same source, is plain, in pages of 4096",
    ),
    "reference.lmpack": ({"reference": True}, r"is without weights, in .* \(lmpack export gives it back\)"),
    "quantized.lmpack": ({"quantization": Quantization.parse("f32")}, r"is plain, quantized, .*checkpoint$"),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_another_model_and_another_form_are_refused_in_one_line(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    src, pack, origin = tmp_path / "src.gguf", tmp_path / "m.lmpack", tmp_path / name
    options, message = STRANGERS[name]
    convert(write_gguf(src, trained_tensors("F16")), pack)
    others = moe_tensors(width=96)
    if name == "other":
        origin.mkdir()
        write_shards(origin, [others[:5], others[5:]])
    elif name.startswith("other"):
        (tmp_path / "other.gguf").write_bytes(gguf_bytes(others, METADATA))
    if options is not None:
        convert(tmp_path / "other.gguf" if name.startswith("other") else src, origin, **options)
    for file in ("experts/L000/E0001.bin", "experts/L001/E0002.bin", "shared.bin"):
        flip(pack / file, 5)
    before = state(pack)
    assert run(["validate", str(pack), "--repair", str(origin)]) == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert re.search(f"{re.escape(str(origin))}: {message}", error)
    assert state(pack) == before

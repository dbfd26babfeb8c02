"""Resume of a quantizing conversion: the source is read once more, and nothing is quantized twice."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

import converters.conversion
from converters.conversion import ConversionReport, convert
from converters.quantization import Quantization
from tests.compressed_packs import trained_tensors, write_gguf
from tests.round_trip import files_below
from tests.test_resume import interrupt
from tests.test_validation import flip

if TYPE_CHECKING:
    from pathlib import Path

RULES = Quantization.parse("experts=q4_0,shared=q8_0")


@pytest.fixture
def src(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A BF16 model that takes many batches."""
    monkeypatch.setattr(converters.conversion, "BUFFER_NBYTES", 20_000)
    return write_gguf(tmp_path / "model.gguf", trained_tensors("BF16"))


def interrupted(src: Path, tmp_path: Path) -> tuple[Path, str]:
    """Return what an interrupted conversion has left, and its journal."""
    interrupt(src, tmp_path / "m.lmpack", src.stat().st_size * 2 // 3, quantization=RULES)
    partial = tmp_path / "m.lmpack.partial"
    return partial, (partial / "journal").read_text("ascii")


def resumed(src: Path, tmp_path: Path) -> ConversionReport:
    """Go on, and compare the pack with that of a conversion without interruption."""
    report = convert(src, tmp_path / "m.lmpack", quantization=RULES, resume=True)
    convert(src, tmp_path / "wanted.lmpack", quantization=RULES)
    assert files_below(tmp_path / "m.lmpack") == files_below(tmp_path / "wanted.lmpack")
    return report


def test_what_was_quantized_is_not_quantized_again(src: Path, tmp_path: Path) -> None:
    _, journal = interrupted(src, tmp_path)
    noted = sum(int(nbytes) for nbytes in re.findall(r"^batch 0 \d+ (\d+) ", journal, re.MULTILINE))
    report = resumed(src, tmp_path)
    # what is copied in a batch with quantized tensors is little, and copied again
    assert noted * 0.9 < report.resumed_nbytes <= noted


def test_what_was_damaged_since_is_quantized_again(src: Path, tmp_path: Path) -> None:
    partial, _ = interrupted(src, tmp_path)
    damaged = [partial / "shared.bin", *sorted(partial.glob("experts/*/E0001.bin"))]
    for path in damaged:
        for place in range(0, path.stat().st_size, 500):
            flip(path, place)
    report = resumed(src, tmp_path)
    assert 0 < report.resumed_nbytes < src.stat().st_size // 2


def test_a_piece_of_a_batch_that_was_not_noted_is_quantized_again(src: Path, tmp_path: Path) -> None:
    # nobody has compared the source's bytes with those that it was made of
    partial, journal = interrupted(src, tmp_path)
    lines = [line for line in journal.splitlines(keepends=True) if not line.startswith("batch")]
    assert any(line.startswith("converted") for line in lines)
    (partial / "journal").write_text("".join(lines), "ascii")
    assert resumed(src, tmp_path).resumed_nbytes == 0

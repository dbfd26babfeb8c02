"""Every checkpoint of the matrix converts, validates and exports byte for byte, or is refused with the reason."""

from __future__ import annotations

import itertools
import shutil
from mmap import mmap
from typing import TYPE_CHECKING

import pytest

from converters.checkpoint import open_checkpoint
from converters.conversion import convert
from converters.conversion_plan import check_packable, plan_conversion
from converters.export import export
from converters.source_reader import SLACK_NBYTES, SourceReader
from lmpack.errors import CheckpointError, UnsupportedError
from lmpack.validation import validate
from tests import gguf_matrix, safetensors_matrix
from tests.gguf_fixtures import Tensor as GGUFTensor
from tests.gguf_matrix import WRITINGS, Writing, write_gguf_model
from tests.round_trip import round_trip
from tests.safetensors_fixtures import Tensor, safetensors_header, with_header

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def comes_back(src: Path, work: Path, refusal: str, names: Sequence[str] | None = None) -> None:
    """Make the round trip, or be refused with this message and leave nothing behind."""
    if not refusal:
        round_trip(src, work, names=names)
        return
    with pytest.raises((CheckpointError, UnsupportedError), match=refusal) as caught:
        convert(src, work / "refused.lmpack")
    assert str(caught.value).isprintable()
    assert not list(work.glob("refused*"))


def gguf_comes_back(work: Path, content: gguf_matrix.Content, split: str, writing: Writing) -> None:
    src = write_gguf_model(work / "src", content, split, writing)
    names = sorted(path.name for path in src.parent.iterdir())
    comes_back(src, work, content.refusal, names)


@pytest.mark.parametrize(
    ("content", "split", "writing"),
    [
        pytest.param(content, split, writing, id=f"{content}-{split}")
        for content, split, writing in gguf_matrix.some_combinations()
    ],
)
def test_every_gguf_content_in_some_splits(
    tmp_path: Path, content: str, split: str, writing: Writing
) -> None:
    gguf_comes_back(tmp_path, gguf_matrix.CONTENTS[content], split, writing)


@pytest.mark.slow
@pytest.mark.parametrize("content", gguf_matrix.CONTENTS)
def test_every_gguf_content_in_every_split_alignment_version_and_byte_order(
    tmp_path: Path, content: str
) -> None:
    for number, (split, writing) in enumerate(itertools.product(gguf_matrix.SPLITS, WRITINGS)):
        work = tmp_path / str(number)
        work.mkdir()
        gguf_comes_back(work, gguf_matrix.CONTENTS[content], split, writing)
        shutil.rmtree(work)


@pytest.mark.parametrize("dtype", gguf_matrix.TYPES)
def test_every_ggml_type(tmp_path: Path, dtype: str) -> None:
    gguf_comes_back(tmp_path, gguf_matrix.TYPES[dtype], "one file", Writing(32, 3, "little"))


@pytest.mark.parametrize("num_experts", [512, 1024])
def test_many_experts(tmp_path: Path, num_experts: int) -> None:
    tensors = [GGUFTensor(f"blk.0.ffn_{role}_exps.weight", "Q8_0", (num_experts, 1, 32)) for role in ("up", "down")]  # fmt: skip
    content = gguf_matrix.Content(tensors)
    gguf_comes_back(tmp_path, content, "gate, up and down apart", Writing(32, 3, "little"))


@pytest.mark.parametrize(("content", "layout"), list(safetensors_matrix.some_combinations()))
def test_every_safetensors_content_in_some_folders(tmp_path: Path, content: str, layout: str) -> None:
    safetensors_come_back(tmp_path, content, layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", safetensors_matrix.LAYOUTS)
@pytest.mark.parametrize("content", safetensors_matrix.CONTENTS)
def test_every_safetensors_content_in_every_folder(tmp_path: Path, content: str, layout: str) -> None:
    safetensors_come_back(tmp_path, content, layout)


def safetensors_come_back(tmp_path: Path, content: str, layout: str) -> None:
    found, folder = safetensors_matrix.CONTENTS[content], safetensors_matrix.LAYOUTS[layout]
    folder.write(tmp_path / "src", found.tensors)
    # of two things that are wrong either may be named
    refusal = "|".join(filter(None, (found.refusal, folder.refusal)))
    names = folder.kept or sorted(path.name for path in (tmp_path / "src").iterdir())
    comes_back(tmp_path / "src" / folder.named, tmp_path, refusal, names)


def sparse_file(path: Path, tensors: Sequence[Tensor]) -> int:
    """Write a safetensors file whose last tensor is its only bytes on the drive; return the offset of the data."""
    start = with_header(safetensors_header(tensors), b"")
    with path.open("wb") as file:
        file.write(start)
        file.seek(sum(tensor.nbytes for tensor in tensors[:-1]), 1)
        file.write(tensors[-1].raw)
    return len(start)


BEYOND_4_GIB = [
    Tensor("model.layers.0.mlp.experts.gate_up_proj", "BF16", (2, 1 << 15, 1 << 15)),
    Tensor("model.norm.weight", "F32", (64,)),
]


def test_a_file_of_more_than_4_gib_is_planned_and_read_at_its_end(tmp_path: Path) -> None:
    path = tmp_path / "large.safetensors"
    data_offset = sparse_file(path, BEYOND_4_GIB)
    checkpoint = open_checkpoint(path)
    norm = checkpoint.tensors[-1]
    assert norm.offset == data_offset + (1 << 32)
    plan = plan_conversion(checkpoint)
    assert sum(piece.nbytes for piece in plan.files[0].pieces(1 << 20)) == path.stat().st_size
    check_packable(checkpoint, plan, checkpoint.describe(), 4096)
    with SourceReader(checkpoint.files[0]) as reader:
        buffer = memoryview(mmap(-1, norm.nbytes + SLACK_NBYTES))  # page-aligned
        assert reader.read(buffer, norm.offset, norm.nbytes) == BEYOND_4_GIB[-1].raw


@pytest.mark.slow
def test_a_file_of_more_than_4_gib_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "large.safetensors"
    sparse_file(path, BEYOND_4_GIB)
    try:
        report = convert(path, tmp_path / "large.lmpack")
        assert report.num_experts == 2
        assert validate(report.path).ok
        export(report.path, tmp_path / "out")  # compares the hash of what it wrote with that of what was read
        assert (tmp_path / "out" / path.name).stat().st_size == path.stat().st_size
    finally:
        shutil.rmtree(tmp_path, ignore_errors=True)  # not kept, as pytest keeps the folders of three runs

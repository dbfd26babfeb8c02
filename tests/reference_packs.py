"""Small checkpoints of every kind, each as a pack of plain files and as one that refers to it."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from converters.conversion import convert
from lmpack.pack import Pack
from tests import gguf_fixtures, safetensors_fixtures
from tests.gguf_fixtures import METADATA, gguf_bytes, write_shards
from tests.safetensors_fixtures import write_hf_folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def _gguf(folder: Path) -> Path:
    """Page-sized parts that begin nowhere near a page; two experts with the same bytes."""
    tensors = gguf_fixtures.moe_tensors(extras=("shexp",))
    same = {
        t.name: gguf_fixtures.Tensor(t.name, t.dtype, t.shape, t.raw[: t.nbytes // 4] * 4)
        for t in tensors
        if t.name.startswith("blk.1.") and "_exps" in t.name
    }
    path = folder / "model.gguf"
    path.write_bytes(gguf_bytes([same.get(t.name, t) for t in tensors], METADATA))
    return path


def _split(folder: Path) -> Path:
    """Parts of no whole number of pages, gate and down of one layer in different files."""
    tensors = gguf_fixtures.moe_tensors(width=96, extras=("bias",))
    return write_shards(folder, [tensors[:5], tensors[5:]])[1]


def _dense(folder: Path) -> Path:
    path = folder / "dense.gguf"
    path.write_bytes(
        gguf_bytes(gguf_fixtures.moe_tensors(num_layers=1, extras=("dense",)), METADATA, alignment=8)
    )
    return path


def _safetensors(folder: Path) -> Path:
    """A tensor for each part of each expert, in three files and in no order."""
    tensors = safetensors_fixtures.moe_tensors(width=48)
    random.Random(1).shuffle(tensors)
    return write_hf_folder(folder, [tensors[:9], tensors[9:20], tensors[20:]])


CHECKPOINTS: dict[str, Callable[[Path], Path]] = {
    "gguf": _gguf,
    "split": _split,
    "dense": _dense,
    "safetensors": _safetensors,
}


def plain_and_reference(kind: str, work: Path) -> tuple[Path, Pack, Pack]:
    """Write a checkpoint into work/source and convert it twice; return it, plain.lmpack and reference.lmpack."""
    (work / "source").mkdir()
    src = CHECKPOINTS[kind](work / "source")
    convert(src, work / "plain.lmpack")
    convert(src, work / "reference.lmpack", reference=True)
    return src, Pack.open(work / "plain.lmpack"), Pack.open(work / "reference.lmpack")

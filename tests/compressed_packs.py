"""GGUF models whose weights look trained, as plain and as compressed packs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from converters.conversion import convert
from lmpack.pack import Pack
from tests.gguf_fixtures import METADATA, Tensor, gguf_bytes, moe_tensors

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray


def gaussian(name: str, num_elements: int, dtype: str) -> bytes:
    """Normally distributed numbers, the same for one name, as F32, F16 or BF16."""
    random = np.random.default_rng(list(name.encode()))
    floats: NDArray[np.float32] = random.standard_normal(num_elements, np.float32) * np.float32(0.02)
    if dtype == "BF16":
        return (floats.view("<u4") >> 16).astype("<u2").tobytes()
    return floats.astype({"F32": "<f4", "F16": "<f2"}[dtype]).tobytes()


def trained_tensors(dtype: str = "BF16", *, width: int = 96) -> list[Tensor]:
    """A small MoE model; its third expert of layer 0 has the bytes of the first, its embedding is zeros."""
    tensors = []
    for tensor in moe_tensors(dtype=dtype, width=width, hidden=64, extras=("shexp", "bias")):
        num_elements = int(np.prod(tensor.shape))
        data = gaussian(tensor.name, num_elements, tensor.dtype)
        if tensor.name.startswith("blk.0.") and "_exps" in tensor.name:
            part = len(data) // 4
            data = data[: 2 * part] + data[:part] + data[3 * part :]
        if tensor.name == "token_embd.weight":
            data = bytes(len(data))
        tensors.append(replace(tensor, data=data))
    return tensors


def write_gguf(path: Path, tensors: list[Tensor]) -> Path:
    """Write a GGUF file of these tensors and return its path."""
    path.write_bytes(gguf_bytes(tensors, METADATA))
    return path


def plain_and_compressed(src: Path, work: Path) -> tuple[Pack, Pack]:
    """Convert a checkpoint twice into work: plain.lmpack, zstd.lmpack."""
    convert(src, work / "plain.lmpack")
    convert(src, work / "zstd.lmpack", compress=True)
    return Pack.open(work / "plain.lmpack"), Pack.open(work / "zstd.lmpack")

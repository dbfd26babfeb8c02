"""The matrix of tiny GGUFs: what a file holds x how it is split x how it is written.

A content either makes the round trip or is refused with the message that stands beside it here.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from lmpack.dtype import GGML_DTYPES, WITHDRAWN_GGML_DTYPES
from tests.gguf_fixtures import METADATA, Endian, Tensor, gguf_bytes, moe_tensors, write_shards

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

Cut = list[list[Tensor]]


@dataclass(frozen=True, slots=True)
class Content:
    """The tensors and the metadata of a model; refusal is the message it must be refused with, "" for none."""

    tensors: Sequence[Tensor]
    metadata: dict[str, Any] = field(default_factory=dict)
    refusal: str = ""


def _mixed_layer() -> list[Tensor]:
    types = {"gate": "Q4_K", "up": "Q5_K", "down": "Q6_K"}
    return [Tensor(f"blk.0.ffn_{role}_exps.weight", dtype, (3, 256, 256)) for role, dtype in types.items()]


def _uneven_layers() -> list[Tensor]:
    return [
        Tensor(f"blk.{layer}.ffn_{role}_exps.weight", "F16", (num_experts, 4, 4))
        for layer, num_experts in enumerate((5, 1, 3))
        for role in ("gate", "up", "down")
    ]


def _narrow(dtype: str) -> list[Tensor]:
    """An FFN width of 96: whole blocks of 32, not of 256."""
    return moe_tensors(num_layers=1, hidden=256, width=96, dtype=dtype)


def _unlike_experts() -> list[Tensor]:
    return [Tensor(f"blk.0.ffn_up.{e}.weight", dtype, (4, 32)) for e, dtype in enumerate(("F16", "Q8_0"))]


EVERY_KIND_OF_ARRAY: dict[str, Any] = {
    **{f"empty.{code}": np.array([], code) for code in ("u1", "i1", "u2", "i4", "u8", "f4", "f8", "?")},
    "empty.texts": [],
    "tokenizer.ggml.merges": [],
}

CONTENTS: dict[str, Content] = {
    "stacked": Content(moe_tensors()),
    "fused": Content(moe_tensors(layout="fused")),
    "per expert": Content(moe_tensors(layout="single")),
    "biases": Content(moe_tensors(extras=("bias",))),
    "biases, per expert": Content(moe_tensors(layout="single", extras=("bias",))),
    "scales": Content(moe_tensors(extras=("scale",))),
    "exp_probs_b": Content(moe_tensors(extras=("probs",))),
    "shared experts, one tensor 1-D": Content(moe_tensors(extras=("shexp",))),
    "a prediction layer": Content(moe_tensors(extras=("mtp",))),
    "a leading dense layer": Content(moe_tensors(extras=("dense",))),
    "everything at once": Content(
        moe_tensors(num_layers=3, layout="fused", extras=("bias", "scale", "probs", "shexp", "dense", "mtp"))
    ),
    "no experts": Content(
        [Tensor("token_embd.weight", "F32", (4, 8)), Tensor("blk.0.ffn_up.weight", "F16", (8, 8))]
    ),
    "another number of experts in each layer": Content(_uneven_layers()),
    "mixed types in a layer": Content(_mixed_layer()),
    "MXFP4": Content(moe_tensors(dtype="MXFP4")),
    "NVFP4": Content(moe_tensors(hidden=64, dtype="NVFP4", extras=("scale",))),
    "IQ3_XXS": Content(moe_tensors(num_layers=1, num_experts=2, hidden=256, width=256, dtype="IQ3_XXS")),
    "a width of 96 in Q8_0": Content(_narrow("Q8_0")),
    "a width of 96 in Q4_K": Content(
        [*_narrow("Q8_0")[:-1], Tensor("blk.0.ffn_down_exps.weight", "Q4_K", (4, 256, 96), data=b"")],
        refusal=r"ffn_down_exps\.weight: shape \[4, 256, 96\]: a row of Q4_K needs a multiple of 256 elements, got 96",
    ),
    "empty tensors, three at offset 0": Content(
        [Tensor("a", "F32", (0, 4)), Tensor("b", "Q4_K", (0,)), Tensor("c", "F32", (4,)), Tensor("z", "F16", (0,))]
    ),
    "an empty expert": Content(
        [Tensor("blk.0.ffn_up_exps.weight", "F16", (4, 0, 8))],
        refusal="blk.0.ffn_up_exps.weight belongs to experts but is empty",
    ),
    "empty arrays": Content(moe_tensors(num_layers=1), EVERY_KIND_OF_ARRAY),
    "experts of unlike types": Content(
        _unlike_experts(),
        refusal="blk.0.ffn_up.1.weight is Q8_0 .*, blk.0.ffn_up.0.weight is F16 .*; all experts of a layer must have",
    ),
    "a type that ggml gave up": Content(moe_tensors(dtype="Q4_0_4_8")),
    "a type without a known size": Content(
        [*moe_tensors(num_layers=1), Tensor("new.weight", "F32", (8,), ggml_type=200)],
        refusal="tensor new.weight has ggml type 200, which this version does not know",
    ),
    "a name that speaks of experts in vain": Content(
        [Tensor("blk.0.ffn_side_exps.weight", "F16", (4, 8, 8))], refusal="please report the model"
    ),
}  # fmt: skip

TYPES: dict[str, Content] = {
    dtype: Content(
        [Tensor(f"blk.0.ffn_{role}_exps.weight", dtype, (2, 1, 256)) for role in ("gate", "up", "down")]
    )
    for dtype in (*GGML_DTYPES.values(), *WITHDRAWN_GGML_DTYPES.values())
}


def _apart(tensors: Sequence[Tensor]) -> Cut:
    """Gate, up and down in three shards, all else in the first."""
    up = [tensor for tensor in tensors if "ffn_up" in tensor.name]
    down = [tensor for tensor in tensors if "ffn_down" in tensor.name]
    return [[tensor for tensor in tensors if tensor not in up and tensor not in down], up, down]


SPLITS: dict[str, Callable[[Sequence[Tensor]], Cut] | None] = {
    "one file": None,
    "1 shard": lambda tensors: [list(tensors)],
    "2 shards": lambda tensors: [list(tensors[: len(tensors) // 2]), list(tensors[len(tensors) // 2 :])],
    "3 shards": lambda tensors: [list(tensors[start::3]) for start in range(3)],
    "an empty first shard": lambda tensors: [[], list(tensors[::2]), list(tensors[1::2])],
    "gate, up and down apart": _apart,
}


@dataclass(frozen=True, slots=True)
class Writing:
    """How the bytes are laid out."""

    alignment: int
    version: int
    endian: Endian


ENDIANS: tuple[Endian, ...] = ("little", "big")
WRITINGS = [
    Writing(alignment, version, endian)
    for alignment, version, endian in itertools.product((8, 32, 64, 4096), (2, 3), ENDIANS)
]


def write_gguf_model(folder: Path, content: Content, split: str, writing: Writing) -> Path:
    """Write a model into the folder and return the path a user would name: its file, or its last shard."""
    folder.mkdir(parents=True)
    metadata = METADATA | content.metadata
    options: dict[str, Any] = {
        "alignment": writing.alignment,
        "version": writing.version,
        "endian": writing.endian,
    }
    cut = SPLITS[split]
    if cut is None:
        path = folder / "model.gguf"
        path.write_bytes(gguf_bytes(content.tensors, metadata, **options))
        return path
    return write_shards(folder, cut(content.tensors), metadata=metadata, **options)[-1]


def some_combinations() -> Iterator[tuple[str, str, Writing]]:
    """Every content in two of the splits; splits and writings take turns."""
    writings, splits = itertools.cycle(WRITINGS), itertools.cycle(SPLITS)
    for content in CONTENTS:
        yield content, next(splits), next(writings)
        yield content, next(splits), next(writings)

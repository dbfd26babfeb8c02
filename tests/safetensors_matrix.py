"""The matrix of tiny safetensors checkpoints: what a model holds x how its folder looks.

A content or a folder either makes the round trip or is refused with the message that stands beside it here.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.safetensors_fixtures import CONFIG, Tensor, moe_tensors, safetensors_bytes, write_hf_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Content:
    """The tensors of a model; refusal is the message it must be refused with, "" for none."""

    tensors: Sequence[Tensor]
    refusal: str = ""


def _stacked(dtype: str, *, scale: str = "") -> list[Tensor]:
    at = "model.layers.1.mlp.experts."
    tensors = [Tensor(at + "gate_up_proj", dtype, (4, 8, 6)), Tensor(at + "down_proj", dtype, (4, 6, 4))]
    return tensors + ([Tensor(at + "down_proj_scale", scale, (4, 6, 1))] if scale else [])


def _gpt_oss() -> list[Tensor]:
    at = "model.layers.0.mlp."
    tensors = [Tensor(at + "router.weight", "BF16", (4, 64)), Tensor(at + "router.bias", "BF16", (4,))]
    for name, rows in (("gate_up_proj", 6), ("down_proj", 64)):
        tensors.append(Tensor(f"{at}experts.{name}_bias", "BF16", (4, rows)))
        tensors.append(Tensor(f"{at}experts.{name}_blocks", "U8", (4, rows, 2, 16)))
        tensors.append(Tensor(f"{at}experts.{name}_scales", "U8", (4, rows, 2)))
    return tensors


CONTENTS: dict[str, Content] = {
    "per expert": Content(moe_tensors()),
    "stacked BF16": Content(_stacked("BF16")),
    "F8_E4M3 with F32 scales": Content(_stacked("F8_E4M3", scale="F32")),
    "F8_E5M2": Content(_stacked("F8_E5M2")),
    "F4 with F8_E8M0 scales": Content(_stacked("F4", scale="F8_E8M0")),
    "F6_E2M3": Content(_stacked("F6_E2M3")),
    "gpt-oss blocks and scales": Content(_gpt_oss()),
    "empty and scalar tensors": Content(
        [
            Tensor("empty", "F32", (0, 5)),
            Tensor("empty at the end", "F4", (3, 0)),
            Tensor("scalar", "I64", ()),
            Tensor("weight", "F32", (4,)),
        ]
    ),
    "names in many scripts": Content(
        [Tensor(name, "F16", (3,)) for name in ("größe", "重み.weight", "вес", "🦊", "a b", "a:b", "../../x", "'\"")]
    ),
    "experts of half a byte": Content(
        [
            Tensor("model.layers.0.mlp.experts.down_proj", "F4", (2, 3, 3)),
            Tensor("model.norm.weight", "F32", (3,)),
        ],
        refusal=r"down_proj cannot be cut into experts: shape \[3, 3\]: a row of F4 needs a multiple of 2 elements, got 9",
    ),
    "an unknown dtype": Content(
        [Tensor("a", "F32", (2,)), Tensor("b", "F32", (2,), declared="I4")],
        refusal="tensor 'b': dtype 'I4' is not known to this version",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Layout:
    """How a folder is written; named is what the user names inside it, kept the files that come back (None: all)."""

    write: Callable[[Path, Sequence[Tensor]], object]
    named: str = "."
    kept: tuple[str, ...] | None = None
    refusal: str = ""


def _halves(tensors: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    return [tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]]


def _stray(folder: Path, tensors: Sequence[Tensor]) -> None:
    write_hf_folder(folder, _halves(tensors), small_files={})
    (folder / "consolidated.safetensors").write_bytes(safetensors_bytes(tensors))


def _swapped(folder: Path, tensors: Sequence[Tensor]) -> None:
    """The index says of each tensor that the other file holds it; the headers know better."""
    names = [f"model-0000{number}-of-00002.safetensors" for number in (2, 1)]
    halves = zip(_halves(tensors), names, strict=True)
    write_hf_folder(
        folder, _halves(tensors), index={tensor.name: name for half, name in halves for tensor in half}
    )


def _stale(folder: Path, tensors: Sequence[Tensor]) -> None:
    first = "model-00001-of-00002.safetensors"
    write_hf_folder(folder, _halves(tensors), index={"an.old.name": first, tensors[0].name: first})


def _lone(folder: Path, tensors: Sequence[Tensor]) -> None:
    folder.mkdir()
    (folder / "weights.safetensors").write_bytes(safetensors_bytes(tensors))
    (folder / "notes.txt").write_text("not of this model")


LAYOUTS: dict[str, Layout] = {
    "an index": Layout(lambda folder, tensors: write_hf_folder(folder, _halves(tensors))),
    "an index, opened by a shard": Layout(
        lambda folder, tensors: write_hf_folder(folder, _halves(tensors)), "model-00002-of-00002.safetensors"
    ),
    "no index": Layout(lambda folder, tensors: write_hf_folder(folder, _halves(tensors), index=False)),
    "one file in a folder": Layout(lambda folder, tensors: write_hf_folder(folder, [tensors], index=False)),
    "one file alone": Layout(_lone, "weights.safetensors", ("weights.safetensors",)),
    "an index that swaps the files": Layout(_swapped),
    "a stray file beside the index": Layout(
        _stray,
        kept=(
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "config.json",
            "model.safetensors.index.json",
        ),
    ),
    "an empty shard": Layout(lambda folder, tensors: write_hf_folder(folder, [[], tensors], index=False)),
    "a config without layers": Layout(
        lambda folder, tensors: write_hf_folder(
            folder, [tensors], config={"model_type": CONFIG["model_type"]}, small_files={}
        )
    ),
    "a stale index": Layout(_stale, refusal="the index names tensor 'an.old.name'.*, but no file holds it"),
}


def some_combinations() -> Iterator[tuple[str, str]]:
    """Every content in three of the layouts, which take turns."""
    layouts = itertools.cycle(LAYOUTS)
    for content in CONTENTS:
        for layout in itertools.islice(layouts, 3):
            yield content, layout

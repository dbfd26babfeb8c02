"""Target: one reader of untrusted bytes, with inputs to start from and what must hold for every other."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from converters.conversion import convert
from converters.conversion_plan import check_packable, plan_conversion
from converters.gguf_checkpoint import GGUFCheckpoint
from converters.safetensors_checkpoint import SafetensorsCheckpoint
from lmpack.errors import LmpackError
from lmpack.manifest import MANIFEST_FILE, Manifest
from tests import gguf_matrix, safetensors_matrix
from tests.gguf_fixtures import METADATA, gguf_bytes
from tests.gguf_fixtures import moe_tensors as moe_ggufs
from tests.manifest_forgery import seal
from tests.safetensors_fixtures import (
    CONFIG,
    Tensor,
    moe_tensors,
    safetensors_bytes,
    safetensors_header,
    with_header,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from converters.checkpoint import Checkpoint

MAX_MESSAGE = 2000  # characters; an error is one line, whatever a file says


@dataclass(frozen=True, slots=True)
class Target:
    """read(raw, folder) may write in the folder; it returns, or raises an error of ours with a short message."""

    read: Callable[[bytes, Path], None]
    seeds: Callable[[], Sequence[bytes]]
    is_json: bool  # the inputs are documents, and a mutation may know that

    def __call__(self, raw: bytes, folder: Path) -> None:
        """Read one input; an error of ours is what an input deserves, everything else is a finding."""
        try:
            self.read(raw, folder)
        except LmpackError as error:
            if len(str(error)) > MAX_MESSAGE:
                raise AssertionError("the message is too long") from error


def _plan(checkpoint: Checkpoint) -> None:
    """Go as far as a conversion goes before it copies."""
    check_packable(checkpoint, plan_conversion(checkpoint), checkpoint.describe(), 4096)


def _read_gguf(raw: bytes, folder: Path) -> None:
    path = folder / "model.gguf"
    path.write_bytes(raw)
    _plan(GGUFCheckpoint.open(path))


def _read_safetensors(header: bytes, folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(with_header(header, bytes(_NUM_DATA_BYTES)))
    _plan(SafetensorsCheckpoint.open(path))


def _read_config(raw: bytes, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(_WEIGHTS)
    (folder / "config.json").write_bytes(raw)
    _plan(SafetensorsCheckpoint.open(folder))


def _read_manifest(raw: bytes, folder: Path) -> None:
    manifest = Manifest.parse(seal(raw), folder / "manifest.json")
    again = Manifest.parse(manifest.to_bytes(), folder / "manifest.json")
    assert again.to_bytes() == manifest.to_bytes(), "what was read is not what is written"


_SMALL_MODEL = moe_tensors(num_layers=1, num_experts=2, hidden=2, width=2)
_FLAT_EXPERTS = Tensor(
    "transformer.blocks.1.ffn.experts.mlp.v1", "BF16", (4, 2)
)  # cut by the config's number
_WEIGHTS = safetensors_bytes([*_SMALL_MODEL, _FLAT_EXPERTS])
_NUM_DATA_BYTES = sum(tensor.nbytes for tensor in _SMALL_MODEL)
_CONFIG: dict[str, Any] = {**CONFIG, "ffn_config": {"moe_num_experts": 2}}
_CONFIGS: list[dict[str, Any]] = [
    _CONFIG,
    {**_CONFIG, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "partial_rotary_factor": 0.5},
    {"model_type": "mixtral", "text_config": _CONFIG},
]


def _gguf_seeds() -> list[bytes]:
    """Small files in every layout and byte order, so that most bytes are a header's."""
    tiny = partial(moe_ggufs, num_layers=1, num_experts=2, hidden=2, width=2)
    models = [
        tiny(extras=("bias", "scale", "probs", "shexp")),
        tiny(layout="fused", extras=("mtp",)),
        tiny(layout="single", extras=("bias", "dense")),
    ]
    names = (
        "empty tensors, three at offset 0",
        "no experts",
        "a type without a known size",
        "an empty expert",
    )
    models += [list(gguf_matrix.CONTENTS[name].tensors) for name in names]
    metadata = METADATA | gguf_matrix.EVERY_KIND_OF_ARRAY
    seeds = [gguf_bytes(tensors, METADATA, alignment=8) for tensors in models]
    return [*seeds, gguf_bytes(models[0], metadata, endian="big"), gguf_bytes(models[1], metadata, version=2)]


def _safetensors_seeds() -> list[bytes]:
    contents = [_SMALL_MODEL, *(content.tensors for content in safetensors_matrix.CONTENTS.values())]
    return [json.dumps(safetensors_header(tensors, {"format": "pt"})).encode() for tensors in contents]


def _manifest_seeds() -> list[bytes]:
    contents = [gguf_matrix.CONTENTS[name] for name in ("fused", "biases, per expert", "no experts")]
    with TemporaryDirectory() as folder:
        gguf = Path(folder) / "m.gguf"
        packs = [Path(folder) / f"{number}.lmpack" for number in range(3 * len(contents))]
        for number, content in enumerate(contents):
            gguf.write_bytes(gguf_bytes(content.tensors, METADATA))
            convert(gguf, packs[3 * number])
            convert(gguf, packs[3 * number + 1], compress=True)
            convert(gguf, packs[3 * number + 2], reference=True)
        return [(pack / MANIFEST_FILE).read_bytes() for pack in packs]


TARGETS: dict[str, Target] = {
    "gguf": Target(_read_gguf, _gguf_seeds, is_json=False),
    "safetensors": Target(_read_safetensors, _safetensors_seeds, is_json=True),
    "config": Target(
        _read_config, lambda: [json.dumps(config).encode() for config in _CONFIGS], is_json=True
    ),
    "manifest": Target(_read_manifest, _manifest_seeds, is_json=True),
}

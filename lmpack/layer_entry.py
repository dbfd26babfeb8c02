"""LayerEntry: how the manifest describes the routed experts of one layer, and the rule that lays them out."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmpack.alignment import PART_ALIGNMENT, align_up
from lmpack.dtype import dtype_nbytes
from lmpack.errors import PackError, UnsupportedError
from lmpack.expert_key import ExpertKey
from lmpack.storage import RAW_STORAGE, ZSTD_STORAGE, StoredExpert, parse_stored_expert
from lmpack.strict_json import (
    MAX_INTEGER,
    JsonError,
    check_int,
    check_list,
    check_object,
    check_pattern,
    check_sha256,
    check_str,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MAX_LAYERS = 65_536
MAX_EXPERTS_PER_LAYER = 65_536
MAX_PARTS = 64
MAX_DIMS = 8

_ROLE = re.compile(r"[a-z][a-z0-9_]{0,63}")
_LAYER_KEYS = frozenset({"layer", "stride", "parts", "experts"})
_PART_KEYS = frozenset({"role", "dtype", "shape", "offset", "nbytes"})
_EXPERT_KEYS = frozenset({"file", "nbytes", "sha256"})
_STORED_EXPERT_KEYS = _EXPERT_KEYS | {"stored_sha256", "stored"}


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """One tensor of an expert (gate, up, down, a bias, a scale), at the same place in every expert of a layer."""

    role: str
    dtype: str
    shape: tuple[int, ...]  # numpy order: (out_features, in_features) for a weight
    offset: int  # bytes from the start of the expert's file, a multiple of 256
    nbytes: int


@dataclass(frozen=True, slots=True)
class ExpertEntry:
    """The file that holds one expert; identical experts share one."""

    file: str
    nbytes: int  # the whole expert, padding included: the layer's stride
    sha256: str  # of the whole expert, padding included
    stored: StoredExpert | None = None  # how a compressed pack stores it; None: as it is

    @property
    def file_nbytes(self) -> int:
        """The size of the file."""
        return self.nbytes if self.stored is None else self.stored.nbytes

    @property
    def file_sha256(self) -> str:
        """The SHA-256 of the file."""
        return self.sha256 if self.stored is None else self.stored.sha256

    def to_json(self) -> dict[str, object]:
        """Give the expert as the manifest spells it."""
        fields: dict[str, object] = {"file": self.file, "nbytes": self.nbytes, "sha256": self.sha256}
        if self.stored is not None:
            fields["stored_sha256"] = self.stored.sha256
            fields["stored"] = [{"encoding": p.encoding, "nbytes": p.nbytes} for p in self.stored.parts]
        return fields


@dataclass(frozen=True, slots=True)
class LayerEntry:
    """The routed experts of one layer; expert e is experts[e]."""

    layer: int
    parts: tuple[ExpertPart, ...]
    stride: int  # bytes from one expert to the next when the layer is mapped as one range
    experts: tuple[ExpertEntry, ...]

    @property
    def num_experts(self) -> int:
        """How many routed experts this layer has; layers may differ."""
        return len(self.experts)

    def part(self, role: str) -> ExpertPart:
        """Return the part with this role; raise PackError when the layer's experts have none."""
        for part in self.parts:
            if part.role == role:
                return part
        raise PackError(
            f"layer {self.layer}: its experts have no part {role!r}, only {', '.join(p.role for p in self.parts)}"
        )

    def to_json(self) -> dict[str, object]:
        """Give the layer as the manifest spells it, without its experts (they take a line each)."""
        return {
            "layer": self.layer,
            "stride": self.stride,
            "parts": [
                {
                    "role": p.role,
                    "dtype": p.dtype,
                    "shape": list(p.shape),
                    "offset": p.offset,
                    "nbytes": p.nbytes,
                }
                for p in self.parts
            ],
        }


def lay_out_parts(
    parts: Iterable[tuple[str, str, tuple[int, ...]]], page_size: int
) -> tuple[tuple[ExpertPart, ...], int]:
    """Place (role, dtype, shape) parts as format 1 does: in order, each aligned to 256; return them and the stride.

    Raises UnsupportedError for an unknown dtype or a row that is not a whole number of blocks.
    """
    placed: list[ExpertPart] = []
    end = 0
    for role, dtype, shape in parts:
        offset, nbytes = align_up(end, PART_ALIGNMENT), dtype_nbytes(dtype, shape)
        placed.append(ExpertPart(role, dtype, shape, offset, nbytes))
        end = offset + nbytes
    return tuple(placed), align_up(end, page_size)


def parse_dtype_and_shape(
    dtype: object, shape: object, at: str, *, least_dim: int
) -> tuple[str, tuple[int, ...], int]:
    """Check a tensor's dtype and shape; return them with the bytes they take."""
    name = check_str(dtype, f"{at} dtype", longest=32)
    dims = tuple(
        check_int(dim, f"{at} shape", least=least_dim)
        for dim in check_list(shape, f"{at} shape", longest=MAX_DIMS)
    )
    try:
        nbytes = dtype_nbytes(name, dims)
    except UnsupportedError as error:
        raise JsonError(f"{at}: {error}") from None
    if nbytes > MAX_INTEGER:
        raise JsonError(f"{at}: shape {list(dims)} takes {nbytes} bytes, more than a file can have")
    return name, dims, nbytes


def check_role(value: object, at: str) -> str:
    """Return value as the role of an expert's part."""
    return check_pattern(value, _ROLE, f"{at} role", "lower-case letters, digits and _, at most 64")


def parse_layers(value: object, page_size: int, storage: str = RAW_STORAGE) -> tuple[LayerEntry, ...]:
    """Check the manifest's "layers": sorted, laid out by the rule, every file inside the pack."""
    layers: list[LayerEntry] = []
    keepers: dict[str, ExpertEntry] = {}  # file -> the first entry that names it
    for fields in check_list(value, "layers", longest=MAX_LAYERS):
        least = layers[-1].layer + 1 if layers else 0
        layers.append(_parse_layer(fields, least, page_size, storage, keepers))
    return tuple(layers)


def _parse_layer(
    value: object, least: int, page_size: int, storage: str, keepers: dict[str, ExpertEntry]
) -> LayerEntry:
    at = f"after layer {least - 1}" if least else "layers"
    fields = check_object(value, _LAYER_KEYS, at)
    layer = check_int(
        fields["layer"], f"{at}: layer number (sorted, no duplicates)", least=least, most=MAX_LAYERS - 1
    )
    at = f"layer {layer}"
    parts, stride = _parse_parts(fields, at, page_size)
    entries = check_list(fields["experts"], f"{at} experts", shortest=1, longest=MAX_EXPERTS_PER_LAYER)
    forms = [(part.dtype, part.nbytes) for part in parts] if storage == ZSTD_STORAGE else None
    experts = tuple(
        _parse_expert(entry, ExpertKey(layer, expert), stride, forms, keepers)
        for expert, entry in enumerate(entries)
    )
    return LayerEntry(layer, parts, stride, experts)


def _parse_parts(fields: dict[str, object], at: str, page_size: int) -> tuple[tuple[ExpertPart, ...], int]:
    found: list[ExpertPart] = []
    for number, value in enumerate(check_list(fields["parts"], f"{at} parts", shortest=1, longest=MAX_PARTS)):
        here = f"{at} part {number}"
        entry = check_object(value, _PART_KEYS, here)
        role = check_role(entry["role"], here)
        if any(role == other.role for other in found):
            raise JsonError(f"{here}: the role {role!r} stands twice")
        dtype, shape, _ = parse_dtype_and_shape(entry["dtype"], entry["shape"], here, least_dim=1)
        offset = check_int(entry["offset"], f"{here} offset")
        found.append(ExpertPart(role, dtype, shape, offset, check_int(entry["nbytes"], f"{here} nbytes")))
    laid_out, stride = lay_out_parts(((p.role, p.dtype, p.shape) for p in found), page_size)
    for part, wanted in zip(found, laid_out, strict=True):
        if part != wanted:
            raise JsonError(
                f"{at} part {part.role}: bytes {part.offset}+{part.nbytes}, its dtype, shape and place give "
                f"{wanted.offset}+{wanted.nbytes}"
            )
    if check_int(fields["stride"], f"{at} stride") != stride:
        raise JsonError(f"{at} stride: {fields['stride']}, its parts give {stride}")
    return laid_out, stride


def _parse_expert(
    value: object,
    key: ExpertKey,
    stride: int,
    forms: Sequence[tuple[str, int]] | None,
    keepers: dict[str, ExpertEntry],
) -> ExpertEntry:
    """Check one expert; forms are the (dtype, nbytes) of its parts in a compressed pack, None in others."""
    at = f"expert {key}"
    fields = check_object(value, _EXPERT_KEYS if forms is None else _STORED_EXPERT_KEYS, at)
    if fields["nbytes"] != stride or type(fields["nbytes"]) is not int:
        raise JsonError(f"{at} nbytes: expected the layer's stride {stride}, got {fields['nbytes']!r:.40}")
    entry = ExpertEntry(
        check_str(fields["file"], f"{at} file", longest=64),
        stride,
        check_sha256(fields["sha256"], f"{at} sha256"),
        None if forms is None else parse_stored_expert(fields["stored_sha256"], fields["stored"], forms, at),
    )
    # an expert's file is its own, or that of an identical expert before it: no other path can be named
    keeper = keepers.setdefault(entry.file, entry) if entry.file == key.file else keepers.get(entry.file)
    if keeper != entry:
        raise JsonError(
            f"{at} file: expected {key.file} or the file of an identical expert before it, got {entry.file!r}"
        )
    return entry

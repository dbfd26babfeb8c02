"""Storage: where the bytes of a pack lie, and in which form each tensor of a compressed one lies in its file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmpack.strict_json import (
    JsonError,
    check_int,
    check_list,
    check_object,
    check_sha256,
    shown,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

RAW_STORAGE = "raw"
ZSTD_STORAGE = "zstd"
REFERENCE_STORAGE = "reference"
STORAGES = (RAW_STORAGE, ZSTD_STORAGE, REFERENCE_STORAGE)

RAW_ENCODING = "raw"
PIECE_NBYTES = 1 << 20
"""Bytes of a tensor that are compressed together: a reader's scratch, which stays in a core's cache between passes."""
LEAST_FRAME_NBYTES = 9
"""No frame is shorter, so no small file can claim to hold a terabyte of zeros."""

_PLANES = {"F16": 2, "BF16": 2, "F32": 4}
_PART_KEYS = frozenset({"encoding", "nbytes"})
_TENSOR_KEYS = frozenset({"encoding", "offset", "nbytes", "sha256"})


@dataclass(frozen=True, slots=True)
class StoredPart:
    """The form and size in which one part lies in its expert's file, right after the part before it."""

    encoding: str  # "raw", or what zstd_encoding() gives for its dtype
    nbytes: int


@dataclass(frozen=True, slots=True)
class StoredExpert:
    """A compressed expert file: its parts, back to back."""

    sha256: str  # of the file
    parts: tuple[StoredPart, ...]

    @property
    def nbytes(self) -> int:
        """The size of the file."""
        return self.offset(len(self.parts))

    def offset(self, position: int) -> int:
        """Return where the part at this position of the layer's parts begins."""
        return sum(part.nbytes for part in self.parts[:position])


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The form and place in which a shared tensor lies in a compressed shared.bin."""

    encoding: str
    offset: int  # in the file, where the tensor before it ends
    nbytes: int
    sha256: str  # of these bytes

    def to_json(self) -> dict[str, object]:
        """Give the place as the manifest spells it."""
        return {
            "encoding": self.encoding,
            "offset": self.offset,
            "nbytes": self.nbytes,
            "sha256": self.sha256,
        }


def num_planes(dtype: str) -> int:
    """Into how many planes of bytes a tensor is split before zstd sees it: one for each byte of a float."""
    return _PLANES.get(dtype, 1)


def zstd_encoding(dtype: str) -> str:
    """Return the name of the compressed form of a dtype: "zstd", "zstd-split2" or "zstd-split4"."""
    planes = num_planes(dtype)
    return "zstd" if planes == 1 else f"zstd-split{planes}"


def parse_stored_expert(
    sha256: object, stored: object, parts: Sequence[tuple[str, int]], at: str
) -> StoredExpert:
    """Check an expert's "stored_sha256" and "stored"; parts are the (dtype, nbytes) of the layer's parts."""
    found = check_list(stored, f"{at} stored", shortest=len(parts), longest=len(parts))
    entries = []
    for value, (dtype, nbytes) in zip(found, parts, strict=True):
        fields = check_object(value, _PART_KEYS, f"{at} stored")
        entries.append(StoredPart(*_check_form(fields, dtype, nbytes, f"{at} stored")))
    return StoredExpert(check_sha256(sha256, f"{at} stored_sha256"), tuple(entries))


def parse_stored_tensor(value: object, dtype: str, nbytes: int, offset: int, at: str) -> StoredTensor:
    """Check a shared tensor's "stored"; offset is where the tensor before it ends."""
    fields = check_object(value, _TENSOR_KEYS, f"{at} stored")
    encoding, stored_nbytes = _check_form(fields, dtype, nbytes, f"{at} stored")
    if check_int(fields["offset"], f"{at} stored offset") != offset:
        raise JsonError(f"{at} stored offset: {fields['offset']}, the tensor before it ends at {offset}")
    return StoredTensor(
        encoding, offset, stored_nbytes, check_sha256(fields["sha256"], f"{at} stored sha256")
    )


def _check_form(fields: dict[str, object], dtype: str, nbytes: int, at: str) -> tuple[str, int]:
    encoding = fields["encoding"]
    if encoding == RAW_ENCODING:
        return RAW_ENCODING, check_int(fields["nbytes"], f"{at} nbytes", least=nbytes, most=nbytes)
    if encoding != zstd_encoding(dtype):
        raise JsonError(
            f"{at} encoding: expected {RAW_ENCODING} or {zstd_encoding(dtype)} for {dtype}, got {shown(encoding)}"
        )
    least = LEAST_FRAME_NBYTES * -(-nbytes // PIECE_NBYTES)
    return zstd_encoding(dtype), check_int(fields["nbytes"], f"{at} nbytes", least=max(least, 1), most=nbytes)

"""TensorInfo: how the manifest describes the tensors of shared.bin, and the rule that lays them out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmpack.alignment import align_up
from lmpack.dtype import dtype_nbytes
from lmpack.layer_entry import parse_dtype_and_shape
from lmpack.storage import RAW_STORAGE, ZSTD_STORAGE, StoredTensor, parse_stored_tensor
from lmpack.strict_json import (
    JsonError,
    check_int,
    check_list,
    check_object,
    check_sha256,
    check_str,
    shown,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MAX_SHARED_TENSORS = 1_048_576
MAX_TENSOR_NAME = 512

_TENSOR_KEYS = frozenset({"name", "dtype", "shape", "offset", "nbytes", "sha256"})
_STORED_TENSOR_KEYS = _TENSOR_KEYS | {"stored"}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of shared.bin."""

    name: str
    dtype: str
    shape: tuple[int, ...]  # numpy order
    offset: int  # in shared.bin before compression, a multiple of the page size
    nbytes: int
    sha256: str  # of the tensor's bytes, without padding
    stored: StoredTensor | None = None  # how a compressed pack stores it; None: as it is

    def to_json(self) -> dict[str, object]:
        """Give the tensor as the manifest spells it."""
        fields: dict[str, object] = {
            "name": self.name,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "offset": self.offset,
            "nbytes": self.nbytes,
            "sha256": self.sha256,
        }
        return fields if self.stored is None else {**fields, "stored": self.stored.to_json()}


def lay_out_shared(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], page_size: int
) -> tuple[tuple[TensorInfo, ...], int]:
    """Place (name, dtype, shape) tensors as format 1 does: in order, each on a page; return them and the file's size.

    sha256 is left empty. Raises UnsupportedError as dtype_nbytes does.
    """
    placed: list[TensorInfo] = []
    end = 0
    for name, dtype, shape in tensors:
        tensor = TensorInfo(name, dtype, shape, align_up(end, page_size), dtype_nbytes(dtype, shape), "")
        placed.append(tensor)
        end = tensor.offset + tensor.nbytes
    return tuple(placed), align_up(end, page_size)


def parse_shared(
    fields: Mapping[str, object], page_size: int, storage: str = RAW_STORAGE
) -> tuple[tuple[TensorInfo, ...], int]:
    """Check the manifest's "shared" and "shared_nbytes": unique names, laid out by the rule."""
    found: list[TensorInfo] = []
    names: set[str] = set()
    stored_end = 0
    for number, value in enumerate(check_list(fields["shared"], "shared", longest=MAX_SHARED_TENSORS)):
        at = f"shared tensor {number}"
        entry = check_object(value, _STORED_TENSOR_KEYS if storage == ZSTD_STORAGE else _TENSOR_KEYS, at)
        name = check_tensor_name(entry["name"], at)
        if name in names:
            raise JsonError(f"{at}: the name {shown(name)} stands twice")
        names.add(name)
        at = f"shared tensor {shown(name)}"
        dtype, shape, wanted_nbytes = parse_dtype_and_shape(entry["dtype"], entry["shape"], at, least_dim=0)
        offset = check_int(entry["offset"], f"{at} offset")
        nbytes = check_int(entry["nbytes"], f"{at} nbytes")
        sha256 = check_sha256(entry["sha256"], f"{at} sha256")
        stored = None
        if storage == ZSTD_STORAGE:
            stored = parse_stored_tensor(entry["stored"], dtype, wanted_nbytes, stored_end, at)
            stored_end += stored.nbytes
        found.append(TensorInfo(name, dtype, shape, offset, nbytes, sha256, stored))
    laid_out, shared_nbytes = lay_out_shared(((t.name, t.dtype, t.shape) for t in found), page_size)
    for tensor, wanted in zip(found, laid_out, strict=True):
        if (tensor.offset, tensor.nbytes) != (wanted.offset, wanted.nbytes):
            raise JsonError(
                f"shared tensor {shown(tensor.name)}: bytes {tensor.offset}+{tensor.nbytes}, "
                f"its dtype, shape and place give {wanted.offset}+{wanted.nbytes}"
            )
    if check_int(fields["shared_nbytes"], "shared_nbytes") != shared_nbytes:
        raise JsonError(f"shared_nbytes: {fields['shared_nbytes']}, the tensors give {shared_nbytes}")
    return tuple(found), shared_nbytes


def check_tensor_name(value: object, at: str) -> str:
    """Return value as the name of a shared tensor."""
    return check_str(value, f"{at} name", longest=MAX_TENSOR_NAME)

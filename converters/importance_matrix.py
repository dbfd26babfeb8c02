"""ImportanceMatrix: how much each input of a matrix mattered on a text, as llama.cpp's llama-imatrix records it.

Two containers: a GGUF with the tensors NAME.in_sum2 (sums of squared inputs) and NAME.counts, and the older binary
file (tools/imatrix/imatrix.cpp and src/llama-quant.cpp of llama.cpp read and write both).
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from converters.checkpoint import CheckpointFile
from converters.gguf_checkpoint import GGUFCheckpoint
from lmpack.drive import storage_errors
from lmpack.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

_SUMS, _COUNTS = ".in_sum2", ".counts"
_GGUF_MAGIC = b"GGUF"
MAX_NBYTES = 1 << 30  # the largest models have some 100 MB
MAX_NAME_NBYTES = 1024


@dataclass(frozen=True, slots=True)
class ImportanceMatrix:
    """The weight of every column of a model's matrices, by their GGUF names."""

    path: Path
    sha256: str  # of the file
    weights: Mapping[
        str, NDArray[np.float32]
    ]  # flat: the columns of each expert's matrix, one after the other

    @classmethod
    def read(cls, path: Path | str) -> ImportanceMatrix:
        """Read a file of either container; raises CheckpointError when it is neither, or broken."""
        path = Path(path)
        file = CheckpointFile.of(path, path.name)
        if file.nbytes > MAX_NBYTES:
            raise CheckpointError(f"{path}: {file.nbytes} bytes, too large for an importance matrix")
        file.check_fetched()
        with storage_errors(path):
            raw = path.read_bytes()
        weights = _read_gguf(path, raw) if raw.startswith(_GGUF_MAGIC) else _read_legacy(path, raw)
        if not weights:
            raise CheckpointError(f"{path}: no importance matrix in it; llama-imatrix writes them")
        return cls(path, hashlib.sha256(raw).hexdigest(), weights)

    def of(self, name: str, num_matrices: int, num_columns: int) -> NDArray[np.float32] | None:
        """Return the weights of a tensor as [num_matrices, num_columns]; None when the text never reached it.

        Raises CheckpointError when they are those of a tensor of another size.
        """
        weights = self.weights.get(name)
        if weights is None:
            return None
        if weights.size != num_matrices * num_columns:
            raise CheckpointError(
                f"{self.path}: {name} has {weights.size} weights, this model needs {num_matrices} x {num_columns}; "
                "it is the importance matrix of another model"
            )
        return weights.reshape(num_matrices, num_columns)


def _read_gguf(path: Path, raw: bytes) -> dict[str, NDArray[np.float32]]:
    checkpoint = GGUFCheckpoint.open(path)
    if len(checkpoint.files) > 1:
        raise CheckpointError(f"{path}: one file of several, expected an importance matrix in one")
    tensors = {
        tensor.name: np.frombuffer(raw, "<f4", tensor.nbytes // 4, tensor.offset)
        for tensor in checkpoint.tensors
        if tensor.dtype == "F32" and tensor.name.endswith((_SUMS, _COUNTS))
    }
    weights = {}
    for name, sums in tensors.items():
        if name.endswith(_SUMS):
            tensor = name.removesuffix(_SUMS)
            counts = tensors.get(tensor + _COUNTS)
            if counts is None or not counts.size or sums.size % counts.size:
                raise CheckpointError(f"{path}: {name} and its counts do not fit each other; it is damaged")
            rows = sums.reshape(counts.size, -1)
            # an expert that no token reached counts every column alike, as in llama.cpp
            means: NDArray[np.float32] = np.ones_like(rows)
            with np.errstate(over="ignore"):  # infinity is refused below
                np.divide(rows, counts[:, None], out=means, where=counts[:, None] > 0)
            weights[tensor] = _checked(path, tensor, means.reshape(-1))
    return weights


def _read_legacy(path: Path, raw: bytes) -> dict[str, NDArray[np.float32]]:
    weights: dict[str, NDArray[np.float32]] = {}
    at = 4
    try:
        (num_entries,) = struct.unpack_from("<i", raw)
        for _ in range(num_entries):
            (length,) = struct.unpack_from("<i", raw, at)
            name = raw[at + 4 : at + 4 + length].decode()
            num_calls, num_weights = struct.unpack_from("<ii", raw, at + 4 + length)
            at += 12 + length
            if not 0 < length <= MAX_NAME_NBYTES or num_weights < 1:
                raise ValueError(f"{name!r:.40} of {length} bytes has {num_weights} weights")
            sums: NDArray[np.float32] = np.frombuffer(raw, "<f4", num_weights, at)
            at += sums.nbytes
            weights[name] = sums / np.float32(max(num_calls, 1))
    except (struct.error, ValueError):
        raise CheckpointError(
            f"{path}: is not an importance matrix, or a damaged one; name a file that llama-imatrix wrote, or download it again"
        ) from None
    return {name: _checked(path, name, found) for name, found in weights.items()}


def _checked(path: Path, name: str, weights: NDArray[np.float32]) -> NDArray[np.float32]:
    if not np.isfinite(weights).all() or (weights < 0).any():
        raise CheckpointError(f"{path}: {name} has weights that are negative or not finite; it is damaged")
    return np.ascontiguousarray(weights, np.float32)

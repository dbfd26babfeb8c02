"""Tensor values: stored bytes of any dtype that the gguf package or numpy can read, as numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_PLAIN = {
    "BOOL": "u1",
    "U8": "u1",
    "I8": "i1",
    "U16": "<u2",
    "I16": "<i2",
    "F16": "<f2",
    "U32": "<u4",
    "I32": "<i4",
    "F32": "<f4",
    "U64": "<u8",
    "I64": "<i8",
    "F64": "<f8",
}


def tensor_values(raw: NDArray[np.uint8], dtype: str) -> NDArray[np.float64] | None:
    """Return the numbers of whole blocks, 1-D, in little-endian order; None for a dtype nobody here can read."""
    if dtype in _PLAIN:
        return np.ascontiguousarray(raw).view(_PLAIN[dtype]).astype(np.float64)
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    if dtype not in GGMLQuantizationType.__members__:
        return None
    try:
        values = dequantize(np.ascontiguousarray(raw).reshape(1, -1), GGMLQuantizationType[dtype])
    except NotImplementedError:
        return None
    return np.asarray(values, np.float64).reshape(-1)

"""Quantizer: rows of floats in ggml's block types, written by ggml's own code, and how far they are from the floats."""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING

import numpy as np

from converters.ggml_base import GGML_TYPE_IDS, GGMLBase, find_ggml
from lmpack.dtype import block_of, dtype_nbytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

LIBRARY = "ggml"
FLOAT_DTYPES = ("F32", "F16", "BF16")
QUANTIZED_DTYPES = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4", "NVFP4", "Q2_0", "Q1_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS"),
)
"""What ggml_quantize_chunk writes besides floats; it ends the process when asked for another."""
_BLOCK_ELEMENTS = 1 << 20  # floats that are in memory at once


class _TypeTraits(ctypes.Structure):
    """struct ggml_type_traits."""

    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("blck_size", ctypes.c_int64),
        ("blck_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.c_void_p),
        ("from_float_ref", ctypes.c_void_p),
    )


_ToFloat = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


class Quantizer:
    """Converts rows from one float dtype to another dtype; for several threads at once."""

    def __init__(self, library: GGMLBase) -> None:
        """Check that ggml's description of its types lies where we read it."""
        self._library = library
        for dtype in QUANTIZED_DTYPES:
            traits = self._traits(dtype)
            if (traits.blck_size, traits.type_size) != block_of(dtype) or not traits.to_float:
                library.refuse(f"its type {dtype} is described differently")

    @property
    def version(self) -> str:
        """The version of ggml."""
        return self._library.version

    def requires_imatrix(self, dtype: str) -> bool:
        """Tell whether a dtype cannot be written without an importance matrix."""
        required: bool = self._library.ggml_quantize_requires_imatrix(GGML_TYPE_IDS[dtype])
        return required

    def convert(
        self,
        raw: memoryview,
        source_dtype: str,
        dtype: str,
        num_columns: int,
        importance: NDArray[np.float32] | None = None,  # [num_columns]
    ) -> tuple[NDArray[np.uint8], float]:
        """Return rows of a float dtype as dtype, and the largest relative error of a row.

        That is the row's largest absolute error divided by its largest magnitude. It is NaN or infinite when the rows
        hold such a number.
        """
        source_row_nbytes, row_nbytes = (dtype_nbytes(d, (num_columns,)) for d in (source_dtype, dtype))
        raw = raw.cast("B")
        num_rows = raw.nbytes // source_row_nbytes
        converted = np.empty((num_rows, row_nbytes), np.uint8)
        step = max(1, _BLOCK_ELEMENTS // num_columns)
        worst = 0.0
        for first in range(0, num_rows, step):
            rows = raw[first * source_row_nbytes : (first + step) * source_row_nbytes]
            floats = as_floats(rows, source_dtype).reshape(-1, num_columns)
            if not np.isfinite(floats).all():
                return converted.reshape(-1), float("nan")
            block = converted[first : first + step]
            self._quantize(floats, dtype, block, importance)
            worst = max(worst, self._relative_error(floats, dtype, block))
        return converted.reshape(-1), worst

    def _quantize(
        self,
        floats: NDArray[np.float32],
        dtype: str,
        target: NDArray[np.uint8],
        importance: NDArray[np.float32] | None,
    ) -> None:
        nbytes = self._library.ggml_quantize_chunk(
            GGML_TYPE_IDS[dtype],
            floats.ctypes.data,
            target.ctypes.data,
            0,
            *floats.shape,
            None if importance is None else importance.ctypes.data,
        )
        assert nbytes == target.nbytes

    def _relative_error(self, floats: NDArray[np.float32], dtype: str, block: NDArray[np.uint8]) -> float:
        if dtype in FLOAT_DTYPES:
            back = as_floats(block.reshape(-1).data, dtype).reshape(floats.shape)
        else:
            back = np.empty_like(floats)
            to_float = _ToFloat(self._traits(dtype).to_float)
            to_float(block.ctypes.data, back.ctypes.data, back.size)
        largest = np.abs(floats).max(axis=1)
        error = np.abs(back - floats).max(axis=1)
        return float((error[largest > 0] / largest[largest > 0]).max(initial=0.0))

    def _traits(self, dtype: str) -> _TypeTraits:
        return _TypeTraits.from_address(self._library.ggml_get_type_traits(GGML_TYPE_IDS[dtype]))


def as_floats(raw: memoryview, dtype: str) -> NDArray[np.float32]:
    """Return little-endian numbers of one of FLOAT_DTYPES as float32, 1-D and contiguous."""
    if dtype == "BF16":
        return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.ascontiguousarray(np.frombuffer(raw, {"F32": "<f4", "F16": "<f2"}[dtype]), np.float32)


@functools.cache
def load_quantizer() -> Quantizer:
    """Load the installed ggml; UnsupportedError says why it cannot be used."""
    return Quantizer(GGMLBase(find_ggml()))

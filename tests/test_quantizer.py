"""Quantized rows are those of llama.cpp and of gguf-py, and their error is the one that gguf-py finds."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING

import gguf
import numpy as np
import pytest

from converters.ggml_base import GGML_TYPE_IDS
from converters.quantizer import FLOAT_DTYPES, QUANTIZED_DTYPES, as_floats, load_quantizer
from lmpack.dtype import dtype_nbytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

ROWS, COLUMNS = 6, 512
SLOW_DTYPES = ("IQ1_S", "IQ1_M", "IQ2_XS", "IQ2_S")  # ggml first makes tables for them, for seconds


@pytest.fixture(scope="module")
def floats() -> NDArray[np.float32]:
    """Rows of different magnitudes, one of zeros."""
    rows: NDArray[np.float32] = np.random.default_rng(0).standard_normal((ROWS, COLUMNS), np.float32)
    return rows * np.array([[1.0], [1e-3], [50.0], [0.0], [1.0], [7.0]], np.float32)


@pytest.fixture(scope="module")
def llamacpp() -> ctypes.CDLL:
    """llama.cpp's own build of ggml, in another package than the one that we call."""
    xllamacpp = pytest.importorskip("xllamacpp")
    library = ctypes.CDLL(str(next(Path(xllamacpp.__file__).parent.glob("xllamacpp*.so"))))
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_quantize_chunk.argtypes = [
        *(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64),
        ctypes.c_void_p,
    ]
    return library


@pytest.mark.parametrize(
    "dtype",
    [pytest.param(d, marks=pytest.mark.slow) if d in SLOW_DTYPES else d for d in QUANTIZED_DTYPES],
)
@pytest.mark.parametrize("with_imatrix", [False, True])
def test_blocks_are_llamacpps(
    llamacpp: ctypes.CDLL, floats: NDArray[np.float32], dtype: str, with_imatrix: bool
) -> None:
    quantizer = load_quantizer()
    if quantizer.requires_imatrix(dtype) and not with_imatrix:
        pytest.skip("cannot be written without an importance matrix")
    weights = np.random.default_rng(1).random(COLUMNS, np.float32) + np.float32(0.1) if with_imatrix else None
    wanted = np.empty(dtype_nbytes(dtype, floats.shape), np.uint8)
    address = weights.ctypes.data if weights is not None else None
    llamacpp.ggml_quantize_chunk(
        GGML_TYPE_IDS[dtype], floats.ctypes.data, wanted.ctypes.data, 0, ROWS, COLUMNS, address
    )
    converted, _ = quantizer.convert(floats.reshape(-1).data, "F32", dtype, COLUMNS, weights)
    assert np.array_equal(converted, wanted)


@pytest.mark.parametrize("dtype", ["Q8_0", "BF16", "F16"])
def test_blocks_are_gguf_pys(floats: NDArray[np.float32], dtype: str) -> None:
    converted, _ = load_quantizer().convert(floats.reshape(-1).data, "F32", dtype, COLUMNS)
    wanted = gguf.quants.quantize(floats, gguf.GGMLQuantizationType[dtype])
    assert np.array_equal(converted, wanted.reshape(-1).view(np.uint8))


@pytest.mark.parametrize(
    "dtype", ["Q8_0", "Q4_0", "Q6_K", "Q4_K", "Q3_K", "IQ4_XS", "IQ4_NL", "TQ2_0", "BF16", "F16"]
)
def test_the_error_is_what_gguf_py_finds(floats: NDArray[np.float32], dtype: str) -> None:
    converted, error = load_quantizer().convert(floats.reshape(-1).data, "F32", dtype, COLUMNS)
    back = gguf.quants.dequantize(converted.reshape(ROWS, -1), gguf.GGMLQuantizationType[dtype]).reshape(
        floats.shape
    )
    largest = np.abs(floats).max(axis=1)
    filled = largest > 0
    assert error == pytest.approx(
        (np.abs(back - floats).max(axis=1)[filled] / largest[filled]).max(), rel=1e-5
    )
    assert 0 < error < 1


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_every_float_dtype_can_be_read(floats: NDArray[np.float32], dtype: str) -> None:
    raw, _ = load_quantizer().convert(floats.reshape(-1).data, "F32", dtype, COLUMNS)
    tolerance = {"F32": 0.0, "F16": 1e-3, "BF16": 1e-2}[dtype]
    assert np.allclose(as_floats(raw.data, dtype), floats.reshape(-1), rtol=tolerance, atol=1e-7)
    again, _ = load_quantizer().convert(raw.data, dtype, "Q4_K", COLUMNS)
    wide = as_floats(raw.data, dtype)
    assert np.array_equal(again, load_quantizer().convert(wide.data, "F32", "Q4_K", COLUMNS)[0])


def test_more_rows_than_fit_at_once_are_converted_alike(floats: NDArray[np.float32]) -> None:
    many = np.tile(floats, (500, 1))
    converted, error = load_quantizer().convert(many.reshape(-1).data, "F32", "Q4_K", COLUMNS)
    few, few_error = load_quantizer().convert(floats.reshape(-1).data, "F32", "Q4_K", COLUMNS)
    assert np.array_equal(converted, np.tile(few, 500))
    assert error == few_error


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_numbers_that_are_not_finite_are_noticed(floats: NDArray[np.float32], bad: float) -> None:
    broken = floats.copy()
    broken[4, 100] = bad
    _, error = load_quantizer().convert(broken.reshape(-1).data, "F32", "Q4_K", COLUMNS)
    assert not np.isfinite(error)

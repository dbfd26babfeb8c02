"""Dtypes: sizes agree with ggml's, gguf's and safetensors' own."""

from __future__ import annotations

import ctypes
import json
import struct
from importlib.util import find_spec
from pathlib import Path

import gguf
import pytest
import safetensors

from lmpack.dtype import GGML_DTYPES, block_of, dtype_nbytes, is_known
from lmpack.errors import UnsupportedError

SAFETENSORS_DTYPES = [
    "BOOL",
    "U8",
    "I8",
    "F8_E4M3",
    "F8_E4M3FNUZ",
    "F8_E5M2",
    "F8_E5M2FNUZ",
    "F8_E8M0",
    "U16",
    "I16",
    "F16",
    "BF16",
    "U32",
    "I32",
    "F32",
    "U64",
    "I64",
    "F64",
    "C64",
    "F4",
    "F6_E2M3",
    "F6_E3M2",
]


def libggml() -> ctypes.CDLL:
    spec = find_spec("libggml")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("libggml is not installed")
    found = sorted(Path(spec.submodule_search_locations[0]).glob("lib*/libggml-base.so*"))
    if not found:
        pytest.skip("libggml has no shared library here")
    library = ctypes.CDLL(str(found[0]))
    library.ggml_type_name.restype = ctypes.c_char_p
    library.ggml_type_size.restype = ctypes.c_size_t
    library.ggml_blck_size.restype = ctypes.c_int64
    return library


def is_safetensors(dtype: str, shape: list[int], nbytes: int) -> bool:
    """Ask safetensors itself whether a tensor of this shape takes nbytes."""
    header = json.dumps({"x": {"dtype": dtype, "shape": shape, "data_offsets": [0, nbytes]}}).encode()
    try:
        safetensors.deserialize(struct.pack("<Q", len(header)) + header + bytes(nbytes))  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError:
        return False
    return True


def test_every_ggml_type_has_the_name_and_size_that_ggml_gives_it() -> None:
    library = libggml()
    for number, dtype in GGML_DTYPES.items():
        assert library.ggml_type_name(number).decode().upper() == dtype
        assert block_of(dtype) == (library.ggml_blck_size(number), library.ggml_type_size(number))


def test_every_type_that_gguf_knows_is_known_with_the_same_size() -> None:
    for kind, size in gguf.GGML_QUANT_SIZES.items():
        assert GGML_DTYPES[kind.value] == kind.name
        if (
            kind.name != "Q8_1"
        ):  # gguf still has the 40 bytes of the block with two 32-bit floats; ggml has 36
            assert block_of(kind.name) == size


@pytest.mark.parametrize("dtype", SAFETENSORS_DTYPES)
def test_safetensors_accepts_our_size_of_its_types_and_no_other(dtype: str) -> None:
    nbytes = dtype_nbytes(dtype, (3, 8))
    assert is_safetensors(dtype, [3, 8], nbytes)
    assert not is_safetensors(dtype, [3, 8], nbytes + 1)
    assert not is_safetensors(dtype, [3, 8], nbytes - 1)


def test_packed_types_of_safetensors_need_whole_bytes_in_total_but_not_in_a_row() -> None:
    assert dtype_nbytes("F4", (4, 3)) == 6
    assert is_safetensors("F4", [4, 3], 6)
    with pytest.raises(UnsupportedError, match="multiple of 2"):
        dtype_nbytes("F4", (3, 3))


def test_a_scalar_has_one_element_and_an_empty_tensor_none() -> None:
    assert dtype_nbytes("F32", ()) == 4
    assert dtype_nbytes("F32", (0, 7)) == 0


def test_a_row_must_be_whole_blocks() -> None:
    assert dtype_nbytes("Q4_K", (3, 512)) == 3 * 2 * 144
    with pytest.raises(UnsupportedError, match="multiple of 256 elements, got 384"):
        dtype_nbytes("Q4_K", (2, 384))
    with pytest.raises(UnsupportedError, match="multiple of 32"):
        dtype_nbytes("Q8_0", ())


def test_an_unknown_dtype_is_refused_by_name() -> None:
    assert not is_known("Q9_9")
    assert is_known("MXFP4")
    with pytest.raises(UnsupportedError, match="'Q9_9' is not known"):
        block_of("Q9_9")

"""GGUF headers: every value type is read, in both byte orders, and every lie is refused."""

from __future__ import annotations

import struct
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest

from converters.gguf_header import read_gguf_header
from lmpack.errors import CheckpointError, LmpackError, UnsupportedError
from tests.gguf_fixtures import ARRAY, METADATA, STRING, Endian, Raw, Tensor, gguf_bytes, moe_tensors, string

if TYPE_CHECKING:
    from pathlib import Path

EVERY_TYPE: dict[str, Any] = {
    "u8": np.uint8(250),
    "i8": np.int8(-5),
    "u16": np.uint16(65_000),
    "i16": np.int16(-300),
    "u32": np.uint32(1 << 31),
    "i32": np.int32(-70_000),
    "f32": np.float32(0.1),
    "bool": True,
    "text": "grüße",
    "u64": np.uint64(1 << 63),
    "i64": np.int64(-1 << 40),
    "f64": 0.1 * np.float64(1),
    "texts": ["", "a", "日本"],
    "u32s": np.arange(5, dtype=np.uint32),
    "f32s": np.linspace(-1, 1, 7, dtype=np.float32),
    "bools": np.array([True, False]),
    "empty texts": [],
    "empty numbers": np.array([], np.int8),
}


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("endian", ["little", "big"])
def test_every_value_type_is_read_in_both_byte_orders(version: int, endian: Endian) -> None:
    header = read_gguf_header(gguf_bytes(metadata=EVERY_TYPE, version=version, endian=endian))
    assert (header.version, header.endian) == (version, endian)
    assert list(header.metadata) == list(EVERY_TYPE)
    for key, value in EVERY_TYPE.items():
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(header.metadata[key], value)
        else:
            assert header.metadata[key] == value
            assert not isinstance(header.metadata[key], np.generic)
    assert header.float32_keys == {"f32"}


def test_arrays_of_arrays_become_lists() -> None:
    inner = struct.pack("<IQ", 4, 2) + struct.pack("<II", 7, 8)
    header = read_gguf_header(
        gguf_bytes(metadata={"nested": Raw(ARRAY, struct.pack("<IQ", ARRAY, 2) + 2 * inner)})
    )
    assert [list(row) for row in header.metadata["nested"]] == [[7, 8], [7, 8]]


def test_the_gguf_package_reads_the_same(demo_gguf: Path) -> None:
    header, oracle = read_gguf_header(demo_gguf), gguf.GGUFReader(demo_gguf)
    fields = {key: field.contents() for key, field in oracle.fields.items() if not key.startswith("GGUF.")}
    assert header.metadata.keys() == fields.keys()
    for key, value in fields.items():
        assert np.array_equal(header.metadata[key], value), key
    assert header.data_offset == oracle.data_offset
    for info, tensor in zip(header.tensors, oracle.tensors, strict=True):
        assert (info.name, info.ggml_type) == (tensor.name, int(tensor.tensor_type))
        assert list(info.shape) == tensor.shape.tolist()[::-1]
        assert header.data_offset + info.offset == tensor.data_offset


def test_bytes_that_begin_with_a_header_are_enough(tmp_path: Path) -> None:
    whole = gguf_bytes(moe_tensors(), METADATA)
    path = tmp_path / "m.gguf"
    path.write_bytes(whole)
    from_file = read_gguf_header(path)
    assert read_gguf_header(whole[: from_file.data_offset]) == from_file
    assert read_gguf_header(whole[: from_file.nbytes]) == from_file


def test_a_header_longer_than_the_first_read_is_complete(tmp_path: Path) -> None:
    tokens = [f"token {i} " + "x" * (i % 50) for i in range(60_000)]
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(metadata={"tokens": tokens, "after": 7}))
    header = read_gguf_header(path)
    assert header.metadata == {"tokens": tokens, "after": 7}


def test_text_that_is_not_utf_8_keeps_its_bytes() -> None:
    token = b"\xff\xfe".decode("utf-8", "surrogateescape")
    header = read_gguf_header(gguf_bytes(metadata={"tokens": [token]}))
    assert header.metadata["tokens"][0].encode("utf-8", "surrogateescape") == b"\xff\xfe"


@pytest.mark.parametrize("alignment", [1, 8, 64, 4096])
def test_data_begins_at_the_alignment(alignment: int) -> None:
    header = read_gguf_header(gguf_bytes([Tensor("t", "F32", (3,))], alignment=alignment))
    assert header.alignment == alignment
    assert header.data_offset % alignment == 0
    assert header.nbytes <= header.data_offset < header.nbytes + alignment


def test_a_header_cut_anywhere_is_an_error_that_names_the_file() -> None:
    whole = gguf_bytes(moe_tensors(num_layers=1), METADATA)
    for nbytes in range(read_gguf_header(whole).nbytes):
        with pytest.raises(CheckpointError, match=r"models/cut\.gguf"):
            read_gguf_header(whole[:nbytes], where="models/cut.gguf")


@pytest.mark.parametrize("endian", ["little", "big"])
def test_inverting_any_byte_gives_a_header_or_an_error_of_ours(endian: Endian) -> None:
    whole = bytearray(gguf_bytes(moe_tensors(num_layers=1), METADATA | EVERY_TYPE, endian=endian))
    for at in range(read_gguf_header(bytes(whole)).nbytes):
        whole[at] ^= 0xFF
        with suppress(LmpackError):
            read_gguf_header(bytes(whole))
        whole[at] ^= 0xFF


def deep(levels: int) -> Raw:
    return Raw(ARRAY, struct.pack("<IQ", ARRAY, 1) * levels + struct.pack("<IQ", 0, 0))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "is empty"),
        (b"PK\3\4 a zip", "starts with b'PK"),
        (b"<!DOCTYPE html><html>", "web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "git lfs pull"),
        (gguf_bytes(num_tensors=1 << 60), "claims 1152921504606846976 tensors"),
        (gguf_bytes(num_keys=1 << 60), "claims 1152921504606846976 metadata keys"),
        (gguf_bytes(metadata=[("a", 1), ("a", 2)]), "the key occurs twice"),
        (gguf_bytes(metadata={"": 1}), "a name of 0 bytes"),
        (gguf_bytes(metadata={"a": Raw(13, b"")}), "value type 13 is not known"),
        (gguf_bytes(metadata={"a": Raw(ARRAY, struct.pack("<IQ", 13, 1))}), "array of value type 13"),
        (gguf_bytes(metadata={"a": Raw(ARRAY, struct.pack("<IQ", STRING, 1 << 50))}), "claims .* strings"),
        (gguf_bytes(metadata={"a": Raw(ARRAY, struct.pack("<IQ", 12, 1 << 61))}), "claims .* numbers"),
        (gguf_bytes(metadata={"a": Raw(STRING, struct.pack("<Q", (1 << 64) - 1))}), "needs .* bytes, there are"),
        (gguf_bytes(metadata={"a": deep(4)}), "nested more than 4 deep"),
        (gguf_bytes(metadata={"a": deep(50_000)}), "nested more than 4 deep"),
        (gguf_bytes(metadata={"a": Raw(7, b"\2")}), "a bool of 2"),
        (gguf_bytes(metadata={"a": Raw(ARRAY, struct.pack("<IQ", 7, 2) + b"\1\2")}), "neither 0 nor 1"),
        (gguf_bytes(metadata={"general.alignment": 0}), "0 is not a power of two"),
        (gguf_bytes(metadata={"general.alignment": 24}), "24 is not a power of two"),
        (gguf_bytes(metadata={"general.alignment": np.uint32((1 << 32) - 1)}), "is not a power of two"),
        (gguf_bytes(metadata={"general.alignment": "32"}), "'32' is not a power of two"),
        (gguf_bytes([Tensor("t", "F32", (1,) * 9)]), "9 dimensions"),
        (gguf_bytes([Tensor("t", "F32", (1 << 40, 1 << 40), data=b"")]), "have more than 9007199254740991 elements"),
        (gguf_bytes(metadata={"a" * 70_000: 1}), "a name of 70000 bytes"),
        (gguf_bytes(num_keys=1) + string(b"\xff" * 9) + bytes(8), "is not UTF-8"),
    ],
    ids=count(),
)  # fmt: skip
def test_a_header_that_lies_is_refused_with_the_reason(raw: bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_gguf_header(raw)


@pytest.mark.parametrize("version", [0, 1, 4])
def test_versions_that_are_not_known_are_refused(version: int) -> None:
    with pytest.raises(UnsupportedError, match=f"GGUF version {version}, lmpack reads 2 and 3"):
        read_gguf_header(gguf_bytes(version=version))

"""GGUFHeader: a GGUF file's metadata and tensor infos, parsed from untrusted bytes.

The layout is that of ggml's docs/gguf.md, versions 2 and 3, little and big endian:
magic "GGUF", u32 version, u64 tensor count, u64 key count, the key-value pairs, the tensor infos.
Sizes are checked against what the file still holds before anything is allocated.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from converters.checkpoint import CheckpointFile, wrong_magic
from lmpack.errors import CheckpointError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MAX_HEADER_NBYTES = 64_000_000  # the largest real headers (250,000 tokens with merges) take 15 MB
MAX_PARSED_NBYTES = 160_000_000  # of memory for what a header holds, roughly; those take 50 MB
MAX_NAME_NBYTES = 65_535  # the specification's limit for keys
MAX_DIMS = 8  # ggml stops at 4
MAX_ELEMENTS = (1 << 53) - 1  # what JSON can say exactly
MAX_ARRAY_DEPTH = 4  # no known key nests arrays at all
MAX_ALIGNMENT = 1 << 30
DEFAULT_ALIGNMENT = 32
_FIRST_READ_NBYTES = 1 << 20

_SCALARS = {
    0: "u1",
    1: "i1",
    2: "u2",
    3: "i2",
    4: "u4",
    5: "i4",
    6: "f4",
    7: "?",
    10: "u8",
    11: "i8",
    12: "f8",
}
_STRING, _ARRAY = 8, 9
_SCALAR_FORMATS = {"u1": "B", "i1": "b", "u2": "H", "i2": "h", "u4": "I", "i4": "i", "f4": "f", "?": "B"} | {
    "u8": "Q",
    "i8": "q",
    "f8": "d",
}


@dataclass(frozen=True, slots=True)
class _Cost:
    """What one value takes in the file at least, and in memory about."""

    file_nbytes: int
    memory_nbytes: int


_KEY, _TENSOR_INFO = _Cost(13, 256), _Cost(24, 512)
_STRING_VALUE, _ARRAY_VALUE = _Cost(8, 64), _Cost(12, 256)


@dataclass(frozen=True, slots=True)
class GGUFTensorInfo:
    """A tensor as the header declares it; shape in numpy order, offset from the start of the data."""

    name: str
    ggml_type: int
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """A parsed header; metadata values are int, float, bool, str, list[str], or a numpy array.

    A float of 32 bits is given as Python's float of the same value. Text that is not UTF-8 keeps its
    bytes as surrogate escapes, because token lists may hold such pieces.
    """

    version: int
    endian: Literal["little", "big"]
    metadata: Mapping[str, Any]
    float32_keys: frozenset[str]  # to print 1e-06 for a 32-bit 9.99999997e-07
    tensors: tuple[GGUFTensorInfo, ...]
    data_offset: int  # first byte of the tensor data; a file without tensors may end before it
    alignment: int
    nbytes: int  # of the header alone, before the padding


def read_gguf_header(source: Path | bytes, where: str | None = None) -> GGUFHeader:
    """Parse the header of a GGUF file, or of bytes that start with one.

    Raises CheckpointError when it is truncated, malformed or claims more than the source holds, and
    UnsupportedError for GGUF version 1 or one that is not known yet.
    """
    if isinstance(source, bytes):
        return _Parser(where or "GGUF header", source, None, len(source)).header()
    nbytes = CheckpointFile.of(source, source.name).nbytes
    with source.open("rb", buffering=0) as file:
        return read_gguf_header_from(file, nbytes, where or str(source))


def read_gguf_header_from(file: Readable, nbytes: int, where: str) -> GGUFHeader:
    """Do what read_gguf_header does with a file of nbytes that is opened at its first byte; reads what it needs."""
    start = file.read(min(_FIRST_READ_NBYTES, nbytes))
    return _Parser(where, start, file, nbytes).header()


class Readable(Protocol):
    """An opened file."""

    def read(self, nbytes: int, /) -> bytes:
        """Return the next bytes, at most this many; none at the end."""


class _Parser:
    """A cursor over bytes that are fetched from the file as they are needed."""

    def __init__(self, where: str, start: bytes, file: Readable | None, total_nbytes: int) -> None:
        self.where = where
        self.buffer = start
        self.file = file
        self.total_nbytes = min(total_nbytes, MAX_HEADER_NBYTES)
        self.too_long = total_nbytes > MAX_HEADER_NBYTES
        self.position = 0
        self.order: Literal["<", ">"] = "<"
        self.context = "the fixed fields"
        self.float32_keys: set[str] = set()
        self.parsed_nbytes = 0

    def header(self) -> GGUFHeader:
        self.magic()
        version = self.version()
        num_tensors, num_keys = self.scalar("u8"), self.scalar("u8")
        self.check_count(num_keys, _KEY, "metadata keys")
        self.check_count(num_tensors, _TENSOR_INFO, "tensors")
        metadata = self.metadata(num_keys)
        tensors = tuple(self.tensor_info(i) for i in range(num_tensors))
        alignment = self.alignment(metadata)
        return GGUFHeader(
            version=version,
            endian="little" if self.order == "<" else "big",
            metadata=metadata,
            float32_keys=frozenset(self.float32_keys),
            tensors=tensors,
            data_offset=-(-self.position // alignment) * alignment,
            alignment=alignment,
            nbytes=self.position,
        )

    def magic(self) -> None:
        if self.buffer[:4] != b"GGUF":
            raise wrong_magic(self.where, self.buffer[:64], "a GGUF file (magic b'GGUF')")
        self.position = 4

    def version(self) -> int:
        version: int = self.scalar("u4")
        if version & 0xFFFF == 0 and version:
            self.order = ">"
            self.position -= 4
            version = self.scalar("u4")
        if version not in (2, 3):
            raise UnsupportedError(
                f"{self.where}: GGUF version {version}, lmpack reads 2 and 3; convert it with llama.cpp first"
            )
        return version

    def metadata(self, num_keys: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for i in range(num_keys):
            self.context = f"metadata key {i + 1} of {num_keys}"
            key = self.name()
            self.context = f"the value of {key!r:.80}"
            if key in metadata:
                raise self.error("the key occurs twice")
            value_type = self.scalar("u4")
            if value_type == 6:
                self.float32_keys.add(key)
            metadata[key] = self.value(value_type, depth=0)
        return metadata

    def value(self, value_type: int, depth: int) -> Any:
        if value_type in _SCALARS:
            return self.scalar(_SCALARS[value_type])
        if value_type == _STRING:
            return self.strings(1)[0]
        if value_type == _ARRAY:
            return self.array(depth + 1)
        raise self.error(f"value type {value_type} is not known (0 to 12 are)")

    def array(self, depth: int) -> Any:
        if depth > MAX_ARRAY_DEPTH:
            raise self.error(f"arrays nested more than {MAX_ARRAY_DEPTH} deep")
        value_type, count = self.scalar("u4"), self.scalar("u8")
        if value_type == _STRING:
            self.check_count(count, _STRING_VALUE, "strings")
            return self.strings(count)
        if value_type == _ARRAY:
            self.check_count(count, _ARRAY_VALUE, "arrays")
            return [self.array(depth + 1) for _ in range(count)]
        if value_type not in _SCALARS:
            raise self.error(f"array of value type {value_type}, which is not known (0 to 12 are)")
        code = _SCALARS[value_type]
        dtype = np.dtype(code if code == "?" else self.order + code)
        self.check_count(count, _Cost(dtype.itemsize, dtype.itemsize), "numbers")
        raw = self.take(count * dtype.itemsize)
        if code == "?" and raw.translate(None, b"\0\1"):
            raise self.error("a bool that is neither 0 nor 1")
        return np.frombuffer(raw, dtype).astype(dtype.newbyteorder("="))

    def tensor_info(self, i: int) -> GGUFTensorInfo:
        self.context = f"tensor info {i + 1}"
        name = self.name()
        self.context = f"the tensor info of {name!r:.80}"
        num_dims = self.scalar("u4")
        if num_dims > MAX_DIMS:
            raise self.error(f"{num_dims} dimensions, at most {MAX_DIMS} are possible")
        dims = tuple(self.scalar("u8") for _ in range(num_dims))
        if math.prod(max(n, 1) for n in dims) > MAX_ELEMENTS:
            raise self.error(f"dimensions {list(dims)} have more than {MAX_ELEMENTS} elements")
        ggml_type = self.scalar("u4")
        return GGUFTensorInfo(name, ggml_type, dims[::-1], self.scalar("u8"))

    def alignment(self, metadata: Mapping[str, Any]) -> int:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        is_integer = isinstance(alignment, int) and not isinstance(alignment, bool)
        if not is_integer or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            self.context = "general.alignment"
            raise self.error(f"{alignment!r:.40} is not a power of two up to {MAX_ALIGNMENT}")
        return int(alignment)

    def name(self) -> str:
        length = self.scalar("u8")
        if not 0 < length <= MAX_NAME_NBYTES:
            raise self.error(f"a name of {length} bytes, expected 1 to {MAX_NAME_NBYTES}")
        raw = self.take(length)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.error(f"the name {raw[:40]!r} is not UTF-8") from error

    def scalar(self, code: str) -> Any:
        form = self.order + _SCALAR_FORMATS[code]
        (found,) = struct.unpack(form, self.take(struct.calcsize(form)))
        if code != "?":
            return found
        if found > 1:
            raise self.error(f"a bool of {found}, expected 0 or 1")
        return bool(found)

    def strings(self, count: int) -> list[str]:
        # the one hot loop: vocabularies have 150,000 tokens and as many merges
        unpack = struct.Struct(self.order + "Q").unpack_from
        buffer, position, available = self.buffer, self.position, len(self.buffer)
        found = []
        for _ in range(count):
            start = position + 8
            if start > available:
                buffer, available = self.fetch(start)
            position = start + unpack(buffer, position)[0]
            if position > available:
                buffer, available = self.fetch(position)
            found.append(buffer[start:position].decode("utf-8", "surrogateescape"))
        self.position = position
        return found

    def take(self, nbytes: int) -> bytes:
        end = self.position + nbytes
        if end > len(self.buffer):
            self.fetch(end)
        raw = self.buffer[self.position : end]
        self.position = end
        return raw

    def fetch(self, end: int) -> tuple[bytes, int]:
        """Have at least `end` bytes in the buffer; doubles it, so that the copying stays linear."""
        if end > self.total_nbytes:
            if self.too_long:
                raise self.error(f"the header is longer than {MAX_HEADER_NBYTES} bytes")
            raise self.error(f"needs {end} bytes, there are {self.total_nbytes}; download it again")
        while len(self.buffer) < end:
            assert self.file is not None, "bytes are complete from the start"
            wanted = min(max(end, 2 * len(self.buffer)), self.total_nbytes) - len(self.buffer)
            more = self.file.read(wanted)
            if not more:
                raise self.error(f"the file ends at byte {len(self.buffer)}, needs {end}; download it again")
            self.buffer += more
        return self.buffer, len(self.buffer)

    def check_count(self, count: int, cost: _Cost, what: str) -> None:
        """Refuse more than the file can hold or than memory should, before any of them is read."""
        possible = (self.total_nbytes - self.position) // cost.file_nbytes
        if count > possible:
            raise self.error(f"claims {count} {what}, the file has room for {possible}; download it again")
        self.parsed_nbytes += count * cost.memory_nbytes
        if self.parsed_nbytes > MAX_PARSED_NBYTES:
            raise self.error(
                f"{count} {what} and what comes before take more than {MAX_PARSED_NBYTES} bytes of memory"
            )

    def error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: at byte {self.position}, {self.context}: {message}")

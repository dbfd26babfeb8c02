"""Compression: tensors as zstd frames, floats split into planes of bytes first.

FORMAT.md, section 10, describes the bytes. A float's sign and exponent vary little from weight to weight; side by
side they take a third of their size, while the mantissas beside them do not shrink at all.
"""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np
import zstandard

from lmpack.drive import storage_errors
from lmpack.errors import StorageError
from lmpack.expert_key import ExpertKey
from lmpack.manifest import SHARED_FILE
from lmpack.partial_folder import REPLACEMENT_SUFFIX
from lmpack.storage import (
    PIECE_NBYTES,
    RAW_ENCODING,
    ZSTD_STORAGE,
    StoredExpert,
    StoredPart,
    StoredTensor,
    num_planes,
    zstd_encoding,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path
    from typing import BinaryIO

    from lmpack.layer_entry import ExpertPart
    from lmpack.manifest import Manifest
    from lmpack.tensor_info import TensorInfo

    Run = Callable[[Callable[[memoryview], bytes], Iterable[memoryview]], Iterator[bytes]]

WORTH_PERCENT = 95
"""A tensor that zstd leaves above this share of its size is stored as it is."""

_READ_NBYTES = 16 * PIECE_NBYTES
_ENTROPY_CODING = zstandard.ZstdCompressionParameters.from_level(1, hash_log=6, write_checksum=True)
"""Weights repeat nothing. With zstd's smallest table of earlier bytes it hardly looks for what repeats, and codes what
is left by its frequency: larger tables find short accidents, which make files larger and twice as slow to read."""


def compress_files(
    folder: Path, manifest: Manifest, *, progress: Callable[[int], None] | None = None
) -> Manifest:
    """Replace the expert files and shared.bin in folder by their compressed form; return the manifest that fits them.

    Every expert must still have a file of its own. progress gets bytes just compressed, in any thread. Raises
    StorageError.
    """
    owners: dict[
        tuple[str, tuple[ExpertPart, ...]], str
    ] = {}  # identical experts may be cut into other parts
    files = [
        [
            owners.setdefault((expert.file, layer.parts), ExpertKey(layer.layer, number).file)
            for number, expert in enumerate(layer.experts)
        ]
        for layer in manifest.layers
    ]
    parts = {file: layout for (_, layout), file in owners.items()}

    def compress(file: str) -> StoredExpert:
        stored = compress_expert(folder / file, parts[file])
        if progress is not None:
            progress(sum(part.nbytes for part in parts[file]))
        return stored

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        stored = dict(zip(parts, pool.map(compress, parts), strict=True))
        tensors = compress_shared(folder / SHARED_FILE, manifest.shared, pool.map)
    if progress is not None:
        progress(sum(tensor.nbytes for tensor in manifest.shared))
    layers = tuple(
        replace(
            layer,
            experts=tuple(
                replace(expert, file=file, stored=stored[file])
                for expert, file in zip(layer.experts, own, strict=True)
            ),
        )
        for layer, own in zip(manifest.layers, files, strict=True)
    )
    shared = tuple(
        replace(tensor, stored=form) for tensor, form in zip(manifest.shared, tensors, strict=True)
    )
    return replace(manifest, storage=ZSTD_STORAGE, layers=layers, shared=shared)


def compress_expert(path: Path, parts: Sequence[ExpertPart]) -> StoredExpert:
    """Replace the whole expert file at path by its compressed form."""
    written, digest = _compress_file(path, map(TensorPlace.of, parts), map)
    return StoredExpert(digest, tuple(StoredPart(encoding, nbytes) for encoding, nbytes, _ in written))


def compress_shared(path: Path, tensors: Sequence[TensorInfo], run: Run) -> list[StoredTensor]:
    """Replace shared.bin by its compressed form; run is map, or that of a thread pool."""
    written, _ = _compress_file(path, map(TensorPlace.of, tensors), run)
    stored: list[StoredTensor] = []
    end = 0
    for encoding, nbytes, sha256 in written:
        stored.append(StoredTensor(encoding, end, nbytes, sha256))
        end += nbytes
    return stored


def compress_piece(raw: memoryview, planes: int) -> bytes:
    """Return the zstd frames of one piece of a tensor, one for each of its planes."""
    compressor = zstandard.ZstdCompressor(compression_params=_ENTROPY_CODING)
    elements = np.frombuffer(raw, np.uint8).reshape(-1, planes)
    return b"".join(compressor.compress(elements[:, plane].tobytes()) for plane in range(planes))


class TensorPlace(NamedTuple):
    """Where a file that is to be compressed holds a tensor."""

    dtype: str
    offset: int
    nbytes: int

    @classmethod
    def of(cls, tensor: ExpertPart | TensorInfo) -> Self:
        """Return the place that the manifest gives it."""
        return cls(tensor.dtype, tensor.offset, tensor.nbytes)


class _Written(NamedTuple):
    """What became of one tensor in a compressed file."""

    encoding: str
    nbytes: int
    sha256: str


def compress_tensors(
    old: BinaryIO, new: BinaryIO, tensors: Iterable[TensorPlace], run: Run
) -> tuple[list[_Written], str]:
    """Append tensors of old, compressed, to the empty file new; return what they became, and the file's SHA-256."""
    digest = hashlib.sha256()
    written = []
    for dtype, offset, nbytes in tensors:
        start, before = new.tell(), digest.copy()
        encode = partial(compress_piece, planes=num_planes(dtype))
        encoding = zstd_encoding(dtype)
        frames = (
            frame
            for block in _blocks(old, offset, nbytes)
            for frame in run(
                encode, (block[at : at + PIECE_NBYTES] for at in range(0, len(block), PIECE_NBYTES))
            )
        )
        sha256 = _write(new, frames, digest)
        if (new.tell() - start) * 100 > nbytes * WORTH_PERCENT or not nbytes:
            new.seek(start)
            new.truncate()
            digest, encoding = before, RAW_ENCODING
            sha256 = _write(new, _blocks(old, offset, nbytes), digest)
        written.append(_Written(encoding, new.tell() - start, sha256))
    return written, digest.hexdigest()


def _compress_file(path: Path, tensors: Iterable[TensorPlace], run: Run) -> tuple[list[_Written], str]:
    """Replace a file by its tensors, compressed; return what they became, and its SHA-256."""
    temporary = path.with_name(path.name + REPLACEMENT_SUFFIX)
    with (
        storage_errors(path),
        open(path, "rb", buffering=0) as old,
        open(temporary, "wb", buffering=0) as new,
    ):
        result = compress_tensors(old, new, tensors, run)
        os.replace(temporary, path)
    return result


def _write(new: BinaryIO, blocks: Iterable[bytes | memoryview], digest: hashlib._Hash) -> str:
    """Append blocks, adding them to the file's digest; return the SHA-256 of these alone."""
    own = hashlib.sha256()
    for block in blocks:
        if new.write(block) != len(block):
            raise StorageError("the drive took only a part of the bytes")
        digest.update(block)
        own.update(block)
    return own.hexdigest()


def _blocks(file: BinaryIO, offset: int, nbytes: int) -> Iterator[memoryview]:
    file.seek(offset)
    while nbytes:
        block = file.read(min(_READ_NBYTES, nbytes))
        if not block:
            raise StorageError(f"ends {nbytes} bytes too early")
        yield memoryview(block)
        nbytes -= len(block)

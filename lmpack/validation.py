"""Validation: compare every byte of a pack with its manifest.

A task is a range of one file with the SHA-256 its bytes must have and the bytes in it that must be zero.
"""

from __future__ import annotations

import hashlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import local
from typing import TYPE_CHECKING

from lmpack.decompression import Decompressor
from lmpack.errors import ManifestError, PackError, StorageError
from lmpack.expert_key import ExpertKey
from lmpack.jobs import reading_jobs
from lmpack.manifest import MANIFEST_FILE, SHARED_FILE
from lmpack.pack import map_file, read_manifest
from lmpack.pack_files import (
    Problem,
    expected_files,
    extra_files,
    folders_of,
    found_files,
    open_regular,
    wrong_files,
)
from lmpack.reference_check import check_reference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from lmpack.manifest import ExpertEntry, LayerEntry, Manifest
    from lmpack.pack_files import ExpectedFile
    from lmpack.tensor_info import TensorInfo

__all__ = ["FileRange", "Problem", "ValidationReport", "check_files", "file_ranges", "validate"]

READ_NBYTES = 8 * 1024 * 1024
"""Large enough that a drive streams, small enough that sixteen threads need 128 MiB."""


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """What validate() found."""

    problems: tuple[Problem, ...]
    num_files: int  # files the manifest names, itself included, and those that it refers to
    nbytes: int  # bytes read and compared; 0 with quick
    seconds: float

    @property
    def ok(self) -> bool:
        """Tell whether the pack is whole."""
        return not self.problems


@dataclass(frozen=True, slots=True)
class _Restored:
    """What a compressed range must become: pieces() gives its bytes, from those of the range."""

    sha256: str
    pieces: Callable[[Decompressor, memoryview], Iterator[memoryview]]


@dataclass(frozen=True, slots=True)
class FileRange:
    """A part of a file: [offset, offset + nbytes) is hashed, the bytes of each `zeros` [start, stop) are padding."""

    file: str
    key: ExpertKey | None
    name: str  # what a message begins with, when the file holds more than this
    offset: int
    nbytes: int
    sha256: str
    zeros: tuple[tuple[int, int], ...]
    restored: _Restored | None = None  # in a compressed pack

    @property
    def end(self) -> int:
        """The end of what must be read: the hashed bytes and the padding after them."""
        return max([self.offset + self.nbytes, *(stop for _, stop in self.zeros)])


def validate(
    path: Path | str,
    *,
    quick: bool = False,
    jobs: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> ValidationReport:
    """Check the pack at path: its manifest, names and sizes and, unless quick, padding and every checksum.

    progress is called from any thread with the number of bytes just checked. Raises PackError when path is no
    folder; everything else that is wrong is a Problem of the report, in the manifest's order.
    """
    start = time.perf_counter()
    jobs = reading_jobs(jobs)
    folder = Path(path)
    try:
        manifest = read_manifest(folder)
    except ManifestError as error:
        message = str(error).removeprefix(f"{folder / MANIFEST_FILE}: ")
        problem = Problem(MANIFEST_FILE, None, message)
        return ValidationReport((problem,), 1, 0, time.perf_counter() - start)
    expected = expected_files(manifest)
    problems, nbytes = check_files(folder, manifest, expected, quick=quick, jobs=jobs, progress=progress)
    num_files = len(expected) + 1
    if manifest.is_reference:
        num_files += sum(bool(file.segments) for file in manifest.source.files)
    return ValidationReport(problems, num_files, nbytes, time.perf_counter() - start)


def check_files(
    folder: Path,
    manifest: Manifest,
    expected: Mapping[str, ExpectedFile],
    *,
    quick: bool = False,
    jobs: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> tuple[tuple[Problem, ...], int]:
    """Compare a folder's files with a manifest; return what is wrong, and the number of bytes compared.

    expected is expected_files(manifest), which takes a while to make for tens of thousands of experts.
    """
    found = found_files(folder)
    problems = list(wrong_files(expected, found))
    nbytes = 0
    wrong = {problem.file for problem in problems}
    bad = {file for file in expected if wrong and not wrong.isdisjoint([file, *folders_of(file)])}
    if not quick:
        ranges = [item for item in file_ranges(manifest) if item.file not in bad]
        checker = _Checker(folder, manifest, progress)
        with ThreadPoolExecutor(reading_jobs(jobs)) as pool:
            found_bad = dict.fromkeys(
                filter(None, pool.map(checker.check, ranges))
            )  # a closed file is one problem
        problems += found_bad
        nbytes = sum(item.end - item.offset for item in ranges)
    if manifest.is_reference:
        bad |= {problem.file for problem in problems}
        more, more_nbytes = check_reference(folder, manifest, bad, quick=quick, jobs=jobs, progress=progress)
        problems, nbytes = [*problems, *more], nbytes + more_nbytes
    problems += extra_files(expected, found)
    return tuple(problems), nbytes


def file_ranges(manifest: Manifest) -> Iterator[FileRange]:
    """Yield what has a checksum of its own: every expert file, shared tensor and kept file, by file, then by offset."""
    if not manifest.is_reference:
        yield from _weight_ranges(manifest)
    for file in manifest.source.files:
        yield FileRange(file.kept, None, "", 0, file.kept_nbytes, file.kept_sha256, ())


def _weight_ranges(manifest: Manifest) -> Iterator[FileRange]:
    seen: set[str] = set()
    for layer in manifest.layers:
        for number, expert in enumerate(layer.experts):
            if expert.file not in seen:
                seen.add(expert.file)
                key = ExpertKey(layer.layer, number)
                yield _expert_range(layer, expert, key)
    if manifest.is_compressed:
        yield from map(_compressed_tensor_range, manifest.shared)
    else:
        yield from _tensor_ranges(manifest)


def _expert_range(layer: LayerEntry, expert: ExpertEntry, key: ExpertKey) -> FileRange:
    if expert.stored is None:
        return FileRange(expert.file, key, "", 0, expert.nbytes, expert.sha256, _padding(layer))
    restored = _Restored(expert.sha256, lambda d, file: d.expert_pieces(file, expert, layer.parts))
    return FileRange(expert.file, key, "", 0, expert.file_nbytes, expert.file_sha256, (), restored)


def _compressed_tensor_range(tensor: TensorInfo) -> FileRange:
    stored = tensor.stored
    assert stored is not None
    restored = _Restored(
        tensor.sha256,
        lambda d, stored_bytes: d.pieces(stored_bytes, stored.encoding, tensor.dtype, tensor.nbytes),
    )
    name = f"tensor {tensor.name!r}: "
    return FileRange(SHARED_FILE, None, name, stored.offset, stored.nbytes, stored.sha256, (), restored)


def _tensor_ranges(manifest: Manifest) -> Iterator[FileRange]:
    ends = [tensor.offset for tensor in manifest.shared[1:]] + [manifest.shared_nbytes]
    for tensor, end in zip(manifest.shared, ends, strict=False):
        padding = ((tensor.offset + tensor.nbytes, end),)
        name = f"tensor {tensor.name!r}: "
        yield FileRange(SHARED_FILE, None, name, tensor.offset, tensor.nbytes, tensor.sha256, padding)


def _padding(layer: LayerEntry) -> tuple[tuple[int, int], ...]:
    starts = [part.offset for part in layer.parts[1:]] + [layer.stride]
    ends = [part.offset + part.nbytes for part in layer.parts]
    return tuple((end, start) for end, start in zip(ends, starts, strict=True) if end < start)


class _Checker:
    """Reads ranges in any thread, each through that thread's own buffer."""

    def __init__(self, folder: Path, manifest: Manifest, progress: Callable[[int], None] | None) -> None:
        self._folder = folder
        self._progress = progress
        self._buffers = local()
        self._owners: dict[str, ExpertKey] = {}  # sha256 -> expert, to recognise files that were swapped
        for layer in manifest.layers:
            for number, expert in enumerate(layer.experts):
                self._owners.setdefault(expert.file_sha256, ExpertKey(layer.layer, number))

    def check(self, item: FileRange) -> Problem | None:
        """Return what is wrong with a range, in one line."""
        path = self._folder / item.file
        try:
            descriptor = open_regular(path)
        except (PackError, StorageError) as error:
            return Problem(item.file, item.key, str(error).removeprefix(f"{path}: "))
        try:
            digest, dirty = self._read(item, descriptor)
            restored = self._restore(item) if item.restored and digest == item.sha256 else None
        except (PackError, StorageError) as error:
            return Problem(item.file, item.key, f"{item.name}{error}")
        finally:
            os.close(descriptor)
        found = []
        if dirty is not None:
            found.append(f"padding is not zero at byte {dirty}")
        if digest != item.sha256:
            found.append(f"sha256 is {digest[:12]}…, the manifest says {item.sha256[:12]}…")
            if item.key is not None and digest in self._owners:
                found.append(f"it holds the bytes of expert {self._owners[digest]}")
        if restored is not None and item.restored is not None and restored != item.restored.sha256:
            found.append(
                f"decompressed, its sha256 is {restored[:12]}…, the manifest says {item.restored.sha256[:12]}…"
            )
        return Problem(item.file, item.key, item.name + "; ".join(found)) if found else None

    def _restore(self, item: FileRange) -> str:
        """Return the SHA-256 of what a compressed range decompresses to."""
        assert item.restored is not None
        digest = hashlib.sha256()
        stored = map_file(self._folder / item.file, item.end)[item.offset :].data
        for piece in item.restored.pieces(Decompressor(), stored):
            digest.update(piece)
        return digest.hexdigest()

    def _read(self, item: FileRange, descriptor: int) -> tuple[str, int | None]:
        """Return the SHA-256 of the range and the first byte of padding that is not zero."""
        digest = hashlib.sha256()
        dirty: int | None = None
        position, hashed_end = item.offset, item.offset + item.nbytes
        while position < item.end:
            chunk = self._read_chunk(descriptor, position, item.end)
            digest.update(chunk[: max(0, hashed_end - position)])
            if dirty is None:
                dirty = _first_dirty(chunk, position, item.zeros)
            position += len(chunk)
            if self._progress is not None:
                self._progress(len(chunk))
        return digest.hexdigest(), dirty

    def _read_chunk(self, descriptor: int, position: int, end: int) -> memoryview:
        if not hasattr(self._buffers, "buffer"):
            self._buffers.buffer = memoryview(bytearray(READ_NBYTES))
        buffer: memoryview = self._buffers.buffer
        try:
            count = os.preadv(descriptor, [buffer[: min(READ_NBYTES, end - position)]], position)
        except OSError as error:
            raise StorageError(f"cannot be read at byte {position}: {error.strerror}") from error
        if count == 0:
            raise PackError(f"ends at byte {position}, expected at least {end} bytes")
        return buffer[:count]


def _first_dirty(chunk: memoryview, position: int, zeros: tuple[tuple[int, int], ...]) -> int | None:
    for start, stop in zeros:
        piece = chunk[max(0, start - position) : max(0, stop - position)]
        if piece != bytes(len(piece)):
            return max(start, position) + next(i for i, byte in enumerate(piece) if byte)
    return None

"""Repair: the bad files of a pack again, from another copy of it or from its source, and no others.

A file is built beside the bad one and takes its name when every byte of it has the hash that the manifest wants.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from converters.source_map import SourceMap, SourcePiece
from lmpack.drive import check_space, read_into, storage_errors, sync_path
from lmpack.errors import ManifestError, PackError
from lmpack.manifest import MANIFEST_FILE, MAX_MANIFEST_NBYTES, Manifest
from lmpack.pack import read_manifest
from lmpack.pack_files import Problem, expected_files, open_regular
from lmpack.validation import FileRange, ValidationReport, check_files, file_ranges, validate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from converters.byte_origin import ByteOrigin

UNFINISHED_SUFFIX = ".repair"
READ_NBYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class RepairReport:
    """What a repair did."""

    repaired: tuple[str, ...]  # files inside the pack
    failed: tuple[Problem, ...]  # why the origin could not help
    validation: ValidationReport  # of the pack as it is now


def repair(
    pack: Path | str,
    origin: ByteOrigin,
    problems: Iterable[Problem],
    *,
    jobs: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> RepairReport:
    """Replace the files that validate() found to be bad, then validate again; progress is validate's.

    Files that the manifest does not name stay. Raises PackError when the manifest itself is bad and the origin has
    no better one, StorageError when the drive refuses.
    """
    folder, problems = Path(pack), tuple(problems)
    repaired: list[str] = []
    failed: list[Problem] = []
    if any(problem.file == MANIFEST_FILE for problem in problems):
        manifest, problems = _fetch_manifest(folder, origin)
        repaired.append(MANIFEST_FILE)
    else:
        manifest = read_manifest(folder)
    expected = expected_files(manifest)
    keys = {problem.file: problem.key for problem in problems if problem.file in expected}
    repairing = _Repairing(folder, manifest, origin)
    for file, key in keys.items():
        try:
            repairing.rebuild(file)
            repaired.append(file)
        except PackError as error:
            failed.append(Problem(file, key, str(error)))
    return RepairReport(tuple(repaired), tuple(failed), validate(folder, jobs=jobs, progress=progress))


class _Repairing:
    """Rebuilds files of one pack from one origin."""

    def __init__(self, folder: Path, manifest: Manifest, origin: ByteOrigin) -> None:
        self._folder = folder
        self._origin = origin
        self._files = expected_files(manifest)
        self._source_map = SourceMap(manifest)
        self._ranges: dict[str, list[FileRange]] = {}
        for item in file_ranges(manifest):
            self._ranges.setdefault(item.file, []).append(item)
        self._buffer = memoryview(bytearray(READ_NBYTES))

    def rebuild(self, file: str) -> None:
        """Put a good file in place of a bad one; raises PackError when the origin does not have its bytes."""
        path, nbytes = self._folder / file, self._files[file].nbytes
        unfinished = path.with_name(path.name + UNFINISHED_SUFFIX)
        check_space(self._folder, nbytes, 1)
        with storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(unfinished, flags, 0o666)
            try:
                os.ftruncate(descriptor, nbytes)
                for item in self._ranges.get(file, ()):
                    self._fill(item, descriptor)
                os.fsync(descriptor)
                if path.is_dir() and not path.is_symlink():
                    _remove_empty(path)
                unfinished.replace(path)
            except BaseException:
                unfinished.unlink()
                raise
            finally:
                os.close(descriptor)
            sync_path(path.parent)

    def _fill(self, item: FileRange, descriptor: int) -> None:
        if len(self._ranges[item.file]) > 1 and self._keep(item, descriptor):
            return
        if self._origin.is_pack:
            pieces = [SourcePiece(item.file, item.offset, item.nbytes, item.offset)]
        else:
            pieces = self._source_map.pieces(item)
        digest = self._copy(item, pieces, self._origin.read, descriptor)
        if digest != item.sha256:
            raise PackError(
                f"{item.name}{self._origin.name} has other bytes: sha256 {digest[:12]}…, the manifest says "
                f"{item.sha256[:12]}…"
            )

    def _keep(self, item: FileRange, descriptor: int) -> bool:
        """Take over a range that is good in the bad file; tell whether it is."""

        def read(file: str, offset: int, view: memoryview) -> None:
            opened = open_regular(self._folder / file)
            try:
                count = read_into(view, opened, offset)
                if count < view.nbytes:
                    raise PackError(f"{file}: ends at byte {offset + count}")
            finally:
                os.close(opened)

        try:
            piece = SourcePiece(item.file, item.offset, item.nbytes, item.offset)
            return self._copy(item, [piece], read, descriptor) == item.sha256
        except PackError:
            return False

    def _copy(
        self,
        item: FileRange,
        pieces: list[SourcePiece],
        read: Callable[[str, int, memoryview], None],
        descriptor: int,
    ) -> str:
        """Write pieces where they belong; return the SHA-256 of the range, with zeros between and after them."""
        digest, end = hashlib.sha256(), item.offset
        for piece in pieces:
            digest.update(bytes(piece.at - end))
            for start in range(0, piece.nbytes, READ_NBYTES):
                view = self._buffer[: min(READ_NBYTES, piece.nbytes - start)]
                read(piece.file, piece.offset + start, view)
                digest.update(view)
                _write_all(descriptor, view, piece.at + start)
            end = piece.at + piece.nbytes
        digest.update(bytes(item.offset + item.nbytes - end))
        return digest.hexdigest()


def _fetch_manifest(folder: Path, origin: ByteOrigin) -> tuple[Manifest, tuple[Problem, ...]]:
    """Take the origin's manifest when it is this pack's; return it with what is wrong by it."""
    where = folder / MANIFEST_FILE
    if not origin.is_pack:
        raise PackError(
            f"{where}: a checkpoint cannot restore it; name another copy of the pack, or convert again"
        )
    nbytes = origin.nbytes(MANIFEST_FILE)
    if nbytes > MAX_MANIFEST_NBYTES:
        raise ManifestError(
            f"{origin.name}: its manifest has {nbytes} bytes, expected at most {MAX_MANIFEST_NBYTES}"
        )
    raw = bytearray(nbytes)
    origin.read(MANIFEST_FILE, 0, memoryview(raw))
    manifest = Manifest.parse(bytes(raw), Path(origin.name) / MANIFEST_FILE)
    expected = expected_files(manifest)
    problems, _ = check_files(folder, manifest, expected)
    bad = {problem.file for problem in problems}
    if not any(expected[file].nbytes for file in expected.keys() - bad):
        raise PackError(
            f"{origin.name}: is another pack; no file of {folder} has the bytes that its manifest wants"
        )
    unfinished = where.with_name(where.name + UNFINISHED_SUFFIX)
    with storage_errors(where):
        with open(unfinished, "wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        if where.is_dir() and not where.is_symlink():
            _remove_empty(where)
        unfinished.replace(where)
        sync_path(folder)
    return manifest, problems


def _remove_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError as error:
        raise PackError(f"{folder}: a folder with something in it is in its place; move it away") from error


def _write_all(descriptor: int, view: memoryview, offset: int) -> None:
    while view.nbytes:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written

"""Repair: the bad files of a pack again, from another copy of it or from its source, and no others.

A file is built beside the bad one and takes its name when every byte of it has the hash that the manifest wants.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

import zstandard

from converters.byte_origin import LocalOrigin
from converters.origin_check import origin_manifest, refuse_other_checkpoint, refuse_other_pack
from converters.source_map import SourceMap, SourcePiece
from lmpack.compression import compress_tensors
from lmpack.drive import alone_in, check_space, read_into, storage_errors, sync_path, write_from
from lmpack.dtype import dtype_nbytes
from lmpack.errors import CheckpointError, PackError, StorageError, UsageError
from lmpack.manifest import MANIFEST_FILE, SHARED_FILE
from lmpack.pack import read_manifest
from lmpack.pack_files import Problem, expected_files, needed_folders
from lmpack.padded_digest import PaddedDigest
from lmpack.validation import FileRange, ValidationReport, check_files, file_ranges, validate

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from converters.byte_origin import ByteOrigin
    from converters.importance_matrix import ImportanceMatrix
    from converters.source_map import RangeContents
    from lmpack.manifest import Manifest
    from lmpack.pack_files import ExpectedFile

UNFINISHED_FILE = "unfinished.repair"
"""Where the pack has a file that is not good yet."""
READ_NBYTES = 8 << 20
NUM_COMPARED = 3
"""Good experts that an origin is compared in when it has other bytes for a bad one: fine-tuning changes most."""


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
    imatrix: ImportanceMatrix | None = None,
    jobs: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> RepairReport:
    """Replace the files that validate() found to be bad, then validate again; progress is validate's.

    What was quantized or compressed is so again; imatrix is the importance matrix that was used. Files that the
    manifest does not name stay, and so do the files that a reference pack refers to. Raises UsageError when the origin
    belongs to another model or form, PackError when the manifest itself is bad and the origin has no better one,
    StorageError when the drive refuses: files that are not good yet are as they were.
    """
    folder, problems = Path(pack), tuple(problems)
    if not os.access(folder, os.W_OK):
        raise StorageError(
            f"{folder}: cannot be written to; change its permissions or how the drive is mounted, or repair a copy"
        )
    repaired: list[str] = []
    failed: list[Problem] = []
    tried = False
    with alone_in(folder, "another repair of it is running; wait for it"):
        (folder / UNFINISHED_FILE).unlink(missing_ok=True)  # of a repair that was killed
        if any(problem.file == MANIFEST_FILE for problem in problems):
            manifest, problems = _fetch_manifest(folder, origin)
            repaired.append(MANIFEST_FILE)
        else:
            manifest = read_manifest(folder)
        expected = expected_files(manifest)
        keys = {problem.file: problem.key for problem in problems if problem.file in expected}
        failed += _beyond_repair(problems, expected)
        repairing = _Repairing(folder, manifest, origin, imatrix)
        for file, key in keys.items():
            try:
                repairing.rebuild(file)
                repaired.append(file)
            except (PackError, CheckpointError) as error:
                if not repaired and not tried:  # nothing has shown yet that the origin is the right one
                    _refuse_stranger(origin, manifest, folder)
                    if isinstance(error, _OtherBytesError):
                        repairing.refuse_other_weights(keys)
                tried = True
                failed.append(Problem(file, key, str(error)))
    return RepairReport(tuple(repaired), tuple(failed), validate(folder, jobs=jobs, progress=progress))


def _refuse_stranger(origin: ByteOrigin, manifest: Manifest, folder: Path) -> None:
    if origin.is_pack:
        refuse_other_pack(origin, manifest, folder)
    else:
        refuse_other_checkpoint(origin, manifest.source, folder)


def _beyond_repair(problems: Iterable[Problem], expected: Mapping[str, ExpectedFile]) -> Iterator[Problem]:
    """Yield what no origin can help with, once each: the files of a checkpoint, and what is in place of a folder."""
    folders = needed_folders(expected)
    for file in dict.fromkeys(problem.file for problem in problems):
        if file in folders:
            yield Problem(
                file, None, "is a link or a file, a folder is needed here; move it away, then repair again"
            )
        elif os.path.isabs(file):  # of a reference pack
            why = "is of the checkpoint, and a repair writes only to the pack; put back the file that was converted"
            yield Problem(file, None, f"{why} (lmpack export gives it, from a pack with weights)")


class _OtherBytesError(PackError):
    """The origin has something else where the bytes of a pack should come from."""


class _Repairing:
    """Rebuilds files of one pack from one origin."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        origin: ByteOrigin,
        imatrix: ImportanceMatrix | None,
    ) -> None:
        self._folder = folder
        self._manifest = manifest
        self._origin = origin
        self._files = expected_files(manifest)
        self._source_map = SourceMap(manifest, imatrix)
        self._ranges: dict[str, list[FileRange]] = {}
        for item in file_ranges(manifest):
            self._ranges.setdefault(item.file, []).append(item)
        self._buffer = memoryview(bytearray(READ_NBYTES))

    def rebuild(self, file: str) -> None:
        """Put a good file in place of a bad one; raises PackError when the origin does not have its bytes."""
        check_space(self._folder, self._files[file].nbytes, 1)
        with _replacing(self._folder, file) as descriptor:
            os.ftruncate(descriptor, self._files[file].nbytes)
            for item in self._ranges.get(file, ()):
                self._fill(item, descriptor)

    def refuse_other_weights(self, bad: Collection[str]) -> None:
        """Raise UsageError when the origin has other bytes for what is good in the pack as well."""
        ranges = [
            item for file, items in self._ranges.items() if file not in bad for item in items if item.nbytes
        ]
        good = [item for item in ranges if item.key] or [item for item in ranges if item.file == SHARED_FILE]
        found = ""
        for item in good[:: max(1, len(good) // NUM_COMPARED)][:NUM_COMPARED]:
            try:
                with storage_errors(self._folder), TemporaryFile(dir=self._folder) as unused:
                    self._fetch(item, unused.fileno())
            except _OtherBytesError as error:
                found = f"expert {item.key}: {error}" if item.key else str(error)
            except (PackError, CheckpointError):
                return
            else:
                return
        if found:
            raise UsageError(
                f"{self._origin.name}: is not what {self._folder} was made from, good files differ from it as well: {found}"
            )

    def _fill(self, item: FileRange, descriptor: int) -> None:
        if len(self._ranges[item.file]) == 1 or not self._keep(item, descriptor):
            self._fetch(item, descriptor)

    def _fetch(self, item: FileRange, descriptor: int) -> None:
        """Write a range as the origin has it; raises _OtherBytesError when that is not what the manifest wants."""
        if self._origin.is_pack or item.restored is None:
            pieces = _whole(item) if self._origin.is_pack else self._source_map.contents(item).pieces
            digest = self._copy(pieces, item.nbytes, self._origin.read, descriptor, item.offset)
            self._check(item, digest, item.sha256, pieces)
        else:
            self._fill_compressed(item, self._source_map.contents(item), descriptor)

    def _fill_compressed(self, item: FileRange, contents: RangeContents, descriptor: int) -> None:
        """Put the source's bytes together, then compress them; the files for that have no names in the pack."""
        check_space(self._folder, contents.nbytes + item.nbytes, 2)
        with (
            TemporaryFile(buffering=0, dir=self._folder) as plain,
            TemporaryFile(buffering=0, dir=self._folder) as compressed,
        ):
            digest = self._copy(contents.pieces, contents.nbytes, self._origin.read, plain.fileno(), 0)
            self._check(item, digest, contents.sha256, contents.pieces)
            _, digest = compress_tensors(plain, compressed, contents.tensors, map)
            if digest != item.sha256:
                version = ".".join(map(str, zstandard.ZSTD_VERSION))
                raise PackError(
                    f"{item.name}zstd {version} does not give the compressed bytes that the manifest wants, another "
                    "version of it wrote them; name another copy of the pack, or unpack a good one"
                )
            for start in range(0, item.nbytes, READ_NBYTES):
                view = self._buffer[: min(READ_NBYTES, item.nbytes - start)]
                read_into(view, compressed.fileno(), start)
                write_from(view, descriptor, item.offset + start)

    def _check(self, item: FileRange, digest: str, sha256: str, pieces: Sequence[SourcePiece]) -> None:
        """Raise PackError unless what the origin has, converted where it was, hashes to what the manifest wants."""
        if digest == sha256:
            return
        differs = f"sha256 {digest[:12]}…, the manifest says {sha256[:12]}…"
        versions = {piece.conversion.quantizer.version for piece in pieces if piece.conversion is not None}
        if not versions:
            raise _OtherBytesError(
                f"{item.name}{self._origin.name} has other bytes: {differs}; name another copy of the pack, or of the checkpoint"
            )
        written = {entry.library_version for entry in self._manifest.converted}
        raise _OtherBytesError(
            f"{item.name}{self._origin.name} gives other bytes: {differs}. It is another checkpoint, or ggml "
            f"{' '.join(versions)} quantizes otherwise than {' '.join(written)}, which the pack was made with: install "
            "that, or name another copy of the pack"
        )

    def _keep(self, item: FileRange, descriptor: int) -> bool:
        """Take over a range that is good in the bad file; tell whether it is."""

        itself = LocalOrigin(os.fspath(self._folder), is_pack=True, paths={})
        try:
            return self._copy(_whole(item), item.nbytes, itself.read, descriptor, item.offset) == item.sha256
        except PackError:
            return False

    def _copy(
        self,
        pieces: Sequence[SourcePiece],
        nbytes: int,
        read: Callable[[str, int, memoryview], None],
        descriptor: int,
        offset: int,
    ) -> str:
        """Write pieces of a range that begins at offset; return its SHA-256, with zeros between and after them."""
        digest = PaddedDigest()
        for piece in pieces:
            at, step = piece.at, _step_nbytes(piece)
            for start in range(0, piece.nbytes, step):
                view = self._buffer[: min(step, piece.nbytes - start)]
                read(piece.file, piece.offset + start, view)
                if piece.conversion is not None:
                    view, _ = piece.conversion.convert(view, piece.matrix)
                digest.add(at, view)
                write_from(view, descriptor, offset + at)
                at += view.nbytes
        return digest.finish(nbytes)


def _whole(item: FileRange) -> list[SourcePiece]:
    """Return a range as a copy of the pack has it."""
    return [SourcePiece(item.file, item.offset, item.nbytes, 0)]


def _step_nbytes(piece: SourcePiece) -> int:
    """Return how many bytes of a piece are read at once: whole rows when they are converted."""
    if piece.conversion is None:
        return READ_NBYTES
    row_nbytes = dtype_nbytes(piece.conversion.source_dtype, (piece.conversion.num_columns,))
    if row_nbytes > READ_NBYTES:
        raise PackError(
            f"{piece.conversion.name}: has rows of {row_nbytes} bytes; name another copy of the pack"
        )
    return READ_NBYTES // row_nbytes * row_nbytes


def _fetch_manifest(folder: Path, origin: ByteOrigin) -> tuple[Manifest, tuple[Problem, ...]]:
    """Take the origin's manifest when it is this pack's; return it with what is wrong by it."""
    where = folder / MANIFEST_FILE
    if not origin.is_pack:
        raise PackError(
            f"{where}: a checkpoint cannot restore it; name another copy of the pack, or convert again"
        )
    raw, manifest = origin_manifest(origin)
    expected = expected_files(manifest)
    problems, _ = check_files(folder, manifest, expected)
    bad = {problem.file for problem in problems}
    if not any(expected[file].nbytes for file in expected.keys() - bad):
        raise PackError(
            f"{origin.name}: is another pack; no file of {folder} has the bytes that its manifest wants"
        )
    with _replacing(folder, MANIFEST_FILE) as descriptor:
        write_from(raw, descriptor, 0)
    return manifest, problems


@contextmanager
def _replacing(folder: Path, file: str) -> Iterator[int]:
    """Give a descriptor of a new file, which takes the place of an old one when the block ends without an error.

    Raises PackError when a link leads out of the pack on the way there, or a folder that is not empty is in its place.
    """
    path, unfinished = folder / file, folder / UNFINISHED_FILE
    with storage_errors(path):
        for parent in reversed(PurePosixPath(file).parents):
            below = folder / parent
            if parent.name and os.path.lexists(below) and (below.is_symlink() or not below.is_dir()):
                raise PackError(f"{below}: is a link or a file, a folder is needed here; move it away")
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            yield descriptor
            os.fsync(descriptor)
            if path.is_dir() and not path.is_symlink():
                _remove_empty(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished.replace(path)
        except BaseException:
            unfinished.unlink()
            raise
        finally:
            os.close(descriptor)
        sync_path(path.parent)


def _remove_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError as error:
        raise PackError(f"{folder}: a folder with something in it is in its place; move it away") from error

"""Export: the source files again, byte for byte, from a pack.

A file is put together from its kept bytes and its tensors in their old order, hashed while it is written, and
takes its name only when the hash is the source's.
"""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from converters.copy_lanes import BUFFER_NBYTES, CopyLanes
from converters.pack_extent import Extent, extent_pieces, read_extents, source_extents
from lmpack.decompression import Decompressor
from lmpack.drive import alone_in, check_space, storage_errors, sync_path, write_from
from lmpack.errors import PackError, UnsupportedError, UsageError
from lmpack.pack import Pack, refuse_inside_pack
from lmpack.source_file import MAX_NAME_NBYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from converters.copy_lanes import LentBuffer
    from lmpack.manifest import SourceFile

PARTIAL_SUFFIX = ".partial"
_HASH_LANE, _WRITE_LANE = 0, 1


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What an export wrote."""

    path: Path
    files: tuple[str, ...]
    nbytes: int
    seconds: float


def export(
    pack: Pack | Path | str, dst: Path | str, *, progress: Callable[[int], None] | None = None
) -> ExportReport:
    """Write the source files of a pack into the folder dst; progress gets the number of bytes just read.

    Raises UnsupportedError for a pack that is not reproducible, UsageError when one of the files exists there, dst
    is in a pack or another process exports into it, PackError when a file does not come out with the source's
    SHA-256 (nothing is left under its name then), StorageError when the drive refuses.
    """
    started = time.perf_counter()
    pack = pack if isinstance(pack, Pack) else Pack.open(pack)
    if not pack.manifest.reproducible:
        raise UnsupportedError(f"{pack.path}: cannot give its source back: {pack.manifest.reason}")
    dst = Path(dst)
    refuse_inside_pack(dst)
    files = pack.manifest.source.files
    nbytes = sum(file.nbytes for file in files)
    check_space(dst, nbytes, len(files))
    with storage_errors(dst):
        dst.mkdir(parents=True, exist_ok=True)
    with alone_in(dst, "another process is exporting into it; wait for it"):
        _refuse_existing(dst, files)
        for file in files:
            _export_file(pack, file, dst / file.name, progress or (lambda _: None))
    return ExportReport(dst, tuple(file.name for file in files), nbytes, time.perf_counter() - started)


def _refuse_existing(dst: Path, files: Sequence[SourceFile]) -> None:
    for file in files:
        for path, advice in (
            (dst / file.name, "export overwrites nothing; choose another folder, or delete it"),
            (_partial(dst / file.name), "an export that was killed left it; delete it first"),
        ):
            if os.path.lexists(path):
                raise UsageError(f"{path}: exists; {advice}")


def _partial(path: Path) -> Path:
    """Return where a file grows: beside it, the end of a name cut off that has no room for the suffix."""
    start = os.fsencode(path.name)[: MAX_NAME_NBYTES - len(PARTIAL_SUFFIX)]
    return path.with_name(os.fsdecode(start) + PARTIAL_SUFFIX)


def _export_file(pack: Pack, file: SourceFile, path: Path, progress: Callable[[int], None]) -> None:
    digest, unfinished = hashlib.sha256(), _partial(path)
    fill = _fill_decompressed if pack.manifest.is_compressed else _fill_as_it_is
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.open("xb", buffering=0) as written:
            try:
                with CopyLanes(2) as lanes:  # they end before the file is closed
                    offset = 0
                    for buffer, nbytes in fill(pack, file, lanes):
                        view = buffer.view[:nbytes]
                        lanes.give(_HASH_LANE, buffer, partial(digest.update, view))
                        lanes.give(_WRITE_LANE, buffer, partial(write_from, view, written.fileno(), offset))
                        buffer.release()
                        offset += nbytes
                        progress(nbytes)
                    lanes.drain()
                os.fsync(written.fileno())
                if digest.hexdigest() != file.sha256:
                    raise PackError(
                        f"{path}: sha256 is {digest.hexdigest()[:12]}…, the source had {file.sha256[:12]}…; the pack "
                        f"is damaged: run: lmpack validate {pack.path}"
                    )
                unfinished.rename(path)
            except BaseException:
                unfinished.unlink(missing_ok=True)
                raise
        sync_path(path.parent)


def _fill_as_it_is(pack: Pack, file: SourceFile, lanes: CopyLanes) -> Iterator[tuple[LentBuffer, int]]:
    """Yield buffers with a source file's bytes in file order, and how many each holds."""
    for extents in _batches(source_extents(pack, file)):
        buffer = lanes.lend()
        nbytes = sum(extent.nbytes for extent in extents)
        read_extents(extents, buffer.view[:nbytes])
        yield buffer, nbytes


def _fill_decompressed(pack: Pack, file: SourceFile, lanes: CopyLanes) -> Iterator[tuple[LentBuffer, int]]:
    """Do the same for a compressed pack."""
    buffer, filled = lanes.lend(), 0
    decompressor = Decompressor()
    for piece in (p for extent in source_extents(pack, file) for p in extent_pieces(extent, decompressor)):
        while piece.nbytes:
            taken = min(piece.nbytes, BUFFER_NBYTES - filled)
            buffer.view[filled : filled + taken] = piece[:taken]
            piece, filled = piece[taken:], filled + taken
            if filled == BUFFER_NBYTES:
                yield buffer, filled
                buffer, filled = lanes.lend(), 0
    yield buffer, filled


def _batches(extents: Iterator[Extent]) -> Iterator[list[Extent]]:
    """Group extents into lists that fill a buffer; long ones are cut."""
    batch: list[Extent] = []
    room = BUFFER_NBYTES
    for extent in extents:
        start = 0
        while start < extent.nbytes:
            nbytes = min(room, extent.nbytes - start)
            batch.append(Extent(extent.path, extent.offset + start, nbytes))
            start, room = start + nbytes, room - nbytes
            if not room:
                yield batch
                batch, room = [], BUFFER_NBYTES
    if batch:
        yield batch

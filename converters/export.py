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
from lmpack.decompression import Decompressor
from lmpack.drive import check_space, storage_errors, sync_path
from lmpack.errors import PackError, StorageError, UnsupportedError, UsageError
from lmpack.expert_key import ExpertKey
from lmpack.manifest import SHARED_FILE
from lmpack.pack import Pack, map_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from converters.copy_lanes import LentBuffer
    from lmpack.manifest import SourceFile, SourceSegment

PARTIAL_SUFFIX = ".partial"
_HASH_LANE, _WRITE_LANE = 0, 1


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What an export wrote."""

    path: Path
    files: tuple[str, ...]
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Form:
    """What compressed bytes are."""

    encoding: str
    dtype: str
    nbytes: int  # decompressed


@dataclass(frozen=True, slots=True)
class _Extent:
    """Bytes [offset, offset + nbytes) of a file of the pack."""

    path: Path
    offset: int
    nbytes: int
    form: _Form | None = None  # in a compressed pack, of a tensor


def export(
    pack: Pack | Path | str, dst: Path | str, *, progress: Callable[[int], None] | None = None
) -> ExportReport:
    """Write the source files of a pack into the folder dst; progress gets the number of bytes just read.

    Raises UnsupportedError for a pack that is not reproducible, UsageError when one of the files exists there, PackError when a file does not come out with the source's
    SHA-256 (nothing is left under its name then), StorageError when the drive refuses.
    """
    started = time.perf_counter()
    pack = pack if isinstance(pack, Pack) else Pack.open(pack)
    if not pack.manifest.reproducible:
        raise UnsupportedError(f"{pack.path}: cannot give its source back: {pack.manifest.reason}")
    dst = Path(dst)
    files = pack.manifest.source.files
    for file in files:
        for path in (dst / file.name, _partial(dst / file.name)):
            if os.path.lexists(path):
                raise UsageError(
                    f"{path}: exists, and export overwrites nothing; choose another folder or delete it"
                )
    nbytes = sum(file.nbytes for file in files)
    check_space(dst, nbytes, len(files))
    with CopyLanes(2) as lanes:
        for file in files:
            _export_file(pack, file, dst / file.name, lanes, progress or (lambda _: None))
    return ExportReport(dst, tuple(file.name for file in files), nbytes, time.perf_counter() - started)


def _partial(path: Path) -> Path:
    return path.with_name(path.name + PARTIAL_SUFFIX)


def _export_file(
    pack: Pack, file: SourceFile, path: Path, lanes: CopyLanes, progress: Callable[[int], None]
) -> None:
    digest, unfinished = hashlib.sha256(), _partial(path)
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.open("xb", buffering=0) as written:
            offset = 0
            fill = _fill_decompressed if pack.manifest.is_compressed else _fill_as_it_is
            for buffer, nbytes in fill(pack, file, lanes):
                view = buffer.view[:nbytes]
                lanes.give(_HASH_LANE, buffer, partial(digest.update, view))
                lanes.give(_WRITE_LANE, buffer, partial(_write_all, written.fileno(), view, offset))
                buffer.release()
                offset += nbytes
                progress(nbytes)
            lanes.drain()
            os.fsync(written.fileno())
        if digest.hexdigest() != file.sha256:
            unfinished.unlink()
            raise PackError(
                f"{path}: sha256 is {digest.hexdigest()[:12]}…, the source had {file.sha256[:12]}…; the pack is "
                f"damaged: run: lmpack validate {pack.path}"
            )
        unfinished.rename(path)
        sync_path(path.parent)


def _fill_as_it_is(pack: Pack, file: SourceFile, lanes: CopyLanes) -> Iterator[tuple[LentBuffer, int]]:
    """Yield buffers with a source file's bytes in file order, and how many each holds."""
    for extents in _batches(_extents(pack, file)):
        buffer = lanes.lend()
        nbytes = sum(extent.nbytes for extent in extents)
        _read_all(extents, buffer.view[:nbytes])
        yield buffer, nbytes


def _fill_decompressed(pack: Pack, file: SourceFile, lanes: CopyLanes) -> Iterator[tuple[LentBuffer, int]]:
    """Do the same for a compressed pack."""
    buffer, filled = lanes.lend(), 0
    for piece in _decompressed_pieces(pack, file):
        while piece.nbytes:
            taken = min(piece.nbytes, BUFFER_NBYTES - filled)
            buffer.view[filled : filled + taken] = piece[:taken]
            piece, filled = piece[taken:], filled + taken
            if filled == BUFFER_NBYTES:
                yield buffer, filled
                buffer, filled = lanes.lend(), 0
    yield buffer, filled


def _decompressed_pieces(pack: Pack, file: SourceFile) -> Iterator[memoryview]:
    """Yield a source file's bytes in file order; each piece is valid until the next."""
    decompressor = Decompressor()
    for extent in _extents(pack, file):
        end = extent.offset + extent.nbytes
        stored = map_file(extent.path, end)[extent.offset :].data
        if extent.form is None:
            yield stored
            continue
        try:
            yield from decompressor.pieces(
                stored, extent.form.encoding, extent.form.dtype, extent.form.nbytes
            )
        except PackError as error:
            raise PackError(f"{extent.path}: {error}; run: lmpack validate {pack.path}") from None


def _extents(pack: Pack, file: SourceFile) -> Iterator[_Extent]:
    """Say where the pack has each byte of a source file, in file order."""
    kept, kept_at, end = pack.kept_path(file), 0, 0
    for segment in file.segments:
        if gap := segment.offset - end:
            yield _Extent(kept, kept_at, gap)
            kept_at += gap
        yield from _segment_extents(pack, segment)
        end = segment.offset + segment.nbytes
    if end < file.nbytes:
        yield _Extent(kept, kept_at, file.nbytes - end)


def _segment_extents(pack: Pack, segment: SourceSegment) -> Iterator[_Extent]:
    kind, _, name = segment.tensor.partition(":")
    if kind == "shared":
        tensor = pack.manifest.tensor(name)
        if tensor.stored is None:
            yield _Extent(pack.path / SHARED_FILE, tensor.offset, tensor.nbytes)
        else:
            form = _Form(tensor.stored.encoding, tensor.dtype, tensor.nbytes)
            yield _Extent(pack.path / SHARED_FILE, tensor.stored.offset, tensor.stored.nbytes, form)
        return
    numbers, _, role = name.rpartition(":")
    layer, *one = (int(number) for number in numbers.split(":"))
    entry = pack.manifest.layer(layer)
    part = entry.part(role)
    position = entry.parts.index(part)
    for expert in one or range(entry.num_experts):
        path, stored = pack.expert_path(ExpertKey(layer, expert)), entry.experts[expert].stored
        if stored is None:
            yield _Extent(path, part.offset, part.nbytes)
        else:
            form = _Form(stored.parts[position].encoding, part.dtype, part.nbytes)
            yield _Extent(path, stored.offset(position), stored.parts[position].nbytes, form)


def _batches(extents: Iterator[_Extent]) -> Iterator[list[_Extent]]:
    """Group extents into lists that fill a buffer; long ones are cut."""
    batch: list[_Extent] = []
    room = BUFFER_NBYTES
    for extent in extents:
        start = 0
        while start < extent.nbytes:
            nbytes = min(room, extent.nbytes - start)
            batch.append(_Extent(extent.path, extent.offset + start, nbytes))
            start, room = start + nbytes, room - nbytes
            if not room:
                yield batch
                batch, room = [], BUFFER_NBYTES
    if batch:
        yield batch


def _read_all(extents: list[_Extent], view: memoryview) -> None:
    for extent in extents:
        with extent.path.open("rb", buffering=0) as opened:
            todo, offset = view[: extent.nbytes], extent.offset
            view = view[extent.nbytes :]
            while todo.nbytes:
                count = os.preadv(opened.fileno(), [todo], offset)
                if count == 0:
                    raise PackError(f"{extent.path}: ends at byte {offset}; it was truncated a moment ago")
                todo, offset = todo[count:], offset + count


def _write_all(descriptor: int, view: memoryview, offset: int) -> None:
    while view.nbytes:
        count = os.pwrite(descriptor, view, offset)
        if count == 0:
            raise StorageError("the drive took no bytes")
        view, offset = view[count:], offset + count

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
from lmpack.drive import check_space, storage_errors, sync_path
from lmpack.errors import PackError, StorageError, UsageError
from lmpack.expert_key import ExpertKey
from lmpack.manifest import SHARED_FILE
from lmpack.pack import Pack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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
class _Extent:
    """Bytes [offset, offset + nbytes) of a file of the pack."""

    path: Path
    offset: int
    nbytes: int


def export(
    pack: Pack | Path | str, dst: Path | str, *, progress: Callable[[int], None] | None = None
) -> ExportReport:
    """Write the source files of a pack into the folder dst; progress gets the number of bytes just read.

    Raises UsageError when one of them exists there, PackError when a file does not come out with the source's
    SHA-256 (nothing is left under its name then), StorageError when the drive refuses.
    """
    started = time.perf_counter()
    pack = pack if isinstance(pack, Pack) else Pack.open(pack)
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
            for extents in _batches(_extents(pack, file)):
                nbytes = sum(extent.nbytes for extent in extents)
                buffer = lanes.lend()
                view = buffer.view[:nbytes]
                _read_all(extents, view)
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
        yield _Extent(pack.path / SHARED_FILE, tensor.offset, tensor.nbytes)
        return
    numbers, _, role = name.rpartition(":")
    layer, *one = (int(number) for number in numbers.split(":"))
    entry = pack.manifest.layer(layer)
    part = entry.part(role)
    for expert in one or range(entry.num_experts):
        yield _Extent(pack.expert_path(ExpertKey(layer, expert)), part.offset, part.nbytes)


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

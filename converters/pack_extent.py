"""Extents: where a pack has each byte of its source files, and how they are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmpack.drive import read_into
from lmpack.errors import PackError
from lmpack.expert_key import ExpertKey
from lmpack.manifest import SHARED_FILE
from lmpack.pack import map_file

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from lmpack.decompression import Decompressor
    from lmpack.manifest import SourceFile, SourceSegment
    from lmpack.pack import Pack

PIECE_NBYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Form:
    """What compressed bytes are."""

    encoding: str
    dtype: str
    nbytes: int  # decompressed


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes [offset, offset + nbytes) of a file of the pack, or of one that it refers to."""

    path: Path
    offset: int
    nbytes: int
    form: Form | None = None  # in a compressed pack, of a tensor

    @property
    def source_nbytes(self) -> int:
        """How many bytes of the source file these are."""
        return self.nbytes if self.form is None else self.form.nbytes


def source_extents(pack: Pack, file: SourceFile) -> Iterator[Extent]:
    """Say where the pack has each byte of a source file, in file order."""
    kept, kept_at, end = pack.kept_path(file), 0, 0
    for segment in file.segments:
        if gap := segment.offset - end:
            yield Extent(kept, kept_at, gap)
            kept_at += gap
        if pack.reference is not None:
            yield Extent(pack.reference.paths[file.name], segment.offset, segment.nbytes)
        else:
            yield from _segment_extents(pack, segment)
        end = segment.offset + segment.nbytes
    if end < file.nbytes:
        yield Extent(kept, kept_at, file.nbytes - end)


def _segment_extents(pack: Pack, segment: SourceSegment) -> Iterator[Extent]:
    kind, _, name = segment.tensor.partition(":")
    if kind == "shared":
        tensor = pack.manifest.tensor(name)
        if tensor.stored is None:
            yield Extent(pack.path / SHARED_FILE, tensor.offset, tensor.nbytes)
        else:
            form = Form(tensor.stored.encoding, tensor.dtype, tensor.nbytes)
            yield Extent(pack.path / SHARED_FILE, tensor.stored.offset, tensor.stored.nbytes, form)
        return
    numbers, _, role = name.rpartition(":")
    layer, *one = (int(number) for number in numbers.split(":"))
    entry = pack.manifest.layer(layer)
    part = entry.part(role)
    position = entry.parts.index(part)
    for expert in one or range(entry.num_experts):
        path, stored = pack.expert_path(ExpertKey(layer, expert)), entry.experts[expert].stored
        if stored is None:
            yield Extent(path, part.offset, part.nbytes)
        else:
            form = Form(stored.parts[position].encoding, part.dtype, part.nbytes)
            yield Extent(path, stored.offset(position), stored.parts[position].nbytes, form)


def read_extents(extents: list[Extent], view: memoryview) -> None:
    """Fill view with extents that are not compressed; raises PackError when a file is shorter."""
    for extent in extents:
        with extent.path.open("rb", buffering=0) as opened:
            target = view[: extent.nbytes]
            count = read_into(target, opened.fileno(), extent.offset)
            if count < target.nbytes:
                raise PackError(
                    f"{extent.path}: ends at byte {extent.offset + count}; it was truncated a moment ago"
                )
            view = view[extent.nbytes :]


def extent_pieces(extent: Extent, decompressor: Decompressor) -> Iterator[memoryview]:
    """Yield the source's bytes of an extent, decompressed; each piece is valid until the next."""
    if extent.form is None:
        buffer = memoryview(bytearray(min(extent.nbytes, PIECE_NBYTES)))
        for start in range(0, extent.nbytes, PIECE_NBYTES):
            view = buffer[: min(PIECE_NBYTES, extent.nbytes - start)]
            read_extents([Extent(extent.path, extent.offset + start, view.nbytes)], view)
            yield view
        return
    stored = map_file(extent.path, extent.offset + extent.nbytes)[extent.offset :].data
    try:
        yield from decompressor.pieces(stored, extent.form.encoding, extent.form.dtype, extent.form.nbytes)
    except PackError as error:
        raise PackError(f"{extent.path}: {error}; run lmpack validate on the pack") from None

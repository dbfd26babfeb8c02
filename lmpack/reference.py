"""Reference: the source's files, in which a reference pack has its weights."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lmpack.drive import read_into, storage_errors
from lmpack.errors import PackError, StorageError
from lmpack.pack_files import Problem, open_regular
from lmpack.source_places import SourcePlaces

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from lmpack.expert_key import ExpertKey
    from lmpack.layer_entry import LayerEntry
    from lmpack.source_file import Source, SourceFile
    from lmpack.source_places import SourcePlace
    from lmpack.tensor_info import TensorInfo

CONVERT_AGAIN = "put the checkpoint back (a link to it will do), or convert it where it is: lmpack convert SRC DST --reference"
_MAGIC = {"gguf": (0, b"GGUF"), "safetensors": (8, b"{")}  # where every file of this kind has which bytes
_READ_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FileExtent:
    """Bytes [offset, offset + nbytes) of a file, which belong at byte `at` of an expert."""

    path: Path
    offset: int
    nbytes: int
    at: int
    file_nbytes: int  # of the whole file, to notice one that was truncated or replaced


def source_folder(pack: Path, source: Path) -> str:
    """Return how a manifest names a source's folder.

    Relative to the pack's, so that both can move together, unless they have nothing above them in common.
    """
    pack, source = Path(os.path.realpath(pack)), Path(os.path.realpath(source))
    apart = os.path.commonpath([pack.parent, source]) == "/"
    return source.as_posix() if apart else Path(os.path.relpath(source, pack)).as_posix()


class Reference:
    """The files that the pack in a folder refers to; nothing is read before it is asked for."""

    def __init__(self, pack: Path, source: Source) -> None:
        """Find the files; whether they are there, and the right ones, is for problems() to say."""
        folder = os.path.normpath(os.path.join(os.path.realpath(pack), source.folder))
        self._pack = pack
        self._kind = source.kind
        self._places = SourcePlaces(source)
        # a hub's cache has links to files elsewhere; what a pack of ours refers to is opened without following any
        self.paths = {
            file.name: Path(os.path.realpath(os.path.join(folder, file.name)))
            for file in source.files
            if file.segments
        }
        self._files = [file for file in source.files if file.segments]

    def expert(self, key: ExpertKey, layer: LayerEntry) -> tuple[FileExtent, ...]:
        """Return where each part of an expert lies."""
        return tuple(
            self._extent(self._places.part(key, part.role, part.nbytes), part.nbytes, part.offset)
            for part in layer.parts
        )

    def tensor(self, tensor: TensorInfo) -> FileExtent:
        """Return where a shared tensor that is not empty lies."""
        return self._extent(self._places.tensor(tensor.name), tensor.nbytes, 0)

    def read_expert(self, key: ExpertKey, layer: LayerEntry) -> bytes:
        """Return a whole expert with its padding; raises PackError or StorageError when it cannot be read."""
        whole = bytearray(layer.stride)
        for extent in self.expert(key, layer):
            read_extent(extent, memoryview(whole)[extent.at : extent.at + extent.nbytes])
        return bytes(whole)

    def problems(self, bad: Collection[str] = ()) -> Iterator[Problem]:
        """Yield each file that is missing, of another size or kind, or begins otherwise than the source did.

        So no pack can pass a file off as weights that is not a checkpoint whose header its maker knew. Kept files that
        are known to be bad say nothing of how the source began.
        """
        for file in self._files:
            try:
                message = self._wrong_with(file, compare=file.kept not in bad)
            except (PackError, StorageError) as error:
                message = str(error).removeprefix(f"{self.paths[file.name]}: ")
            if message:
                yield Problem(os.fspath(self.paths[file.name]), None, f"{message}; {CONVERT_AGAIN}")

    def _extent(self, place: SourcePlace | None, nbytes: int, at: int) -> FileExtent:
        assert place is not None  # the manifest was checked for it
        return FileExtent(self.paths[place.file.name], place.offset, nbytes, at, place.file.nbytes)

    def _wrong_with(self, file: SourceFile, *, compare: bool) -> str:
        path = self.paths[file.name]
        descriptor = open_regular(path)
        try:
            found_nbytes = os.fstat(descriptor).st_size
            if found_nbytes != file.nbytes:
                verb = "truncated" if found_nbytes < file.nbytes else "too long"
                return f"{verb}: {found_nbytes} bytes, expected {file.nbytes}"
            nbytes = file.segments[0].offset
            at, magic = _MAGIC[self._kind]
            with storage_errors(path):
                if nbytes < at + len(magic) or os.pread(descriptor, len(magic), at) != magic:
                    return f"is not a {self._kind} file"
                return self._wrong_with_header(descriptor, self._pack / file.kept, nbytes) if compare else ""
        finally:
            os.close(descriptor)

    def _wrong_with_header(self, descriptor: int, kept_path: Path, nbytes: int) -> str:
        kept = open_regular(kept_path)
        try:
            found, wanted = (memoryview(bytearray(_READ_NBYTES)) for _ in range(2))
            for start in range(0, nbytes, _READ_NBYTES):
                length = min(_READ_NBYTES, nbytes - start)
                read_into(found[:length], descriptor, start)
                if read_into(wanted[:length], kept, start) == length and found[:length] != wanted[:length]:
                    return "its header is not the one that the pack was made from"
            return ""
        finally:
            os.close(kept)


def read_extent(extent: FileExtent, view: memoryview) -> None:
    """Fill view with an extent's bytes; raises PackError when the file is shorter, StorageError when it fails."""
    descriptor = open_regular(extent.path)
    try:
        with storage_errors(extent.path):
            count = read_into(view, descriptor, extent.offset)
    finally:
        os.close(descriptor)
    if count < extent.nbytes:
        raise PackError(f"{extent.path}: ends at byte {extent.offset + count}; {CONVERT_AGAIN}")

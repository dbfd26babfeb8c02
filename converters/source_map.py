"""SourceMap: where the source has the bytes of each file of a pack."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmpack.errors import PackError
from lmpack.manifest import SHARED_FILE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lmpack.expert_key import ExpertKey
    from lmpack.manifest import Manifest, SourceFile
    from lmpack.validation import FileRange


@dataclass(frozen=True, slots=True)
class SourcePiece:
    """Bytes [offset, offset + nbytes) of a source file, which belong at byte `at` of a file of the pack."""

    file: str
    offset: int
    nbytes: int
    at: int


class SourceMap:
    """Looks up what the segments of a manifest's source say."""

    def __init__(self, manifest: Manifest) -> None:
        """Index the segments by what they hold."""
        self._manifest = manifest
        self._places = {
            segment.tensor: (file.name, segment.offset)
            for file in manifest.source.files
            for segment in file.segments
        }
        self._converted = {converted.tensor for converted in manifest.converted}
        self._kept = {file.kept: file for file in manifest.source.files}
        self._shared = {tensor.offset: tensor for tensor in manifest.shared}

    def pieces(self, item: FileRange) -> list[SourcePiece]:
        """Return what a range of a pack's file is made of, in its order; other bytes of the range are zero.

        Raises PackError when the source does not have it in this form.
        """
        if item.file in self._kept:
            return list(_unclaimed(self._kept[item.file]))
        if self._manifest.is_compressed:
            raise PackError("a compressed file cannot be made from the source; name another copy of the pack")
        if item.key is not None:
            return list(self._expert(item.key))
        assert item.file == SHARED_FILE
        tensor = self._shared[item.offset]
        return (
            [self._piece(f"shared:{tensor.name}", 0, tensor.nbytes, tensor.offset)] if tensor.nbytes else []
        )

    def _expert(self, key: ExpertKey) -> Iterator[SourcePiece]:
        for part in self._manifest.layer(key.layer).parts:
            single = f"expert:{key.layer}:{key.expert}:{part.role}"
            if single in self._places:
                yield self._piece(single, 0, part.nbytes, part.offset)
            else:
                stacked = f"experts:{key.layer}:{part.role}"
                yield self._piece(stacked, key.expert * part.nbytes, part.nbytes, part.offset)

    def _piece(self, tensor: str, start: int, nbytes: int, at: int) -> SourcePiece:
        if tensor in self._converted or tensor not in self._places:
            raise PackError(f"the source does not have {tensor} in this form; name another copy of the pack")
        file, offset = self._places[tensor]
        return SourcePiece(file, offset + start, nbytes, at)


def _unclaimed(file: SourceFile) -> Iterator[SourcePiece]:
    end = at = 0
    for segment in file.segments:
        if gap := segment.offset - end:
            yield SourcePiece(file.name, end, gap, at)
            at += gap
        end = segment.offset + segment.nbytes
    if end < file.nbytes:
        yield SourcePiece(file.name, end, file.nbytes - end, at)

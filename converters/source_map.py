"""SourceMap: what each file of a pack is made of, and where the source has it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from converters.repeated_conversion import RepeatedConversions
from lmpack.compression import TensorPlace
from lmpack.converted_tensor import part_name, shared_name
from lmpack.dtype import dtype_nbytes
from lmpack.errors import PackError
from lmpack.manifest import SHARED_FILE
from lmpack.source_places import SourcePlaces

if TYPE_CHECKING:
    from collections.abc import Iterator

    from converters.importance_matrix import ImportanceMatrix
    from converters.quantization import TensorConversion
    from lmpack.expert_key import ExpertKey
    from lmpack.manifest import LayerEntry, Manifest, SourceFile, TensorInfo
    from lmpack.source_places import SourcePlace
    from lmpack.validation import FileRange


@dataclass(frozen=True, slots=True)
class SourcePiece:
    """Bytes [offset, offset + nbytes) of a source file, which belong at byte `at` of a range, converted if so."""

    file: str
    offset: int
    nbytes: int
    at: int
    conversion: TensorConversion | None = None
    matrix: int = 0  # which one of the tensor's the bytes belong to


@dataclass(frozen=True, slots=True)
class RangeContents:
    """What a range of a pack's file holds before it is compressed: the pieces, and zeros between and after them."""

    pieces: tuple[SourcePiece, ...]
    nbytes: int
    sha256: str
    tensors: tuple[TensorPlace, ...] = ()  # as which it is compressed


class SourceMap:
    """Looks up what the segments of a manifest's source say."""

    def __init__(self, manifest: Manifest, imatrix: ImportanceMatrix | None = None) -> None:
        """Index the segments by what they hold; imatrix is what tensors may have been quantized with."""
        self._manifest = manifest
        self._conversions = RepeatedConversions(manifest, imatrix)
        self._places = SourcePlaces(manifest.source)
        self._kept = {file.kept: file for file in manifest.source.files}
        self._shared = {_place_in_file(tensor): tensor for tensor in manifest.shared}  # empty ones are alike

    def contents(self, item: FileRange) -> RangeContents:
        """Return what a range is made of; raises PackError when the source does not have it."""
        if item.file in self._kept:
            return RangeContents(tuple(_unclaimed(self._kept[item.file])), item.nbytes, item.sha256)
        if item.key is not None:
            layer = self._manifest.layer(item.key.layer)
            expert = layer.experts[item.key.expert]
            pieces = tuple(self._expert(layer, item.key))
            return RangeContents(
                pieces, expert.nbytes, expert.sha256, tuple(map(TensorPlace.of, layer.parts))
            )
        assert item.file == SHARED_FILE
        tensor = self._shared[item.offset, item.nbytes]
        place = TensorPlace.of(replace(tensor, offset=0))
        pieces = (self._tensor(tensor),) if tensor.nbytes else ()
        return RangeContents(pieces, tensor.nbytes, tensor.sha256, (place,))

    def _expert(self, layer: LayerEntry, key: ExpertKey) -> Iterator[SourcePiece]:
        for part in layer.parts:
            conversion = self._conversions.part(layer, part)
            nbytes = part.nbytes if conversion is None else dtype_nbytes(conversion.source_dtype, part.shape)
            place = self._places.part(key, part.role, nbytes)
            file, offset = _known(place, part_name(key.layer, part.role))
            yield SourcePiece(file, offset, nbytes, part.offset, conversion, key.expert)

    def _tensor(self, tensor: TensorInfo) -> SourcePiece:
        conversion = self._conversions.shared(tensor)
        nbytes = tensor.nbytes if conversion is None else dtype_nbytes(conversion.source_dtype, tensor.shape)
        file, offset = _known(self._places.tensor(tensor.name), shared_name(tensor.name))
        return SourcePiece(file, offset, nbytes, 0, conversion)


def _known(place: SourcePlace | None, tensor: str) -> tuple[str, int]:
    if place is None:
        raise PackError(f"the source does not have {tensor}; name another copy of the pack")
    return place.file.name, place.offset


def _place_in_file(tensor: TensorInfo) -> tuple[int, int]:
    where = tensor if tensor.stored is None else tensor.stored
    return where.offset, where.nbytes


def _unclaimed(file: SourceFile) -> Iterator[SourcePiece]:
    end = at = 0
    for segment in file.segments:
        if gap := segment.offset - end:
            yield SourcePiece(file.name, end, gap, at)
            at += gap
        end = segment.offset + segment.nbytes
    if end < file.nbytes:
        yield SourcePiece(file.name, end, file.nbytes - end, at)

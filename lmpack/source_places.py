"""SourcePlaces: where the source's files have each part of an expert and each shared tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmpack.converted_tensor import part_name, shared_name
from lmpack.expert_key import ExpertKey
from lmpack.strict_json import JsonError, shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmpack.layer_entry import LayerEntry
    from lmpack.source_file import Source, SourceFile
    from lmpack.tensor_info import TensorInfo


@dataclass(frozen=True, slots=True)
class SourcePlace:
    """Where bytes of a source file begin."""

    file: SourceFile
    offset: int


class SourcePlaces:
    """Looks up what the segments of a manifest's source say."""

    def __init__(self, source: Source) -> None:
        """Index the segments by what they hold."""
        self._places = {
            segment.tensor: SourcePlace(file, segment.offset)
            for file in source.files
            for segment in file.segments
        }

    def part(self, key: ExpertKey, role: str, nbytes: int) -> SourcePlace | None:
        """Return where a part of an expert begins, in a tensor of its own or in one of all experts, nbytes each."""
        place = self._places.get(f"expert:{key.layer}:{key.expert}:{role}")
        if place is not None:
            return place
        stacked = self._places.get(part_name(key.layer, role))
        return None if stacked is None else SourcePlace(stacked.file, stacked.offset + key.expert * nbytes)

    def tensor(self, name: str) -> SourcePlace | None:
        """Return where a shared tensor begins."""
        return self._places.get(shared_name(name))


def check_covered(source: Source, layers: Sequence[LayerEntry], shared: Sequence[TensorInfo]) -> None:
    """Raise JsonError when no segment of the source says where the bytes of a part or of a shared tensor are."""
    places = SourcePlaces(source)
    for layer in layers:
        for expert in range(layer.num_experts):
            for part in layer.parts:
                key = ExpertKey(layer.layer, expert)
                if places.part(key, part.role, part.nbytes) is None:
                    raise JsonError(f"expert {key}: no segment of the source is its {part.role}")
    for tensor in shared:
        if tensor.nbytes and places.tensor(tensor.name) is None:
            raise JsonError(f"shared tensor {shown(tensor.name)}: no segment of the source is it")

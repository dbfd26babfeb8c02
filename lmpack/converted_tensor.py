"""ConvertedTensor: a tensor whose bytes in the pack are not the source's, and how far they are from them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lmpack.dtype import dtype_nbytes
from lmpack.errors import UnsupportedError
from lmpack.strict_json import (
    JsonError,
    check_float,
    check_list,
    check_object,
    check_sha256,
    check_str,
    shown,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lmpack.layer_entry import LayerEntry
    from lmpack.tensor_info import TensorInfo

MAX_CONVERTED = 2_097_152
_KEYS = frozenset(
    {"tensor", "source_dtype", "library", "library_version", "imatrix_sha256", "relative_error"}
)


@dataclass(frozen=True, slots=True)
class ConvertedTensor:
    """What was done to one tensor; its dtype in the pack stands where the tensor does."""

    tensor: str  # "shared:NAME", or "experts:LAYER:ROLE" for that part of all experts of the layer
    source_dtype: str
    library: str
    library_version: str
    imatrix_sha256: str  # of the importance matrix' file; empty when there was none
    relative_error: float  # largest, over the rows, of a row's largest error / its largest magnitude

    def to_json(self) -> dict[str, object]:
        """Give the conversion as the manifest spells it."""
        return {
            "tensor": self.tensor,
            "source_dtype": self.source_dtype,
            "library": self.library,
            "library_version": self.library_version,
            "imatrix_sha256": self.imatrix_sha256,
            "relative_error": self.relative_error,
        }


def parse_converted(
    value: object, layers: Sequence[LayerEntry], shared: Sequence[TensorInfo]
) -> tuple[ConvertedTensor, ...]:
    """Check the manifest's "converted": each names a tensor of the pack once, in the order of layers and shared."""
    places = {name: place for place, name in enumerate(_tensor_shapes(layers, shared))}
    found: list[ConvertedTensor] = []
    last = -1
    for item in check_list(value, "converted", longest=MAX_CONVERTED):
        at = f"converted tensor {len(found)}"
        fields = check_object(item, _KEYS, at)
        name = check_str(fields["tensor"], f"{at} tensor", longest=1024)
        place = places.get(name, -1)
        if place <= last:
            raise JsonError(f"{at}: {shown(name)} is not in the pack, stands twice, or is out of order")
        last = place
        imatrix_sha256 = fields["imatrix_sha256"]
        relative_error = check_float(fields["relative_error"], f"{at} relative_error")
        if relative_error < 0:
            raise JsonError(f"{at} relative_error: expected at least 0, got {relative_error}")
        found.append(
            ConvertedTensor(
                name,
                check_str(fields["source_dtype"], f"{at} source_dtype", longest=32),
                check_str(fields["library"], f"{at} library", longest=64),
                check_str(fields["library_version"], f"{at} library_version", longest=64),
                imatrix_sha256 and check_sha256(imatrix_sha256, f"{at} imatrix_sha256"),
                relative_error,
            )
        )
    return tuple(found)


def as_in_source(
    layers: Sequence[LayerEntry], shared: Sequence[TensorInfo], converted: Sequence[ConvertedTensor]
) -> tuple[Sequence[LayerEntry], dict[str, int]]:
    """Return the layers, and the sizes of the shared tensors, as they were before conversion."""
    shared_nbytes = {tensor.name: tensor.nbytes for tensor in shared}
    if not converted:
        return layers, shared_nbytes
    shapes = _tensor_shapes(layers, shared)
    nbytes = {}
    for entry in converted:
        try:
            nbytes[entry.tensor] = dtype_nbytes(entry.source_dtype, shapes[entry.tensor])
        except UnsupportedError as error:
            raise JsonError(f"converted tensor {shown(entry.tensor)} source_dtype: {error}") from None
    before = [
        replace(
            layer,
            parts=tuple(
                replace(part, nbytes=nbytes.get(part_name(layer.layer, part.role), part.nbytes))
                for part in layer.parts
            ),
        )
        for layer in layers
    ]
    return before, {name: nbytes.get(shared_name(name), size) for name, size in shared_nbytes.items()}


def part_name(layer: int, role: str) -> str:
    """Return how manifests name one part of all experts of a layer."""
    return f"experts:{layer}:{role}"


def shared_name(name: str) -> str:
    """Return how manifests name a shared tensor."""
    return f"shared:{name}"


def _tensor_shapes(
    layers: Sequence[LayerEntry], shared: Sequence[TensorInfo]
) -> Mapping[str, tuple[int, ...]]:
    """Name every tensor of a pack, in its order, with its shape (of a part: one expert's)."""
    shapes = {part_name(layer.layer, part.role): part.shape for layer in layers for part in layer.parts}
    shapes.update((shared_name(tensor.name), tensor.shape) for tensor in shared)
    return shapes

"""PackDiff: in which experts and tensors two packs differ, and by how much once both are numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from converters.tensor_values import tensor_values
from lmpack.dtype import dtype_nbytes
from lmpack.expert_key import ExpertKey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from lmpack.layer_entry import ExpertPart, LayerEntry
    from lmpack.pack import Pack
    from lmpack.tensor_info import TensorInfo

CHUNK_ELEMENTS = 1 << 20  # a multiple of every block, so that memory stays flat whatever the tensor

Form: TypeAlias = tuple[str, tuple[int, ...]]  # dtype, shape
Read: TypeAlias = "Callable[[], NDArray[np.uint8]]"


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor that is not the same in both packs; a form is None where the pack has no such tensor.

    The errors compare b with a: the largest absolute one, and sqrt(sum (b - a)^2 / sum a^2). They are None when the
    shapes differ, when the numbers are not finite or big-endian, or when a dtype cannot be turned into numbers.
    """

    key: ExpertKey | None  # of a routed expert
    name: str  # the role of an expert's part, otherwise the tensor's name
    a: Form | None
    b: Form | None
    max_error: float | None = None
    relative_error: float | None = None


@dataclass(frozen=True, slots=True)
class PackDiff:
    """How two packs differ; page size and compression make no difference."""

    tensors: tuple[TensorDifference, ...]  # experts by layer, then shared tensors
    config_keys: tuple[str, ...]  # with another value, or in one pack only; "architecture" is among them
    source_files: tuple[
        str, ...
    ]  # whose rest (metadata, tokenizer) is another one, or which one pack only has

    @property
    def equal(self) -> bool:
        """Whether there is nothing to tell."""
        return not (self.tensors or self.config_keys or self.source_files)


def diff_packs(a: Pack, b: Pack, *, progress: Callable[[int], None] | None = None) -> PackDiff:
    """Compare two packs; progress gets the number of experts and shared tensors just compared.

    What has the same checksum in both manifests is not read.
    """
    tick = progress or (lambda _: None)
    tensors = [*_expert_differences(a, b, tick), *_shared_differences(a, b, tick)]
    if any(pack.manifest.config.get("byte_order") == "big" for pack in (a, b)):
        tensors = [replace(tensor, max_error=None, relative_error=None) for tensor in tensors]
    config_a, config_b = ({"architecture": p.manifest.architecture, **p.manifest.config} for p in (a, b))
    keys = sorted(key for key in config_a | config_b if config_a.get(key) != config_b.get(key))
    kept_a, kept_b = ({file.kept_sha256: file.name for file in p.manifest.source.files} for p in (a, b))
    files = {(kept_a | kept_b)[sha256] for sha256 in kept_a.keys() ^ kept_b.keys()}
    return PackDiff(tuple(tensors), tuple(keys), tuple(sorted(files)))


def _expert_differences(a: Pack, b: Pack, tick: Callable[[int], None]) -> Iterator[TensorDifference]:
    layers_a, layers_b = ({entry.layer: entry for entry in pack.manifest.layers} for pack in (a, b))
    for layer in sorted(layers_a.keys() | layers_b.keys()):
        entry_a, entry_b = layers_a.get(layer), layers_b.get(layer)
        num_experts = max(entry.num_experts for entry in (entry_a, entry_b) if entry is not None)
        same_layout = entry_a is not None and entry_b is not None and entry_a.parts == entry_b.parts
        for number in range(num_experts):
            key = ExpertKey(layer, number)
            has_a, has_b = (e is not None and number < e.num_experts for e in (entry_a, entry_b))
            if not (has_a and has_b and same_layout and _sha256(entry_a, number) == _sha256(entry_b, number)):
                yield from _part_differences(
                    key, (a, entry_a if has_a else None), (b, entry_b if has_b else None)
                )
            tick(1)


def _sha256(entry: LayerEntry | None, number: int) -> str | None:
    return None if entry is None else entry.experts[number].sha256


def _part_differences(
    key: ExpertKey, a: tuple[Pack, LayerEntry | None], b: tuple[Pack, LayerEntry | None]
) -> Iterator[TensorDifference]:
    parts_a, parts_b = ({part.role: part for part in entry.parts} if entry else {} for _, entry in (a, b))
    raw_a, raw_b = (
        np.frombuffer(pack.read_expert(key), np.uint8) if entry else np.empty(0, np.uint8)
        for pack, entry in (a, b)
    )
    for role in parts_a | parts_b:
        difference = _difference(
            key,
            role,
            _part(parts_a.get(role), raw_a),
            _part(parts_b.get(role), raw_b),
        )
        if difference is not None:
            yield difference


def _part(part: ExpertPart | None, raw: NDArray[np.uint8]) -> tuple[Form, Read] | None:
    if part is None:
        return None
    return (part.dtype, part.shape), lambda: raw[part.offset : part.offset + part.nbytes]


def _shared_differences(a: Pack, b: Pack, tick: Callable[[int], None]) -> Iterator[TensorDifference]:
    tensors_a, tensors_b = ({tensor.name: tensor for tensor in pack.manifest.shared} for pack in (a, b))
    for name in tensors_a | tensors_b:
        tensor_a, tensor_b = tensors_a.get(name), tensors_b.get(name)
        if tensor_a is None or tensor_b is None or _identity(tensor_a) != _identity(tensor_b):
            difference = _difference(None, name, _shared(a, tensor_a), _shared(b, tensor_b))
            if difference is not None:
                yield difference
        tick(1)


def _identity(tensor: TensorInfo) -> tuple[str, tuple[int, ...], str]:
    return tensor.dtype, tensor.shape, tensor.sha256


def _shared(pack: Pack, tensor: TensorInfo | None) -> tuple[Form, Read] | None:
    if tensor is None:
        return None
    return (tensor.dtype, tensor.shape), lambda: pack.read_tensor(tensor.name)


def _difference(
    key: ExpertKey | None, name: str, a: tuple[Form, Read] | None, b: tuple[Form, Read] | None
) -> TensorDifference | None:
    """Return how two tensors differ, None when they do not."""
    if a is None or b is None:
        return TensorDifference(key, name, a[0] if a else None, b[0] if b else None)
    (form_a, read_a), (form_b, read_b) = a, b
    if form_a[1] != form_b[1]:
        return TensorDifference(key, name, form_a, form_b)
    raw_a, raw_b = read_a(), read_b()
    if form_a == form_b and np.array_equal(raw_a, raw_b):
        return None
    max_error, relative_error = _errors(raw_a, form_a, raw_b, form_b)
    return TensorDifference(key, name, form_a, form_b, max_error, relative_error)


def _errors(
    raw_a: NDArray[np.uint8], form_a: Form, raw_b: NDArray[np.uint8], form_b: Form
) -> tuple[float | None, float | None]:
    """Return the largest absolute and the relative error of b, chunk by chunk in double precision."""
    num_elements = int(np.prod(form_a[1], dtype=np.int64))
    largest = squared_error = squared = 0.0
    for start in range(0, num_elements, CHUNK_ELEMENTS):
        stop = min(num_elements, start + CHUNK_ELEMENTS)
        values = []
        for raw, (dtype, _) in ((raw_a, form_a), (raw_b, form_b)):
            first, last = dtype_nbytes(dtype, (start,)), dtype_nbytes(dtype, (stop,))
            found = tensor_values(raw[first:last], dtype)
            if found is None:
                return None, None
            values.append(found)
        difference = values[1] - values[0]
        largest = max(largest, float(np.max(np.abs(difference), initial=0.0)))
        squared_error += float(difference @ difference)
        squared += float(values[0] @ values[0])
        if not np.isfinite(squared_error + squared):
            return None, None
    if squared == 0.0:
        return largest, None if squared_error else 0.0
    return largest, float(np.sqrt(squared_error / squared))

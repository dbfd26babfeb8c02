"""ConversionPlan: where every byte of a checkpoint goes, decided before anything is written."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

from converters.tensor_role import SharedTensor, SinglePart, StackedPart, TensorRole
from lmpack.dtype import dtype_nbytes
from lmpack.errors import CheckpointError, ManifestError, UnsupportedError
from lmpack.expert_key import ExpertKey
from lmpack.layer_entry import MAX_EXPERTS_PER_LAYER, ExpertEntry, LayerEntry, lay_out_parts
from lmpack.manifest import Manifest
from lmpack.source_file import Source, SourceFile, SourceSegment, kept_path_of
from lmpack.storage import RAW_STORAGE, REFERENCE_STORAGE
from lmpack.tensor_info import lay_out_shared

if TYPE_CHECKING:
    from collections.abc import Iterator

    from converters.checkpoint import Checkpoint, CheckpointTensor
    from converters.model_config import ModelDescription
    from lmpack.converted_tensor import ConvertedTensor

MAX_REST_NBYTES = 256 << 20  # headers take up to 100 MB; more that no tensor claims is no checkpoint
CONVERTED_REASON = "tensors were quantized"
_NO_HASH = "0" * 64

PartLayout: TypeAlias = tuple[str, str, tuple[int, ...]]  # role, dtype, shape


@dataclass(frozen=True, slots=True)
class PartPiece:
    """One whole part of one expert."""

    layer: int
    expert: int
    role: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class SharedPiece:
    """Some bytes of a shared tensor; start counts from the tensor's first byte."""

    name: str
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class RestPiece:
    """Bytes that no tensor claims: a header, padding; start counts from the first of them in the file."""

    start: int
    nbytes: int


Piece: TypeAlias = PartPiece | SharedPiece | RestPiece


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """The experts of a layer; parts in the order in which the source holds them."""

    num_experts: int
    parts: tuple[PartLayout, ...]


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One source file: its tensors in file order, and the segments that they are for the manifest."""

    nbytes: int
    tensors: tuple[tuple[CheckpointTensor, TensorRole], ...]
    segments: tuple[SourceSegment, ...]

    def pieces(self, max_nbytes: int) -> Iterator[Piece]:
        """Cut the whole file, first byte to last, into pieces of at most max_nbytes; only parts may be longer."""
        end = rest = 0
        for tensor, role in self.tensors:
            yield from _rest(rest, tensor.offset - end, max_nbytes)
            rest += tensor.offset - end
            end = tensor.offset + tensor.nbytes
            if isinstance(role, SharedTensor):
                step = _whole_rows(tensor, max_nbytes)
                for start in range(0, tensor.nbytes, step):
                    yield SharedPiece(role.name, start, min(step, tensor.nbytes - start))
            elif isinstance(role, SinglePart):
                yield PartPiece(role.layer, role.expert, role.role, tensor.nbytes)
            else:
                part_nbytes = tensor.nbytes // role.num_experts
                for expert in range(role.num_experts):
                    yield PartPiece(role.layer, expert, role.role, part_nbytes)
        yield from _rest(rest, self.nbytes - end, max_nbytes)


@dataclass(frozen=True, slots=True)
class ConversionPlan:
    """The whole conversion; files as in the checkpoint."""

    layers: dict[int, LayerPlan]
    shared: tuple[PartLayout, ...]  # name, dtype, shape
    files: tuple[FilePlan, ...]

    @property
    def kept_nbytes(self) -> int:
        """The bytes of the source that no tensor covers."""
        return sum(file.nbytes - sum(segment.nbytes for segment in file.segments) for file in self.files)

    @property
    def largest_part_nbytes(self) -> int:
        """The longest piece that has to be in memory at once."""
        return max((part.nbytes for file in self.files for part in _parts(file)), default=0)


def plan_conversion(checkpoint: Checkpoint) -> ConversionPlan:
    """Give every tensor its place; raises CheckpointError when a layer's experts are not complete or not alike."""
    layers: dict[int, _LayerDraft] = {}
    shared: dict[str, PartLayout] = {}
    of_file: list[list[tuple[CheckpointTensor, TensorRole]]] = [[] for _ in checkpoint.files]
    for tensor, role in zip(checkpoint.tensors, checkpoint.roles(), strict=True):
        of_file[tensor.file].append((tensor, role))
        if isinstance(role, SharedTensor):
            if role.name in shared:
                raise CheckpointError(f"{checkpoint.path}: two tensors are both {role.name}")
            shared[role.name] = (role.name, tensor.dtype, tensor.shape)
        else:
            if tensor.nbytes == 0:
                raise CheckpointError(
                    f"{checkpoint.path}: tensor {tensor.name} belongs to experts but is empty"
                )
            layers.setdefault(role.layer, _LayerDraft(role.layer)).add(tensor, role)
    files = []
    for file, tensors in zip(checkpoint.files, of_file, strict=True):
        segments = tuple(
            SourceSegment(tensor.offset, tensor.nbytes, _segment_name(role))
            for tensor, role in tensors
            if tensor.nbytes
        )
        plan = FilePlan(file.nbytes, tuple(tensors), segments)
        rest = file.nbytes - sum(segment.nbytes for segment in segments)
        if tensors and rest > MAX_REST_NBYTES:
            raise CheckpointError(
                f"{file.path}: no tensor claims {rest} of its bytes, expected at most {MAX_REST_NBYTES}; "
                "it is damaged, or holds something else besides a model"
            )
        files.append(plan)
    finished = {layer: layers[layer].finish(str(checkpoint.path)) for layer in sorted(layers)}
    return ConversionPlan(finished, tuple(shared.values()), tuple(files))


def check_packable(
    checkpoint: Checkpoint,
    plan: ConversionPlan,
    description: ModelDescription,
    page_size: int,
    converted: tuple[ConvertedTensor, ...] = (),
    folder: str = "",
) -> Manifest:
    """Write the manifest with empty hashes, read it back and return it; raises CheckpointError for what it cannot hold.

    A folder is that of the source, for a reference pack. So a name or a number that the format refuses is found before
    the first byte is copied, not after the last.
    """
    layers = []
    for layer, experts in plan.layers.items():
        parts, stride = lay_out_parts(experts.parts, page_size)
        keys = (ExpertKey(layer, expert) for expert in range(experts.num_experts))
        layers.append(
            LayerEntry(layer, parts, stride, tuple(ExpertEntry(k.file, stride, _NO_HASH) for k in keys))
        )
    shared, shared_nbytes = lay_out_shared(plan.shared, page_size)
    files = [
        SourceFile(
            name=file.name,
            nbytes=file.nbytes,
            sha256=_NO_HASH,
            kept=kept_path_of(file.name, has_segments=bool(todo.segments)),
            kept_nbytes=file.nbytes - sum(segment.nbytes for segment in todo.segments),
            kept_sha256=_NO_HASH,
            segments=todo.segments,
        )
        for file, todo in zip(checkpoint.files, plan.files, strict=True)
    ]
    draft = Manifest(
        page_size=page_size,
        architecture=description.architecture,
        config=description.config,
        layers=tuple(layers),
        shared=tuple(replace(tensor, sha256=_NO_HASH) for tensor in shared),
        shared_nbytes=shared_nbytes,
        source=Source(checkpoint.kind, tuple(files), folder),
        reproducible=not converted,
        reason=CONVERTED_REASON if converted else "",
        pack_id="",
        storage=REFERENCE_STORAGE if folder else RAW_STORAGE,
        converted=converted,
    )
    try:
        return Manifest.parse(draft.to_bytes(), checkpoint.path)
    except ManifestError as error:
        raise CheckpointError(f"{error} (a pack cannot hold this)") from error


@dataclass(slots=True)
class _LayerDraft:
    """What has been seen of a layer's experts."""

    layer: int
    layouts: dict[str, PartLayout] = field(default_factory=dict)
    experts: dict[str, set[int]] = field(default_factory=dict)
    first_name: dict[str, str] = field(default_factory=dict)

    def add(self, tensor: CheckpointTensor, role: StackedPart | SinglePart) -> None:
        num_experts = role.num_experts if isinstance(role, StackedPart) else role.expert + 1
        if num_experts > MAX_EXPERTS_PER_LAYER:
            raise UnsupportedError(
                f"layer {self.layer}: {tensor.name} makes {num_experts} experts, a layer has at most "
                f"{MAX_EXPERTS_PER_LAYER}"
            )
        try:
            dtype_nbytes(tensor.dtype, role.shape)
        except UnsupportedError as error:
            raise UnsupportedError(
                f"layer {self.layer}: {tensor.name} cannot be cut into experts: {error}"
            ) from error
        layout = (role.role, tensor.dtype, role.shape)
        known = self.layouts.setdefault(role.role, layout)
        first = self.first_name.setdefault(role.role, tensor.name)
        if known != layout:
            raise UnsupportedError(
                f"layer {self.layer}: {tensor.name} is {tensor.dtype} {list(role.shape)}, {first} is {known[1]} "
                f"{list(known[2])}; all experts of a layer must have one layout"
            )
        added = range(role.num_experts) if isinstance(role, StackedPart) else (role.expert,)
        experts = self.experts.setdefault(role.role, set())
        if not experts.isdisjoint(added):
            raise CheckpointError(
                f"layer {self.layer}: {tensor.name} and {first} are both {role.role!r} of one expert"
            )
        experts.update(added)

    def finish(self, where: str) -> LayerPlan:
        num_experts = max(max(experts) for experts in self.experts.values()) + 1
        for role, experts in self.experts.items():
            if len(experts) < num_experts:
                absent = next(expert for expert in range(num_experts) if expert not in experts)
                raise CheckpointError(
                    f"{where}: layer {self.layer} has {num_experts} experts, but expert {absent} has no {role!r} "
                    f"(such as {self.first_name[role]}); a file is missing or damaged"
                )
        return LayerPlan(num_experts, tuple(self.layouts.values()))


def _segment_name(role: TensorRole) -> str:
    if isinstance(role, SharedTensor):
        return f"shared:{role.name}"
    if isinstance(role, StackedPart):
        return f"experts:{role.layer}:{role.role}"
    return f"expert:{role.layer}:{role.expert}:{role.role}"


def _whole_rows(tensor: CheckpointTensor, max_nbytes: int) -> int:
    """Return the most bytes, at most max_nbytes, that are whole rows of a matrix; max_nbytes when a row is longer."""
    num_rows = math.prod(tensor.shape[:-1])
    row_nbytes = tensor.nbytes // num_rows if num_rows and not tensor.nbytes % num_rows else max_nbytes
    return max_nbytes // row_nbytes * row_nbytes or max_nbytes if row_nbytes else max_nbytes


def _rest(first: int, nbytes: int, max_nbytes: int) -> Iterator[RestPiece]:
    for start in range(0, nbytes, max_nbytes):
        yield RestPiece(first + start, min(max_nbytes, nbytes - start))


def _parts(file: FilePlan) -> Iterator[PartPiece]:
    for tensor, role in file.tensors:
        if isinstance(role, StackedPart):
            yield PartPiece(role.layer, 0, role.role, tensor.nbytes // role.num_experts)
        elif isinstance(role, SinglePart):
            yield PartPiece(role.layer, role.expert, role.role, tensor.nbytes)

"""The sorting rule: what a tensor is, told from its name and shape alone.

Every tensor is claimed as a part of routed experts (stacked in one tensor, or one expert's own) or as
shared. The rule is complete: a name that speaks of experts and fits no line here is an error, because a
weight silently taken for shared would be kept in memory or missed at run time. It needs no table of
architectures, so models that nobody has heard of yet can be packed.

GGUF names are llama.cpp's (src/llama-arch.cpp); those of HF are the modules' names in transformers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from lmpack.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class SharedTensor:
    """A tensor every token needs."""

    name: str


@dataclass(frozen=True, slots=True)
class StackedPart:
    """One part of all experts of a layer, expert 0 first; shape is one expert's."""

    layer: int
    role: str
    num_experts: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SinglePart:
    """One part of one expert, in a tensor of its own."""

    layer: int
    expert: int
    role: str
    shape: tuple[int, ...]


TensorRole: TypeAlias = SharedTensor | StackedPart | SinglePart

Named: TypeAlias = "tuple[str, tuple[int, ...]]"  # name, shape in numpy order

_GGUF_STACKED = re.compile(r"blk\.([0-9]{1,6})\.ffn_(gate|up|down|gate_up)_exps\.(\w+(?:\.\w+)*)")
_GGUF_SINGLE = re.compile(r"blk\.([0-9]{1,6})\.ffn_(gate|up|down|gate_up)\.([0-9]{1,6})\.(\w+(?:\.\w+)*)")
# arctic's norm before its experts; grovemoe's chunk experts, which several routed experts have in common
_GGUF_SHARED = re.compile(r"blk\.[0-9]+\.(ffn_norm_exps|ffn_(gate|up|down)_chexps)\.\w+")


def sort_gguf_tensors(tensors: Sequence[Named], where: str) -> list[TensorRole]:
    """Say what each GGUF tensor is; raises CheckpointError naming one that no line claims."""
    stacked = [_GGUF_STACKED.fullmatch(name) for name, _ in tensors]
    num_experts: dict[int, int] = {}
    for match, (name, shape) in zip(stacked, tensors, strict=True):
        if match and match[3] == "weight":
            # ggml drops trailing dimensions of 1, so a stack of one expert may come as a matrix
            count = shape[0] if len(shape) >= 3 else 1
            _agree(num_experts, int(match[1]), count, name, where)
    return [
        _gguf_role(name, shape, match, num_experts, where)
        for match, (name, shape) in zip(stacked, tensors, strict=True)
    ]


def _gguf_role(
    name: str,
    shape: tuple[int, ...],
    stacked: re.Match[str] | None,
    num_experts: Mapping[int, int],
    where: str,
) -> TensorRole:
    if stacked:
        layer, role = int(stacked[1]), _role(stacked[2], stacked[3].replace(".", "_"))
        return _stacked_role(name, shape, layer, role, num_experts.get(layer), where)
    if single := _GGUF_SINGLE.fullmatch(name):
        return SinglePart(
            int(single[1]), int(single[3]), _role(single[2], single[4].replace(".", "_")), shape
        )
    if "exps" in name and not _GGUF_SHARED.fullmatch(name):
        raise _unclaimed(name, shape, where)
    return SharedTensor(name)


# module names of projections inside an expert -> our role
_HF_PROJECTIONS = {
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "gate_up_proj": "gate_up",
    "w1": "gate",
    "w3": "up",
    "w2": "down",
    "v1": "up",
    "input_linear": "gate_up",
    "output_linear": "down",
    "fc1": "up",
    "fc2": "down",
    "linear_fc1": "up",
    "linear_fc2": "down",
    "wi": "up",
    "wo": "down",
}
# longest first, so that gate_up_proj_bias is not taken for gate
_HF_FUSED = re.compile("(" + "|".join(sorted(_HF_PROJECTIONS, key=len, reverse=True)) + r")(?:_(\w+))?")
_NUMBER = re.compile("[0-9]{1,6}")  # of a layer or an expert
_HF_MOE_MODULES = frozenset({"moe", "block_sparse_moe"})
_NOT_ROUTED = re.compile(r"share\w*_experts|chunk_experts")
_AUXILIARY_STACK = re.compile(r"(^|\.)(mtp|nextn|vision|visual|audio|encoder)\w*(\.|$)")


@dataclass(frozen=True, slots=True)
class _HFExpertName:
    """A name cut at its experts module: stack "model.layers", layer 3, expert 7 or None, the rest."""

    stack: str
    layer: int
    expert: int | None
    rest: tuple[str, ...]


def sort_hf_tensors(
    tensors: Sequence[Named],
    where: str,
    *,
    num_hidden_layers: int = 0,
    num_experts: int | None = None,
) -> list[TensorRole]:
    """Say what each tensor with a transformers name is; raises CheckpointError naming an unclaimed one.

    Shared tensors keep their names here.
    A second stack of layers (a multi-token-prediction head, an encoder) gets the numbers after the
    first one's, as in llama.cpp. num_experts is the config's, needed where experts lie flat in a matrix.
    """
    cut = [_cut_hf_name(name, shape, where) for name, shape in tensors]
    first_layer = _number_stacks([found for found in cut if found], num_hidden_layers)
    counts: dict[tuple[str, int], int] = {}
    for found, (name, shape) in zip(cut, tensors, strict=True):
        if found and found.expert is None and len(shape) >= 3:
            _agree(counts, (found.stack, found.layer), shape[0], name, where)
    roles: list[TensorRole] = []
    for found, (name, shape) in zip(cut, tensors, strict=True):
        if found is None:
            roles.append(SharedTensor(name))
            continue
        layer = first_layer[found.stack] + found.layer
        if found.expert is not None:
            roles.append(SinglePart(layer, found.expert, _hf_role(found.rest), shape))
            continue
        count = counts.get((found.stack, found.layer))
        if count is None and num_experts and found.rest[0] == "mlp" and shape and shape[0] % num_experts == 0:
            count, shape = num_experts, (num_experts, shape[0] // num_experts, *shape[1:])  # dbrx
        roles.append(_stacked_role(name, shape, layer, _hf_role(found.rest), count, where))
    return roles


def _cut_hf_name(name: str, shape: tuple[int, ...], where: str) -> _HFExpertName | None:
    words = name.split(".")
    at = next((i for i, word in enumerate(words) if word.endswith("experts")), None)
    if at is None:
        # granite and step keep stacked projections directly in the MoE module
        for i, word in enumerate(words[:-1]):
            if word in _HF_MOE_MODULES and words[i + 1] in _HF_PROJECTIONS and len(shape) >= 3:
                at = i
    elif _NOT_ROUTED.fullmatch(words[at]):
        return None
    if at is None:
        return None
    rest = words[at + 1 :]
    if any("norm" in word for word in rest):
        return None
    layer_at = next((i for i in range(at - 1, -1, -1) if _NUMBER.fullmatch(words[i])), None)
    if layer_at is None or not rest:
        raise _unclaimed(name, shape, where)
    number = rest[0].removeprefix("expert_")
    is_numbered = _NUMBER.fullmatch(number) is not None and len(rest) > 1
    return _HFExpertName(
        stack=".".join(words[:layer_at]),
        layer=int(words[layer_at]),
        expert=int(number) if is_numbered else None,
        rest=tuple(rest[1:] if is_numbered else rest),
    )


def _number_stacks(names: Sequence[_HFExpertName], num_hidden_layers: int) -> dict[str, int]:
    """Give each stack the number of its first layer: the main stack 0, the others after it."""
    depth: dict[str, int] = {}
    for name in names:
        depth[name.stack] = max(depth.get(name.stack, 0), name.layer + 1)
    first: dict[str, int] = {}
    taken = 0
    for stack in sorted(depth, key=lambda stack: (bool(_AUXILIARY_STACK.search(stack)), stack)):
        is_main = not first and not _AUXILIARY_STACK.search(stack)
        first[stack] = 0 if is_main else max(taken, num_hidden_layers)
        taken = first[stack] + depth[stack]
    return first


def _hf_role(rest: Sequence[str]) -> str:
    words = [word for word in rest if word not in ("mlp", "weight")] or list(rest)
    fused = _HF_FUSED.fullmatch(words[0])
    if fused is None:
        return re.sub(r"[^a-z0-9_]", "_", "_".join(words).lower())
    suffix = "_".join(filter(None, (fused[2], *words[1:])))
    return _role(_HF_PROJECTIONS[fused[1]], suffix or "weight")


def _role(projection: str, suffix: str) -> str:
    return projection if suffix == "weight" else f"{projection}_{suffix.lower()}"


def _stacked_role(
    name: str, shape: tuple[int, ...], layer: int, role: str, num_experts: int | None, where: str
) -> TensorRole:
    if num_experts is None:
        raise _unclaimed(name, shape, where)
    if num_experts == 1 and (not shape or shape[0] != 1):
        return StackedPart(layer, role, 1, shape)
    if shape and shape[0] == num_experts:
        return StackedPart(layer, role, num_experts, shape[1:])
    if shape in ((), (1,)):
        return SharedTensor(name)  # one scale for all experts of the layer
    raise CheckpointError(
        f"{where}: tensor {name} of shape {list(shape)} belongs to experts, but layer {layer} has "
        f"{num_experts} of them, expected [{num_experts}, ...]; the checkpoint is damaged or of an unknown layout"
    )


def _agree(
    counts: dict[int, int] | dict[tuple[str, int], int], key: object, count: int, name: str, where: str
) -> None:
    known = counts.setdefault(key, count)  # type: ignore[arg-type]
    if known != count:
        raise CheckpointError(
            f"{where}: tensor {name} stacks {count} experts, another tensor of its layer {known}"
        )


def _unclaimed(name: str, shape: tuple[int, ...], where: str) -> CheckpointError:
    return CheckpointError(
        f"{where}: tensor {name} of shape {list(shape)} speaks of experts in a way that lmpack does not know; "
        "it would be wrong to guess: please report the model"
    )

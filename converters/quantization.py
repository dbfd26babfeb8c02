"""Quantization: which tensors of a checkpoint get another dtype on their way into a pack, and how it went."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from threading import Lock
from typing import TYPE_CHECKING

from converters.quantizer import FLOAT_DTYPES, LIBRARY, QUANTIZED_DTYPES, load_quantizer
from lmpack.converted_tensor import ConvertedTensor, part_name, shared_name
from lmpack.dtype import block_of, dtype_nbytes
from lmpack.errors import CheckpointError, UnsupportedError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from converters.conversion_plan import ConversionPlan, PartLayout
    from converters.importance_matrix import ImportanceMatrix
    from converters.quantizer import Quantizer

KEEP = "keep"
_ALIASES = {"experts": "experts:*", "shared": "shared:*"}
_EXPERT_ROLES = frozenset({"gate", "up", "down", "gate_up"})
# what llama.cpp's llama-quantize leaves alone, by its names: small, or too sensitive
_NEVER_SHARED = re.compile(
    r".*_norm\.weight|.*ffn_gate_inp\.weight|.*(altup|laurel|per_layer_model_proj).*|.*(ssm_conv1d|shortconv\.conv).*"
    r"|position_embd\.weight|token_types\.weight|.*attn_rel_b\.weight"
    r"|.*time_mix_(first|w[012]|v[012]|a[012]|g[12]|decay_w[12]|lerp_fused)\.weight"
)


@dataclass(frozen=True, slots=True)
class Quantization:
    """Rules in order: the last one whose pattern fits a tensor's name gives its dtype."""

    rules: tuple[
        tuple[str, str], ...
    ]  # pattern over "experts:LAYER:ROLE" and "shared:NAME" -> dtype, or KEEP
    imatrix: ImportanceMatrix | None = None

    @classmethod
    def parse(cls, text: str, imatrix: ImportanceMatrix | None = None) -> Quantization:
        """Parse "[PATTERN=]TYPE,..."; a TYPE alone is for experts and shared tensors. Raises UsageError."""
        rules: list[tuple[str, str]] = []
        for rule in text.split(","):
            pattern, has_pattern, name = rule.strip().rpartition("=")
            if not name:
                raise UsageError(
                    f"--quantize {text!r}: a rule has no type; expected [NAMES=]TYPE,... as in experts=q4_K,shared=q8_0"
                )
            dtype = KEEP if name == KEEP else name.upper()
            if dtype not in (*QUANTIZED_DTYPES, *FLOAT_DTYPES, KEEP):
                known = ", ".join((*QUANTIZED_DTYPES, *FLOAT_DTYPES))
                raise UsageError(f"--quantize {rule}: {name!r} is none of {known}, {KEEP}")
            pattern = _ALIASES.get(pattern, pattern)
            if has_pattern and not pattern.startswith(("experts:", "shared:", "*")):
                raise UsageError(
                    f"--quantize {rule}: expected experts, shared, experts:LAYER:ROLE or shared:NAME before the =, "
                    "with * and ? as in file names"
                )
            rules.append((pattern if has_pattern else "*", dtype))
        return cls(tuple(rules), imatrix)

    def dtype_of(self, name: str) -> str | None:
        """Return what a tensor is to become; None when no rule fits it."""
        fitting = [dtype for pattern, dtype in self.rules if fnmatchcase(name, pattern)]
        return fitting[-1] if fitting and fitting[-1] != KEEP else None

    def plan(self, plan: ConversionPlan, where: str) -> QuantizationPlan:
        """Say for each tensor of a conversion what becomes of it.

        Raises UsageError for a rule that fits no tensor and for rules that together change none, UnsupportedError for a
        tensor that cannot be converted so.
        """
        quantizer = load_quantizer()
        tensors: dict[str, TensorConversion] = {}
        candidates = list(_candidates(plan))
        for pattern, _ in self.rules:
            if not any(fnmatchcase(candidate.name, pattern) for candidate in candidates):
                raise UsageError(
                    f"--quantize {pattern}: {where} has no matrix of this name that can be quantized; leave the rule out"
                )
        for candidate in candidates:
            dtype = self.dtype_of(candidate.name)
            if dtype is not None and dtype != candidate.source_dtype:
                tensors[candidate.name] = self._conversion(candidate, dtype, quantizer)
        if not tensors:
            raise UsageError(
                f"--quantize: changes nothing in {where}, whose matrices have the wanted types already or are kept; leave "
                "it out, or name other types"
            )
        if self.imatrix is not None and all(tensor.importance is None for tensor in tensors.values()):
            raise UsageError(
                f"--imatrix {self.imatrix.path}: has nothing for any tensor that --quantize converts; take one that "
                "llama-imatrix made of this model, or leave it out"
            )
        return QuantizationPlan(plan, tensors, self.imatrix.sha256 if self.imatrix else "", quantizer.version)

    def _conversion(self, candidate: _Candidate, dtype: str, quantizer: Quantizer) -> TensorConversion:
        name, columns = candidate.name, candidate.shape[-1]
        if candidate.source_dtype not in FLOAT_DTYPES:
            raise UnsupportedError(
                f"{name} is {candidate.source_dtype} already, and quantizing twice loses more than once; convert the "
                f"model in {', '.join(FLOAT_DTYPES)}, or add --quantize ...,{name}={KEEP}"
            )
        if columns % block_of(dtype).num_elements:
            raise UnsupportedError(
                f"{name} has rows of {columns} numbers, {dtype} needs multiples of {block_of(dtype).num_elements}; "
                f"choose another type for it: --quantize ...,{name}=q8_0"
            )
        importance = None
        if self.imatrix is not None:
            importance = self.imatrix.of(candidate.gguf_name, candidate.num_matrices, columns)
        if importance is None and quantizer.requires_imatrix(dtype):
            found = "none was given" if self.imatrix is None else f"{self.imatrix.path} has none for it"
            raise UsageError(f"{name}: {dtype} needs an importance matrix (--imatrix), and {found}")
        return TensorConversion(name, candidate.source_dtype, dtype, columns, importance, quantizer)


@dataclass(slots=True)
class TensorConversion:
    """One tensor (one part of all experts of a layer) on its way to another dtype; threads share it."""

    name: str
    source_dtype: str
    dtype: str
    num_columns: int
    importance: NDArray[np.float32] | None  # [num_matrices, num_columns]
    quantizer: Quantizer
    relative_error: float = 0.0
    _lock: Lock = field(default_factory=Lock)

    def convert(self, raw: memoryview, matrix: int = 0) -> tuple[memoryview, float]:
        """Return whole rows of one of its matrices in the new dtype, and the largest relative error of a row.

        Raises CheckpointError for NaN and infinity.
        """
        weights = None if self.importance is None else self.importance[matrix]
        converted, error = self.quantizer.convert(
            raw, self.source_dtype, self.dtype, self.num_columns, weights
        )
        if not math.isfinite(error):
            raise CheckpointError(
                f"{self.name}: holds numbers that are not finite, which cannot be quantized; leave it as it is: "
                f"--quantize ...,{self.name}={KEEP}"
            )
        self.note(error)
        return converted.data, error

    def note(self, relative_error: float) -> None:
        """Take the error of some rows into account."""
        with self._lock:
            self.relative_error = max(self.relative_error, relative_error)

    def offset(self, source_offset: int) -> int:
        """Return where a row begins that begins at source_offset in the source's dtype."""
        rows = source_offset // dtype_nbytes(self.source_dtype, (self.num_columns,))
        return rows * dtype_nbytes(self.dtype, (self.num_columns,))


@dataclass(frozen=True, slots=True)
class QuantizationPlan:
    """The tensors that are converted, by the names that manifests give them."""

    source: ConversionPlan
    tensors: dict[str, TensorConversion]
    imatrix_sha256: str
    library_version: str

    def part(self, layer: int, role: str) -> TensorConversion | None:
        """Return the conversion of a part; None when it is copied."""
        return self.tensors.get(part_name(layer, role))

    def shared(self, name: str) -> TensorConversion | None:
        """Return the conversion of a shared tensor; None when it is copied."""
        return self.tensors.get(shared_name(name))

    def target(self) -> ConversionPlan:
        """Return the conversion's plan with the dtypes that tensors will have."""

        def changed(layout: PartLayout, name: str) -> PartLayout:
            conversion = self.tensors.get(name)
            return layout if conversion is None else (layout[0], conversion.dtype, layout[2])

        layers = {
            layer: replace(
                experts, parts=tuple(changed(part, part_name(layer, part[0])) for part in experts.parts)
            )
            for layer, experts in self.source.layers.items()
        }
        shared = tuple(changed(tensor, shared_name(tensor[0])) for tensor in self.source.shared)
        return replace(self.source, layers=layers, shared=shared)

    def converted(self) -> tuple[ConvertedTensor, ...]:
        """Return what the manifest says of the conversions so far."""
        return tuple(
            ConvertedTensor(
                tensor=conversion.name,
                source_dtype=conversion.source_dtype,
                library=LIBRARY,
                library_version=self.library_version,
                imatrix_sha256=self.imatrix_sha256 if conversion.importance is not None else "",
                relative_error=conversion.relative_error,
            )
            for conversion in self.tensors.values()
        )


def imatrix_name(layer: int, role: str) -> str:
    """Return by which name importance matrices know a part of all experts of a layer."""
    return f"blk.{layer}.ffn_{role}_exps.weight"


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A tensor that may be quantized."""

    name: str
    gguf_name: str  # by which importance matrices know it
    source_dtype: str
    shape: tuple[int, ...]
    num_matrices: int


def _candidates(plan: ConversionPlan) -> Iterator[_Candidate]:
    """Yield the matrices of a plan that llama-quantize would convert, in the manifest's order."""
    for layer, experts in plan.layers.items():
        for role, dtype, shape in experts.parts:
            if role in _EXPERT_ROLES and len(shape) == 2:
                gguf_name = imatrix_name(layer, role)
                yield _Candidate(part_name(layer, role), gguf_name, dtype, shape, experts.num_experts)
    for name, dtype, shape in plan.shared:
        if len(shape) == 2 and name.endswith("weight") and not _NEVER_SHARED.fullmatch(name):
            yield _Candidate(shared_name(name), name, dtype, shape, 1)

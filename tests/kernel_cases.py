"""Weights, banks and blocks to try kernels with, and the float64 arithmetic they are held to."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import gguf
import numpy as np
import torch

from converters.ggml_base import GGML_TYPE_IDS
from lmpack.dtype import dtype_nbytes
from lmpack.layer_entry import ExpertPart
from runtime.expert_bank import ExpertBank
from runtime.kernels.ggml_library import load_ggml
from runtime.kernels.kernels import ExpertRows
from runtime.kernels.weight import Weight

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from runtime.kernels.kernels import Kernels
    from runtime.kernels.operations import Operations, T
    from runtime.kernels.rms_norm import RMSNorm
    from runtime.step import Step

HIDDEN, INNER, NUM_SLOTS = 512, 256, 12

# Relative Frobenius error against float64, about 1.5 times what was measured over these seeds. ggml rounds the
# activations: to 8 bits per 32 or 256 values, or to the weight's own 16-bit type.
TORCH_TOLERANCE = 1e-6
GGML_TOLERANCES = {
    "F32": 1e-6,
    "F16": 4e-4,
    "BF16": 3e-3,
    **dict.fromkeys(("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "MXFP4"), 9e-3),
    **dict.fromkeys(("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"), 1.2e-2),
}
DTYPES = tuple(GGML_TOLERANCES)


def tolerance(kernels: Kernels, *dtypes: str) -> float:
    return TORCH_TOLERANCE if kernels.name == "torch" else max(GGML_TOLERANCES[dtype] for dtype in dtypes)


def floats(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def inputs(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.from_numpy(floats(*shape, seed=seed))


def blocks(rows: NDArray[np.float32], dtype: str) -> torch.Tensor:
    """The rows in ggml's own quantizer's blocks."""
    out = torch.empty(dtype_nbytes(dtype, rows.shape), dtype=torch.uint8)
    num_rows, num_columns = rows.shape
    written = load_ggml().ggml_quantize_chunk(
        GGML_TYPE_IDS[dtype], rows.ctypes.data, out.data_ptr(), 0, num_rows, num_columns, None
    )
    assert written == len(out)
    return out


@functools.cache
def weight(dtype: str, num_rows: int, num_columns: int, seed: int = 0) -> Weight:
    scale = num_columns**-0.5
    return Weight(
        blocks(floats(num_rows, num_columns, seed=seed) * scale, dtype), dtype, (num_rows, num_columns)
    )


def exact(weight: Weight) -> NDArray[np.float64]:
    """The oracle's matrix: gguf's own codec, widened."""
    kind = gguf.GGMLQuantizationType[weight.dtype]
    rows = weight.storage.numpy().reshape(weight.shape[0], -1)
    return np.asarray(gguf.quants.dequantize(rows, kind), dtype=np.float64)


def swiglu(
    x: NDArray[np.float64], gate: NDArray[np.float64], up: NDArray[np.float64], down: NDArray[np.float64]
) -> NDArray[np.float64]:
    gated = x @ gate.T
    inner: NDArray[np.float64] = gated / (1 + np.exp(-gated)) * (x @ up.T)
    return inner @ down.T


def error(ours: torch.Tensor, oracle: NDArray[np.float64]) -> float:
    assert ours.dtype == torch.float32
    assert tuple(ours.shape) == oracle.shape
    return float(np.linalg.norm(ours.double().numpy() - oracle) / np.linalg.norm(oracle))


def bank_of(
    dtypes: dict[str, str], order: Sequence[str], slot_of: Sequence[int] = range(NUM_SLOTS)
) -> tuple[ExpertBank, list[tuple[Weight, Weight, Weight]]]:
    """A bank of NUM_SLOTS experts with their parts in this order; expert e lies in slot_of[e]."""
    experts = [
        (
            weight(dtypes["gate"], INNER, HIDDEN, seed=3 * expert + 10),
            weight(dtypes["up"], INNER, HIDDEN, seed=3 * expert + 11),
            weight(dtypes["down"], HIDDEN, INNER, seed=3 * expert + 12),
        )
        for expert in range(NUM_SLOTS)
    ]
    parts: list[ExpertPart] = []
    end = 0
    for role in order:
        shape = {
            "gate": (INNER, HIDDEN),
            "up": (INNER, HIDDEN),
            "gate_up": (2 * INNER, HIDDEN),
            "down": (HIDDEN, INNER),
        }[role]
        role_dtype = dtypes["gate" if role == "gate_up" else role]
        part = ExpertPart(role, role_dtype, shape, end, dtype_nbytes(role_dtype, shape))
        parts.append(part)
        end = (end + part.nbytes + 255) // 256 * 256
    stride = (end + 4095) // 4096 * 4096
    storage = torch.full((NUM_SLOTS * stride,), 0xFF, dtype=torch.uint8)  # NaN wherever nothing belongs
    for (gate, up, down), slot in zip(experts, slot_of, strict=True):
        content = {
            "gate": gate.storage,
            "up": up.storage,
            "down": down.storage,
            "gate_up": torch.cat((gate.storage, up.storage)),
        }
        for part in parts:
            start = slot * stride + part.offset
            storage[start : start + part.nbytes] = content[part.role]
    return ExpertBank(storage, stride, NUM_SLOTS, tuple(parts)), experts


@dataclass(frozen=True, eq=False)
class Linear:
    """A block: x, normalised or not, times a matrix."""

    matrix: Weight
    norm: RMSNorm | None = None

    def __call__(self, ops: Operations[T], inputs: tuple[T, ...], step: Step | None) -> T:
        (x,) = inputs
        return ops.linear(x if self.norm is None else ops.norm(x, self.norm), self.matrix)


@dataclass(frozen=True, eq=False)
class Embed:
    """A block: token ids -> rows."""

    table: Weight

    def __call__(self, ops: Operations[T], inputs: tuple[T, ...], step: Step | None) -> T:
        return ops.embed(self.table, inputs[0])


@dataclass(frozen=True, eq=False)
class FeedForward:
    """A block: a dense SwiGLU."""

    gate: Weight
    up: Weight
    down: Weight

    def __call__(self, ops: Operations[T], inputs: tuple[T, ...], step: Step | None) -> T:
        (x,) = inputs
        return ops.linear(ops.swiglu(ops.linear(x, self.gate), ops.linear(x, self.up)), self.down)


def linear(kernels: Kernels, x: torch.Tensor, matrix: Weight, norm: RMSNorm | None = None) -> torch.Tensor:
    return kernels.run(Linear(matrix, norm), x).clone()


def experts_of(kernels: Kernels, x: torch.Tensor, slots: torch.Tensor, bank: ExpertBank) -> torch.Tensor:
    """Each token through its own slots: [n, hidden] and [n, k] -> [n, k, hidden]."""
    n, k = slots.shape
    if n == 1:
        return kernels.expert_ffn(x, slots.tolist(), bank).clone()
    outputs = x.new_empty(n * k, x.shape[1])
    shares = []
    for slot in sorted(set(slots.flatten().tolist())):
        places = (slots.flatten() == slot).nonzero()[:, 0]
        shares.append(ExpertRows(slot, places // k, places))
    kernels.expert_ffns(x, shares, bank, outputs)
    return outputs.view(n, k, -1)


def random_slots(n: int, k: int) -> torch.Tensor:
    rng = np.random.default_rng(5)
    return torch.from_numpy(np.stack([rng.permutation(NUM_SLOTS)[:k] for _ in range(n)]).astype(np.int32))

"""The CPU kernels: ggml's products over quantized blocks, read where they lie.

ggml rounds each row of activations to the type that it pairs with the weight's (Q8_K for K-quants, Q8_0, BF16, ...);
results differ from the torch reference by that rounding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from runtime.kernels.expert_matrices import ExpertMatrices
from runtime.kernels.ggml_experts import ExpertLanes, expert, swiglu
from runtime.kernels.ggml_interleaving import Interleaving
from runtime.kernels.ggml_library import load_ggml
from runtime.kernels.ggml_operations import GGMLOperations
from runtime.kernels.ggml_program import Program
from runtime.kernels.ggml_programs import Programs
from runtime.kernels.ggml_threadpool import Threadpool

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from torch import Tensor

    from runtime.expert_bank import ExpertBank
    from runtime.kernels.expert_matrices import ExpertMatrix
    from runtime.kernels.ggml_library import GGMLLibrary, TensorStruct
    from runtime.kernels.kernels import Block, ExpertRows
    from runtime.kernels.weight import Weight
    from runtime.step import Step

# ggml walks over all slots of a bank in each product, about 3 ns per slot; beyond this many, one token's experts are
# cheaper as products of their own.
_MANY_SLOTS = 512
# Several tokens' rows that are computed at once: with more of them an expert keeps a thread busy for long enough.
_FEW_ROWS = 512
_ROW_PLACES = 1 << 20  # ggml keeps 8 bytes for each slot of the bank and row
# Weights that one thread reads in about the time in which several meet at ggml's barriers.
_TEAM_NBYTES = 256 << 10
_DTYPES = {torch.float32: "F32", torch.int32: "I32"}


class GGMLKernels:
    """Called from one thread at a time; close() ends its own threads."""

    name = "ggml"

    def __init__(self, num_threads: int) -> None:
        """Load ggml and start its threads; UnsupportedError says why that cannot be."""
        self._library = load_ggml()
        self._team = Threadpool(self._library, num_threads)
        self._alone = Threadpool(self._library, 1)
        self._interleaving = Interleaving(self._library)
        self._blocks = Programs()
        self._experts = Programs()  # apart: they run inside of blocks
        self._lanes = ExpertLanes(self._library, num_threads)

    def run(self, block: Block, *inputs: Tensor, step: Step | None = None) -> Tensor:
        torch.set_num_threads(1)  # host functions do little, and OpenMP's idle threads spin against ggml's
        shapes = tuple(tensor.shape for tensor in inputs)
        key = (block, shapes, None if step is None else _step_key(step))
        program = self._blocks.get(key, lambda: self._recorded(block, inputs, step))
        return program.run(self._blocks.scratch, [tensor.data_ptr() for tensor in inputs], step)

    def prepare(self, weight: Weight) -> Weight:
        return self._interleaving.apply(weight)

    def computes_at_once(self, num_rows: int, bank: ExpertBank) -> bool:
        return num_rows <= min(_FEW_ROWS, _ROW_PLACES // bank.num_slots)

    def expert_ffn(self, x: Tensor, slots: Sequence[Sequence[int]], bank: ExpertBank) -> Tensor:
        assert x.dtype == torch.float32
        assert x.is_contiguous()
        n, k, storage = len(slots), len(slots[0]), bank.storage.data_ptr()
        assert len(x) == n
        assert 0 <= min(map(min, slots)) <= max(map(max, slots)) < bank.num_slots
        if n > 1 or bank.num_slots <= _MANY_SLOTS:
            program = self._experts.get(
                ("together", n, k, bank.stride, bank.num_slots, bank.parts),
                lambda: self._together(n, k, bank),
            )
            ids = torch.tensor(slots, dtype=torch.int32)
            return program.run(self._experts.scratch, (x.data_ptr(), ids.data_ptr(), storage))
        program = self._experts.get(("apart", k, bank.parts), lambda: self._apart(k, bank))
        experts = [storage + slot * bank.stride for slot in slots[0]]
        return program.run(self._experts.scratch, (x.data_ptr(), *experts))

    def expert_ffns(self, x: Tensor, work: Iterable[ExpertRows], bank: ExpertBank, outputs: Tensor) -> None:
        # Each expert is one lane's alone: no thread waits for another at a barrier.
        self._lanes.run(work, x, _checked_matrices(self._library, bank), bank, outputs)

    def close(self) -> None:
        self._lanes.close()
        self._blocks.close()
        self._experts.close()
        self._interleaving.close()
        self._team.close()
        self._alone.close()

    def _recorded(self, block: Block, inputs: Sequence[Tensor], step: Step | None) -> Program:
        program = Program(self._library)
        ops = GGMLOperations(self._library, program, self._interleaving, self._team.num_threads)
        leaves = tuple(
            program.input(number, _DTYPES[tensor.dtype], *reversed(tensor.shape))
            for number, tensor in enumerate(inputs)
        )
        result = block(ops, leaves, step)
        shape = (result.ne[1], result.ne[0])
        return program.finish([result], shape, self._threads(ops.largest_product_nbytes))

    def _together(self, n: int, k: int, bank: ExpertBank) -> Program:
        """n tokens through k slots each: each projection is one product over the whole bank."""
        experts = _checked_matrices(self._library, bank)
        program = Program(self._library)
        x = program.input(0, "F32", experts.hidden_size, 1, n)
        ids = program.input(1, "I32", k, n)

        def product(matrix: ExpertMatrix, rows: TensorStruct) -> TensorStruct:
            out_features, in_features = matrix.shape
            stack = program.input(
                2, matrix.dtype, in_features, out_features, bank.num_slots, offset=matrix.offset
            )
            stack.nb[2] = bank.stride
            stack.nb[3] = bank.stride * bank.num_slots
            return program.operation("ggml_mul_mat_id", stack, rows, ids)

        result = swiglu(program, experts, product, x)
        return program.finish([result], (n, k, experts.hidden_size), self._threads(n * k * _nbytes(experts)))

    def _apart(self, k: int, bank: ExpertBank) -> Program:
        """One token through k experts: each projection of each is a product of its own."""
        experts = _checked_matrices(self._library, bank)
        program = Program(self._library)
        x = program.input(0, "F32", experts.hidden_size, 1)
        results = [expert(program, experts, 1 + number, x) for number in range(k)]
        return program.finish(results, (1, k, experts.hidden_size), self._threads(_nbytes(experts)))

    def _threads(self, nbytes: int) -> Threadpool:
        """Who computes a program whose largest product reads this many bytes, rows times weights."""
        return self._team if nbytes > _TEAM_NBYTES else self._alone


def _checked_matrices(library: GGMLLibrary, bank: ExpertBank) -> ExpertMatrices:
    experts = ExpertMatrices.of(bank.parts)
    for matrix in (experts.gate, experts.up, experts.down):
        library.check_product(matrix.dtype, matrix.shape)
    return experts


def _nbytes(experts: ExpertMatrices) -> int:
    return experts.gate.nbytes + experts.up.nbytes + experts.down.nbytes


def _step_key(step: Step) -> Hashable:
    """What a recorded program depends on: one token attends in ggml, over a past of this layout."""
    if step.num_tokens == 1:
        return step.attended, step.kv.capacity, step.kv.keys.dtype
    return None

"""The CPU kernels: ggml's products over quantized blocks, read where they lie.

ggml rounds each row of activations to the type that it pairs with the weight's (Q8_K for K-quants, Q8_0, BF16, ...);
results differ from the torch reference by that rounding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lmpack.dtype import dtype_nbytes
from lmpack.errors import UnsupportedError
from runtime.kernels.expert_matrices import ExpertMatrices
from runtime.kernels.ggml_graph import Graph, Output, align
from runtime.kernels.ggml_library import load_ggml
from runtime.kernels.ggml_threadpool import Threadpool

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from torch import Tensor

    from lmpack.manifest import ExpertPart
    from runtime.expert_bank import ExpertBank
    from runtime.kernels.expert_matrices import ExpertMatrix
    from runtime.kernels.ggml_library import TensorStruct
    from runtime.kernels.rms_norm import RMSNorm
    from runtime.kernels.weight import Weight

_MAX_GRAPHS = 512  # a few KB each; prefills of many lengths leave theirs behind
# ggml walks over all slots of a bank in each product, about 3 ns per slot; beyond this many, one token's experts are
# cheaper as single-slot banks.
_MANY_SLOTS = 512
# Weights that one thread reads in about the time in which several meet at ggml's barriers.
_TEAM_NBYTES = 256 << 10


class GGMLKernels:
    """Called from one thread at a time; close() ends its own threads."""

    name = "ggml"

    def __init__(self, num_threads: int) -> None:
        """Load ggml and start its threads; UnsupportedError says why that cannot be."""
        self._library = load_ggml()
        self._team = Threadpool(self._library, num_threads)
        self._alone = Threadpool(self._library, 1)
        self._graphs: dict[Hashable, Graph] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._scratch_address = 0
        self._slot_zero = torch.zeros(1, dtype=torch.int32)

    def embed(self, weight: Weight, token_ids: Tensor) -> Tensor:
        n = len(token_ids)
        if n == 0:
            return torch.empty(0, weight.shape[1])
        assert 0 <= int(token_ids.min()) <= int(token_ids.max()) < weight.shape[0]
        key = ("embed", n, weight.dtype, weight.shape)
        graph = self._graphs.get(key) or self._keep(key, self._embed_graph(n, weight))
        ids = token_ids.to(torch.int32)
        return graph.run(self._scratch_address, (_address(weight), ids.data_ptr()))[0]

    def linear(self, x: Tensor, weights: Sequence[Weight], norm: RMSNorm | None = None) -> tuple[Tensor, ...]:
        n = len(x)
        if n == 0:
            return tuple(x.new_empty(0, weight.shape[0]) for weight in weights)
        assert x.dtype == torch.float32
        x = x.contiguous()
        key = ("linear", n, _eps(norm), *[(weight.dtype, weight.shape) for weight in weights])
        graph = self._graphs.get(key) or self._keep(key, self._linear_graph(n, weights, norm))
        return graph.run(self._scratch_address, (x.data_ptr(), *_norm_address(norm), *map(_address, weights)))

    def expert_ffn(self, x: Tensor, slots: Tensor, bank: ExpertBank, norm: RMSNorm | None = None) -> Tensor:
        n, k = slots.shape
        assert len(x) == n
        assert x.dtype == torch.float32
        assert slots.dtype == torch.int32
        if n * k == 0:
            return x.new_empty(n, k, x.shape[1])
        x, slots = x.contiguous(), slots.contiguous()
        if n == 1 and bank.num_slots > _MANY_SLOTS:
            return self._expert_ffn_one_by_one(x, slots, bank, norm)
        key = ("expert_ffn", n, k, _eps(norm), bank.stride, bank.num_slots, bank.parts)
        graph = self._graphs.get(key) or self._keep(key, self._expert_ffn_graph(n, k, bank, norm))
        inputs = (x.data_ptr(), *_norm_address(norm), slots.data_ptr())
        projections = (bank.storage.data_ptr(),) * (graph.num_leaves - len(inputs))
        return graph.run(self._scratch_address, (*inputs, *projections))[0]

    def _expert_ffn_one_by_one(
        self, x: Tensor, slots: Tensor, bank: ExpertBank, norm: RMSNorm | None
    ) -> Tensor:
        """expert_ffn of one token, each expert as a bank of a single slot."""
        k = slots.shape[1]
        key = ("expert_ffn_one_by_one", k, _eps(norm), bank.parts)
        graph = self._graphs.get(key) or self._keep(key, self._one_by_one_graph(k, bank, norm))
        storage, chosen = bank.storage.data_ptr(), slots[0].tolist()
        assert 0 <= min(chosen) <= max(chosen) < bank.num_slots
        inputs = (x.data_ptr(), *_norm_address(norm), self._slot_zero.data_ptr())
        per_expert = (graph.num_leaves - len(inputs)) // k
        experts = [storage + slot * bank.stride for slot in chosen for _ in range(per_expert)]
        return graph.run(self._scratch_address, (*inputs, *experts))[0]

    def feed_forward(
        self, x: Tensor, gate: Weight, up: Weight, down: Weight, norm: RMSNorm | None = None
    ) -> Tensor:
        n = len(x)
        if n == 0:
            return x.new_empty(0, down.shape[0])
        assert x.dtype == torch.float32
        x = x.contiguous()
        weights = (gate, up, down)
        key = ("feed_forward", n, _eps(norm), *[(weight.dtype, weight.shape) for weight in weights])
        graph = self._graphs.get(key) or self._keep(key, self._feed_forward_graph(n, weights, norm))
        addresses = (x.data_ptr(), *_norm_address(norm), *map(_address, weights))
        return graph.run(self._scratch_address, addresses)[0]

    def close(self) -> None:
        self._forget_graphs()
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._team.close()
        self._alone.close()

    def _embed_graph(self, n: int, weight: Weight) -> Graph:
        self._check(weight.dtype, weight.shape)
        graph = Graph(self._library)
        rows = graph.operation("ggml_get_rows", _matrix(graph, weight), graph.leaf("I32", n))
        return graph.finish([Output((rows,), (n, weight.shape[1]))], self._alone, keep_outputs=n == 1)

    def _linear_graph(self, n: int, weights: Sequence[Weight], norm: RMSNorm | None) -> Graph:
        for weight in weights:
            self._check(weight.dtype, weight.shape)
        graph = Graph(self._library)
        x = _normalised(graph, graph.leaf("F32", weights[0].shape[1], n), norm)
        products = [graph.operation("ggml_mul_mat", _matrix(graph, weight), x) for weight in weights]
        outputs = [
            Output((product,), (n, weight.shape[0]))
            for product, weight in zip(products, weights, strict=True)
        ]
        return graph.finish(outputs, self._threads(n, weights), keep_outputs=n == 1)

    def _feed_forward_graph(
        self, n: int, weights: tuple[Weight, Weight, Weight], norm: RMSNorm | None
    ) -> Graph:
        gate, up, down = weights
        for weight in weights:
            self._check(weight.dtype, weight.shape)
        graph = Graph(self._library)
        x = _normalised(graph, graph.leaf("F32", gate.shape[1], n), norm)
        gated, raised = (graph.operation("ggml_mul_mat", _matrix(graph, weight), x) for weight in (gate, up))
        inner = graph.operation("ggml_swiglu_split", gated, raised)
        lowered = graph.operation("ggml_mul_mat", _matrix(graph, down), inner)
        threads = self._threads(n, weights)
        return graph.finish([Output((lowered,), (n, down.shape[0]))], threads, keep_outputs=n == 1)

    def _expert_ffn_graph(self, n: int, k: int, bank: ExpertBank, norm: RMSNorm | None) -> Graph:
        experts = self._checked_matrices(bank)
        graph = Graph(self._library)
        x = _normalised(graph, graph.leaf("F32", experts.hidden_size, 1, n), norm)
        slots = graph.leaf("I32", k, n)
        result = _swiglu_of_slots(graph, experts, x, slots, bank.num_slots, bank.stride)
        output = Output((result,), (n, k, experts.hidden_size))
        return graph.finish([output], self._threads(n * k, bank.parts), keep_outputs=n == 1)

    def _one_by_one_graph(self, k: int, bank: ExpertBank, norm: RMSNorm | None) -> Graph:
        experts = self._checked_matrices(bank)
        graph = Graph(self._library, max_tensors=8 * (k + 1))
        x = _normalised(graph, graph.leaf("F32", experts.hidden_size, 1, 1), norm)
        slot = graph.leaf("I32", 1, 1)
        results = tuple(_swiglu_of_slots(graph, experts, x, slot, 1, bank.stride) for _ in range(k))
        output = Output(results, (1, k, experts.hidden_size))
        return graph.finish([output], self._threads(k, bank.parts), keep_outputs=True)

    def _checked_matrices(self, bank: ExpertBank) -> ExpertMatrices:
        experts = ExpertMatrices.of(bank.parts)
        for matrix in (experts.gate, experts.up, experts.down):
            self._check(matrix.dtype, matrix.shape)
        return experts

    def _check(self, dtype: str, shape: tuple[int, int]) -> None:
        if not self._library.multiplies(dtype):
            raise UnsupportedError(
                f"a {dtype} matrix of shape {list(shape)}: ggml {self._library.version} has no CPU product for this "
                f"dtype; use the torch kernels"
            )

    def _threads(self, num_rows: int, matrices: Sequence[Weight | ExpertPart]) -> Threadpool:
        """Who computes a graph in which this many rows go through each of these matrices."""
        nbytes = sum(dtype_nbytes(matrix.dtype, matrix.shape) for matrix in matrices)
        return self._team if num_rows * nbytes > _TEAM_NBYTES else self._alone

    def _keep(self, key: Hashable, graph: Graph) -> Graph:
        """Remember a new graph, and make room in the scratch for it."""
        if len(self._graphs) == _MAX_GRAPHS:
            self._forget_graphs()
        self._graphs[key] = graph
        if align(graph.scratch_nbytes) + align(1) > len(self._scratch):
            self._scratch = torch.empty(0, dtype=torch.uint8)  # free the old memory before asking for more
            self._scratch = torch.empty(align(graph.scratch_nbytes) + align(1), dtype=torch.uint8)
            self._scratch_address = align(self._scratch.data_ptr())
        return graph

    def _forget_graphs(self) -> None:
        for graph in self._graphs.values():
            graph.close()
        self._graphs.clear()


def _eps(norm: RMSNorm | None) -> float | None:
    return None if norm is None else norm.eps


def _norm_address(norm: RMSNorm | None) -> tuple[int, ...]:
    return () if norm is None else (norm.weight.data_ptr(),)


def _normalised(graph: Graph, x: TensorStruct, norm: RMSNorm | None) -> TensorStruct:
    if norm is None:
        return x
    weight = graph.leaf("F32", len(norm.weight))
    return graph.operation("ggml_mul", graph.operation("ggml_rms_norm", x, norm.eps), weight)


def _swiglu_of_slots(
    graph: Graph, experts: ExpertMatrices, x: TensorStruct, slots: TensorStruct, num_slots: int, stride: int
) -> TensorStruct:
    def product(matrix: ExpertMatrix, rows: TensorStruct) -> TensorStruct:
        stack = graph.stacked_leaf(matrix.dtype, matrix.shape, num_slots, stride, matrix.offset)
        return graph.operation("ggml_mul_mat_id", stack, rows, slots)

    # Neighbours in the slot are one taller matrix: x is rounded once, and the threads meet less often.
    if (joined := experts.gate.followed_by(experts.up)) is not None:
        inner = graph.operation("ggml_swiglu", product(joined, x))
    elif (joined := experts.up.followed_by(experts.gate)) is not None:
        inner = graph.operation("ggml_swiglu_swapped", product(joined, x))
    else:
        inner = graph.operation("ggml_swiglu_split", product(experts.gate, x), product(experts.up, x))
    return product(experts.down, inner)


def _matrix(graph: Graph, weight: Weight) -> TensorStruct:
    return graph.leaf(weight.dtype, weight.shape[1], weight.shape[0])


def _address(weight: Weight) -> int:
    assert weight.storage.numel() == dtype_nbytes(weight.dtype, weight.shape)
    return weight.storage.data_ptr()

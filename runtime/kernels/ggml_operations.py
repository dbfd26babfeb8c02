"""The operations of a block as ggml's: each call records, nothing is computed yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lmpack.dtype import dtype_nbytes
from runtime.kernels.attend import attend

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from runtime.kernels.ggml_interleaving import Interleaving
    from runtime.kernels.ggml_library import GGMLLibrary, TensorStruct
    from runtime.kernels.ggml_program import Program
    from runtime.kernels.rms_norm import RMSNorm
    from runtime.kernels.weight import Weight
    from runtime.rope import Rope
    from runtime.router import Router
    from runtime.step import Step

# Products of queries and keys that one thread computes in less time than OpenMP's other threads spin afterwards.
_FEW_PRODUCTS = 64 << 20
_ROPE_PAIRS_ARE_HALVES = 2  # GGML_ROPE_TYPE_NEOX
_DESCENDING = 1  # GGML_SORT_ORDER_DESC
_KV_DTYPES = {"torch.float16": "F16", "torch.bfloat16": "BF16", "torch.float32": "F32"}


class GGMLOperations:
    """Records into a program; ggml's dimensions are torch's the other way round."""

    def __init__(
        self, library: GGMLLibrary, program: Program, interleaving: Interleaving, num_threads: int
    ) -> None:
        self.program = program
        self.num_threads = num_threads
        self.largest_product_nbytes = 0  # rows times bytes of the weight
        self._library = library
        self._interleaving = interleaving
        self._positions: TensorStruct | None = None
        self._visible: TensorStruct | None = None

    def embed(self, table: Weight, token_ids: TensorStruct) -> TensorStruct:
        return self.program.operation("ggml_get_rows", self._matrix(table), token_ids)

    def linear(self, x: TensorStruct, weight: Weight, bias: Tensor | None = None) -> TensorStruct:
        rows_nbytes = x.ne[1] * weight.storage.numel()
        self.largest_product_nbytes = max(self.largest_product_nbytes, rows_nbytes)
        product = self.program.operation("ggml_mul_mat", self._matrix(weight), x)
        return product if bias is None else self.add(product, self._vector(bias))

    def norm(self, x: TensorStruct, norm: RMSNorm) -> TensorStruct:
        normalised = self.program.operation("ggml_rms_norm", x, norm.eps)
        return self.program.operation("ggml_mul", normalised, self._vector(norm.weight))

    def heads(self, x: TensorStruct, head_dim: int) -> TensorStruct:
        return self.program.operation("ggml_reshape_3d", x, head_dim, x.ne[0] // head_dim, x.ne[1])

    def rope(self, heads: TensorStruct, rope: Rope, step: Step) -> TensorStruct:
        if self._positions is None:
            self._positions = self.program.bound(
                "I32", lambda step: step.positions.data_ptr(), step.num_tokens
            )
        no_yarn = (0, rope.theta, 1.0, 0.0, 1.0, 0.0, 0.0)
        return self.program.operation(
            "ggml_rope_ext",
            heads,
            self._positions,
            self._vector(rope.factors),
            rope.rope_dim,
            _ROPE_PAIRS_ARE_HALVES,
            *no_yarn,
        )

    def attend(
        self, q: TensorStruct, k: TensorStruct, v: TensorStruct, layer: int, step: Step
    ) -> TensorStruct:
        if step.num_tokens == 1:
            return self._attend_alone(q, k, v, layer, step)

        def attend_to_past(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            step = self.program.step
            assert step is not None
            if q.numel() * (step.start + step.num_tokens) <= _FEW_PRODUCTS:
                return attend(q, k, v, layer, step)
            torch.set_num_threads(self.num_threads)
            try:
                return attend(q, k, v, layer, step)
            finally:
                torch.set_num_threads(1)

        return self.host(attend_to_past, (q, k, v), (step.num_tokens, q.ne[0] * q.ne[1]))

    def add(self, a: TensorStruct, b: TensorStruct) -> TensorStruct:
        return self.program.operation("ggml_add", a, b)

    def swiglu(self, gate: TensorStruct, up: TensorStruct) -> TensorStruct:
        return self.program.operation("ggml_swiglu_split", gate, up)

    def gated(self, x: TensorStruct, logit: TensorStruct) -> TensorStruct:
        return self.program.operation("ggml_mul", x, self.program.operation("ggml_sigmoid", logit))

    def route(self, logits: TensorStruct, router: Router) -> tuple[TensorStruct, TensorStruct]:
        operation, (num_experts, n) = self.program.operation, logits.ne[:2]
        probabilities = operation("ggml_soft_max", logits)
        ranking = operation("ggml_argsort", probabilities, _DESCENDING)
        topk_ids = operation("ggml_view_2d", ranking, router.top_k, n, ranking.nb[1], 0)
        by_expert = operation("ggml_reshape_3d", probabilities, 1, num_experts, n)
        weights = operation("ggml_get_rows", by_expert, topk_ids)
        weights = operation("ggml_reshape_2d", weights, router.top_k, n)
        if router.norm_topk_prob:
            weights = operation("ggml_div", weights, operation("ggml_sum_rows", weights))
        return topk_ids, weights

    def mix(self, outputs: TensorStruct, weights: TensorStruct) -> TensorStruct:
        hidden, top_k, n = outputs.ne[:3]
        by_token = self.program.operation("ggml_reshape_3d", weights, 1, top_k, n)
        mixed = self.program.operation("ggml_out_prod", outputs, by_token)
        return self.program.operation("ggml_reshape_2d", mixed, hidden, n)

    def host(
        self, function: Callable[..., Tensor], inputs: tuple[TensorStruct, ...], shape: tuple[int, ...]
    ) -> TensorStruct:
        return self.program.host(function, inputs, shape)

    def _attend_alone(
        self, q: TensorStruct, k: TensorStruct, v: TensorStruct, layer: int, step: Step
    ) -> TensorStruct:
        """One token: its key and value go into the cache, and products run over all of the masked past."""
        program, capacity, length = self.program, step.kv.capacity, step.attended
        head_dim, num_heads, kv_heads = q.ne[0], q.ne[1], k.ne[1]
        size = step.kv.keys.element_size()
        dtype = _KV_DTYPES[str(step.kv.keys.dtype)]
        layer_nbytes: int = kv_heads * head_dim * capacity * size

        def keys_at(step: Step) -> int:
            return step.kv.keys.data_ptr() + layer * layer_nbytes

        def values_at(step: Step) -> int:
            return step.kv.values.data_ptr() + layer * layer_nbytes

        new_key = program.bound(
            dtype, lambda step: keys_at(step) + step.start * head_dim * size, head_dim, kv_heads
        )
        new_key.nb[1] = head_dim * capacity * size
        new_value = program.bound(
            dtype, lambda step: values_at(step) + step.start * size, 1, kv_heads * head_dim
        )
        new_value.nb[1] = capacity * size
        keys = program.bound(dtype, keys_at, head_dim, length, kv_heads)
        keys.nb[2] = head_dim * capacity * size
        values = program.bound(dtype, values_at, length, head_dim, kv_heads)
        values.nb[1] = capacity * size
        values.nb[2] = head_dim * capacity * size
        if self._visible is None:
            group = num_heads // kv_heads
            self._visible = program.bound("F32", lambda step: step.visible.data_ptr(), length, group)

        program.operation("ggml_cpy", program.operation("ggml_reshape_2d", k, head_dim, kv_heads), new_key)
        program.operation(
            "ggml_cpy", program.operation("ggml_reshape_2d", v, 1, kv_heads * head_dim), new_value
        )
        grouped = program.operation("ggml_reshape_3d", q, head_dim, num_heads // kv_heads, kv_heads)
        scores = program.operation("ggml_mul_mat", keys, grouped)
        weights = program.operation("ggml_soft_max_ext", scores, self._visible, head_dim**-0.5, 0.0)
        mixed = program.operation("ggml_mul_mat", values, weights)
        return program.operation("ggml_reshape_2d", mixed, num_heads * head_dim, 1)

    def _matrix(self, weight: Weight) -> TensorStruct:
        self._library.check_product(weight.dtype, weight.shape)
        assert weight.storage.numel() == dtype_nbytes(weight.dtype, weight.shape)
        matrix = self.program.memory(
            weight.dtype, weight.storage.data_ptr(), weight.shape[1], weight.shape[0]
        )
        if weight.interleaved:
            self._interleaving.mark(matrix)
        return matrix

    def _vector(self, vector: Tensor) -> TensorStruct:
        return self.program.memory("F32", vector.data_ptr(), len(vector))

"""Grouped-query attention with rotary positions over the KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.kernels.operations import Operations, T
    from runtime.kernels.rms_norm import RMSNorm
    from runtime.kernels.weight import Weight
    from runtime.rope import Rope
    from runtime.step import Step


@dataclass(frozen=True, slots=True)
class Attention:
    """softmax(q k^T / sqrt(head_dim)) v (Vaswani et al. 2017, eq. 1), query heads sharing key heads.

    A norm or bias that the family does not have is None. A q or k norm spans one head, or the whole projection.
    """

    layer: int
    head_dim: int
    norm: RMSNorm  # of the layer's input
    q: Weight  # [num_attention_heads * head_dim, hidden]
    k: Weight  # [num_key_value_heads * head_dim, hidden]
    v: Weight
    output: Weight  # [hidden, num_attention_heads * head_dim]
    q_bias: Tensor | None
    k_bias: Tensor | None
    v_bias: Tensor | None
    output_bias: Tensor | None
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None

    def __call__(self, ops: Operations[T], x: T, rope: Rope, step: Step) -> T:
        """[n, hidden] of the step's tokens -> [n, hidden]."""
        x = ops.norm(x, self.norm)
        q = self._heads(ops, ops.linear(x, self.q, self.q_bias), self.q_norm)
        k = self._heads(ops, ops.linear(x, self.k, self.k_bias), self.k_norm)
        v = ops.heads(ops.linear(x, self.v, self.v_bias), self.head_dim)
        mixed = ops.attend(ops.rope(q, rope, step), ops.rope(k, rope, step), v, self.layer, step)
        return ops.linear(mixed, self.output, self.output_bias)

    def _heads(self, ops: Operations[T], x: T, norm: RMSNorm | None) -> T:
        if norm is None:
            return ops.heads(x, self.head_dim)
        if len(norm.weight) != self.head_dim:
            return ops.heads(ops.norm(x, norm), self.head_dim)
        return ops.norm(ops.heads(x, self.head_dim), norm)

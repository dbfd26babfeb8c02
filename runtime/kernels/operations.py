"""The operations that the blocks of a model are written in; each implementation of the kernels has its own.

A block is written once, over handles: torch computes as it goes, ggml records a program and runs that. Shapes are
torch's, rows last: [n, width] is n tokens of `width` floats.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from runtime.kernels.rms_norm import RMSNorm
    from runtime.kernels.weight import Weight
    from runtime.rope import Rope
    from runtime.router import Router
    from runtime.step import Step

T = TypeVar("T")
"""A handle: a tensor where operations compute at once, a tensor to come where they are recorded."""


class Operations(Protocol[T]):
    """Everything is float32 but for token ids, int32, and weights, which stay in their stored blocks."""

    def embed(self, table: Weight, token_ids: T) -> T:
        """Rows of the table: [n] -> [n, hidden]."""

    def linear(self, x: T, weight: Weight, bias: Tensor | None = None) -> T:
        """[n, in] -> [n, out]."""

    def norm(self, x: T, norm: RMSNorm) -> T:
        """Normalise the last dimension."""

    def heads(self, x: T, head_dim: int) -> T:
        """[n, heads * head_dim] -> [n, heads, head_dim]."""

    def rope(self, heads: T, rope: Rope, step: Step) -> T:
        """Rotate [n, heads, head_dim] by the step's positions."""

    def attend(self, q: T, k: T, v: T, layer: int, step: Step) -> T:
        """Put k and v behind the step's past, then look from q at all of it that is not in its future.

        q [n, heads, head_dim], k and v [n, kv_heads, head_dim] -> [n, heads * head_dim].
        """

    def add(self, a: T, b: T) -> T:
        """a + b of one shape."""

    def swiglu(self, gate: T, up: T) -> T:
        """silu(gate) * up (Shazeer 2020)."""

    def gated(self, x: T, logit: T) -> T:
        """x [n, width] * sigmoid(logit [n, 1])."""

    def route(self, logits: T, router: Router) -> tuple[T, T]:
        """The experts of each token, best first, and their weights: [n, num_experts] -> int32, float32 [n, top_k]."""

    def mix(self, outputs: T, weights: T) -> T:
        """The experts' weighted sum: [n, top_k, hidden] and [n, top_k] -> [n, hidden]."""

    def host(self, function: Callable[..., Tensor], inputs: tuple[T, ...], shape: tuple[int, ...]) -> T:
        """What a function of torch tensors makes of these; it gives float32 of this shape."""

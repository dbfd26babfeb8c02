"""The reference kernels: dequantise, then multiply in float32. Any device, any dtype that gguf can decode; slow."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from runtime.kernels.attend import attend
from runtime.kernels.expert_matrices import ExpertMatrices
from runtime.kernels.weight import Weight

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from runtime.expert_bank import ExpertBank
    from runtime.kernels.expert_matrices import ExpertMatrix
    from runtime.kernels.kernels import Block, ExpertRows
    from runtime.kernels.rms_norm import RMSNorm
    from runtime.rope import Rope
    from runtime.router import Router
    from runtime.step import Step


class TorchKernels:
    """Simple enough to be the oracle of the others; computes as a block goes along."""

    def __init__(self, num_threads: int, reason: str = "") -> None:
        """`reason` says why it is not another one that was asked for."""
        self.name = f"torch ({reason})" if reason else "torch"
        self.num_threads = num_threads

    def run(self, block: Block, *inputs: Tensor, step: Step | None = None) -> Tensor:
        torch.set_num_threads(self.num_threads)
        return block(self, inputs, step)

    def prepare(self, weight: Weight) -> Weight:
        return weight

    def computes_at_once(self, num_rows: int, bank: ExpertBank) -> bool:
        return False  # an expert is dequantised anew for each of its tokens

    def expert_ffn(self, x: Tensor, slots: Sequence[Sequence[int]], bank: ExpertBank) -> Tensor:
        return torch.stack(
            [
                torch.cat([_expert(bank, slot)(row) for slot in chosen])
                for row, chosen in zip(x[:, None], slots, strict=True)
            ]
        )

    def expert_ffns(self, x: Tensor, work: Iterable[ExpertRows], bank: ExpertBank, outputs: Tensor) -> None:
        for share in work:
            outputs[share.places] = _expert(bank, share.slot)(x[share.rows])

    def close(self) -> None:
        """Nothing is kept between calls."""

    def embed(self, table: Weight, token_ids: Tensor) -> Tensor:
        num_rows, hidden = table.shape
        rows = table.storage.view(num_rows, -1)[token_ids]
        return Weight(rows.reshape(-1), table.dtype, (len(token_ids), hidden)).float32()

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight.float32(), bias)

    def norm(self, x: Tensor, norm: RMSNorm) -> Tensor:
        return F.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)

    def heads(self, x: Tensor, head_dim: int) -> Tensor:
        return x.view(len(x), -1, head_dim)

    def rope(self, heads: Tensor, rope: Rope, step: Step) -> Tensor:
        return rope(heads, step.start)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, step: Step) -> Tensor:
        return attend(q, k, v, layer, step)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up

    def gated(self, x: Tensor, logit: Tensor) -> Tensor:
        return x * logit.sigmoid()

    def route(self, logits: Tensor, router: Router) -> tuple[Tensor, Tensor]:
        topk_ids, topk_weights = router(logits)
        return topk_ids.to(torch.int32), topk_weights

    def mix(self, outputs: Tensor, weights: Tensor) -> Tensor:
        return torch.bmm(weights.unsqueeze(1), outputs).squeeze(1)

    def host(
        self, function: Callable[..., Tensor], inputs: tuple[Tensor, ...], shape: tuple[int, ...]
    ) -> Tensor:
        result = function(*inputs)
        assert tuple(result.shape) == shape
        return result


def _expert(bank: ExpertBank, slot: int) -> Callable[[Tensor], Tensor]:
    """A slot's feed-forward over [n, hidden]."""
    matrices = ExpertMatrices.of(bank.parts)
    gate, up, down = (
        _in_slot(bank, slot, matrix).float32() for matrix in (matrices.gate, matrices.up, matrices.down)
    )

    def feed_forward(x: Tensor) -> Tensor:
        # One product per token: a product of several rows may add up in another order and give other bits. A clone is
        # an allocation of its own, always aligned alike.
        rows = [row.clone() for row in x]
        return torch.stack([down.mv(F.silu(gate.mv(row)) * up.mv(row)) for row in rows])

    return feed_forward


def _in_slot(bank: ExpertBank, slot: int, matrix: ExpertMatrix) -> Weight:
    assert 0 <= slot < bank.num_slots
    start = slot * bank.stride + matrix.offset
    return Weight(bank.storage[start : start + matrix.nbytes], matrix.dtype, matrix.shape)

"""The reference kernels: dequantise, then multiply in float32. Any device, any dtype that gguf can decode; slow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional as F

from runtime.kernels.expert_matrices import ExpertMatrices
from runtime.kernels.weight import Weight

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from runtime.expert_bank import ExpertBank
    from runtime.kernels.expert_matrices import ExpertMatrix
    from runtime.kernels.rms_norm import RMSNorm


class TorchKernels:
    """Simple enough to be the oracle of the others."""

    name = "torch"

    def embed(self, weight: Weight, token_ids: Tensor) -> Tensor:
        num_rows, hidden = weight.shape
        rows = weight.storage.view(num_rows, -1)[token_ids]
        return Weight(rows.reshape(-1), weight.dtype, (len(token_ids), hidden)).float32()

    def linear(self, x: Tensor, weights: Sequence[Weight], norm: RMSNorm | None = None) -> tuple[Tensor, ...]:
        x = x if norm is None else norm(x)
        return tuple(F.linear(x, weight.float32()) for weight in weights)

    def expert_ffn(self, x: Tensor, slots: Tensor, bank: ExpertBank, norm: RMSNorm | None = None) -> Tensor:
        x = x if norm is None else norm(x)
        assert x.shape[0] == slots.shape[0]
        matrices = ExpertMatrices.of(bank.parts)
        outputs = x.new_empty(*slots.shape, matrices.hidden_size)
        for slot in sorted(set(slots.flatten().tolist())):
            gate, up, down = (
                _in_slot(bank, slot, matrix).float32()
                for matrix in (matrices.gate, matrices.up, matrices.down)
            )
            # One product per token: a product of several rows may add up in another order and give other bits.
            for token, rank in (slots == slot).nonzero().tolist():
                row = x[token].clone()  # its own allocation: always aligned alike
                outputs[token, rank] = down.mv(F.silu(gate.mv(row)) * up.mv(row))
        return outputs

    def feed_forward(
        self, x: Tensor, gate: Weight, up: Weight, down: Weight, norm: RMSNorm | None = None
    ) -> Tensor:
        x = x if norm is None else norm(x)
        return F.linear(F.silu(F.linear(x, gate.float32())) * F.linear(x, up.float32()), down.float32())

    def close(self) -> None:
        """Nothing is kept between calls."""


def _in_slot(bank: ExpertBank, slot: int, matrix: ExpertMatrix) -> Weight:
    assert 0 <= slot < bank.num_slots
    start = slot * bank.stride + matrix.offset
    return Weight(bank.storage[start : start + matrix.nbytes], matrix.dtype, matrix.shape)

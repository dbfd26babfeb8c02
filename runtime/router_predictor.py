"""A guess by a layer's own router, asked one layer early."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from runtime.moe import MoE


class RouterPredictor:
    """Asks a router about the input of the layer before: most of the residual stream passes a layer by unchanged."""

    # That input was normalised with the wrong layer's weights. To put the right ones in their place gave no better
    # guesses (benchmarks/README.md), and is all that could be had from the residual stream itself.

    def __init__(self, moes: Iterable[MoE]) -> None:
        self._routers = {moe.layer: (moe.router, moe.gate_inp.float32()) for moe in moes}

    def predict(self, layer: int, x: Tensor, experts: Sequence[int]) -> list[int]:
        """The top k of the layer's router for `x`."""
        router, gate_inp = self._routers[layer]
        topk_ids, _ = router(x @ gate_inp.T)
        guessed: list[int] = topk_ids[0].tolist()
        return guessed

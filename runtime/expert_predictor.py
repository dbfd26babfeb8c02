"""What guesses the experts of a layer before its router is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class ExpertPredictor(Protocol):
    """Guesses for one token at a time; what it says changes what is read and when, and no bit of a result."""

    def predict(self, layer: int, x: Tensor, experts: Sequence[int]) -> list[int]:
        """The experts that a MoE layer will take, the likeliest first.

        `x` float32 [1, hidden] is what the MoE layer before it was given, `experts` are those that one took.
        """

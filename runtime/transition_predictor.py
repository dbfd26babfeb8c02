"""A guess by what a profile saw: which experts follow those of the layer before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from profiles.routing_profile import RoutingProfile


class TransitionPredictor:
    """Sums, over the experts that were taken, how often each expert of the next MoE layer followed them."""

    def __init__(self, profile: RoutingProfile) -> None:
        """Keep the profile's transitions as shares of each expert's choices."""
        shape = profile.shape
        self._top_k = shape.top_k
        self._shares: dict[int, NDArray[np.float32]] = {  # [num_experts of the layer before, num_experts]
            layer: (
                profile.transitions[index, :before, :num_experts]
                / np.maximum(profile.counts[index, :before, None], 1)
            ).astype(np.float32)
            for index, (before, num_experts, layer) in enumerate(
                zip(shape.num_experts, shape.num_experts[1:], shape.layers[1:], strict=False)
            )
        }

    @property
    def nbytes(self) -> int:
        """What the shares take."""
        return sum(shares.nbytes for shares in self._shares.values())

    def predict(self, layer: int, experts: Sequence[int]) -> list[int]:
        """The top k of a MoE layer, given those that the one before it took; among equals the lower number first."""
        sums = self._shares[layer][list(experts)].sum(0)
        guessed: list[int] = np.argsort(-sums, kind="stable")[: self._top_k].tolist()
        return guessed

"""Routing counts: how often each expert was chosen, and after which expert of the layer before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from profiles.routing_shape import RoutingShape

_CHUNK_PAIRS = 1 << 20
"""Expert pairs counted at a time: 8 MB of indices."""


class RoutingCounts:
    """Sums that grow as tokens are added; layers are padded with zeros to the widest."""

    def __init__(self, shape: RoutingShape) -> None:
        widest = shape.widest
        self.shape = shape
        self.counts: NDArray[np.int64]  # [num_layers, widest]
        self.counts = np.zeros((shape.num_layers, widest), np.int64)
        self.transitions: NDArray[np.int64]  # [num_layers - 1, widest, widest]
        self.transitions = np.zeros((shape.num_layers - 1, widest, widest), np.int64)

    def add(self, topk_ids: NDArray[np.integer]) -> None:
        """Count the choices [num_tokens, num_layers, top_k] of some tokens; the ids have been checked."""
        widest, top_k = self.shape.widest, self.shape.top_k
        step = max(1, _CHUNK_PAIRS // top_k**2)
        for first in range(0, len(topk_ids), step):
            chunk = topk_ids[first : first + step].astype(np.int64)
            for index in range(self.shape.num_layers):
                self.counts[index] += np.bincount(chunk[:, index].ravel(), minlength=widest)
            for index, matrix in enumerate(self.transitions):
                pairs = chunk[:, index, :, None] * widest + chunk[:, index + 1, None, :]
                matrix += np.bincount(pairs.ravel(), minlength=widest**2).reshape(widest, widest)

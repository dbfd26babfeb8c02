"""In which order the experts of a prefill are fetched; the engine and the simulator both ask here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def prefill_order(topk_ids: NDArray[np.integer]) -> list[int]:
    """The experts that a chunk of tokens chose, [n, top_k]: the most chosen first, then the lower number.

    Threads that take them one by one end together when the long ones come first, and the first ones of a fetch are the
    last to go.
    """
    counts = np.bincount(topk_ids.ravel())
    busiest_first: list[int] = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)].tolist()
    return busiest_first

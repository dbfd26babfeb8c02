"""Routing skew: how unevenly a profile's choices spread over the experts.

What it is good for: a layer whose top quarter of experts covers most choices needs only these in fast memory.
Every figure of a layer in which nothing was chosen is 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from profiles.routing_profile import RoutingProfile

COVERAGE_PERCENTS = (10, 25, 50)


@dataclass(frozen=True, slots=True)
class Coverage:
    """The share of all choices that fell on the most chosen experts."""

    percent: int  # of the experts
    num_experts: int  # that many are, rounded up
    share: float  # 0 to 1


@dataclass(frozen=True, slots=True)
class LayerSkew:
    """Figures of one layer's counts."""

    layer: int
    num_experts: int
    busiest_expert: int
    busiest_to_mean: float  # choices of the busiest expert over the mean of all: 1 when even
    entropy_bits: float  # of the choices: log2(num_experts) when even (Shannon 1948)
    gini: float  # 0 when even, towards 1 when one expert takes all (Gini 1912)
    never_chosen: tuple[int, ...]
    coverage: tuple[Coverage, ...]  # one per COVERAGE_PERCENTS

    @classmethod
    def of_counts(cls, layer: int, counts: NDArray[np.int64]) -> LayerSkew:
        """The figures of a layer's counts [num_experts]."""
        total = int(counts.sum())
        shares = counts / max(total, 1)
        positive = shares[shares > 0]
        ranks = np.arange(1, len(counts) + 1)
        gini = (2 * (ranks * np.sort(shares)).sum() - len(counts) - 1) / len(counts) if total else 0.0
        return cls(
            layer=layer,
            num_experts=len(counts),
            busiest_expert=int(counts.argmax()),
            busiest_to_mean=float(shares.max() * len(counts)),
            entropy_bits=max(0.0, float(-(positive * np.log2(positive)).sum())),
            gini=max(0.0, float(gini)),
            never_chosen=tuple(np.flatnonzero(counts == 0).tolist()),
            coverage=_coverage(counts),
        )


@dataclass(frozen=True, slots=True)
class RoutingSkew:
    """Figures of each layer, and of the experts of all layers taken together."""

    layers: tuple[LayerSkew, ...]
    coverage: tuple[Coverage, ...]

    @classmethod
    def of_profile(cls, profile: RoutingProfile) -> RoutingSkew:
        """The figures of a profile; padding does not count."""
        per_layer = [profile.layer_counts(index) for index in range(profile.shape.num_layers)]
        return cls(
            tuple(
                LayerSkew.of_counts(layer, counts)
                for layer, counts in zip(profile.shape.layers, per_layer, strict=True)
            ),
            _coverage(np.concatenate(per_layer)),
        )


def _coverage(counts: NDArray[np.int64]) -> tuple[Coverage, ...]:
    covered = np.cumsum(np.sort(counts)[::-1])
    numbers = [-(-percent * len(counts) // 100) for percent in COVERAGE_PERCENTS]
    return tuple(
        Coverage(percent, number, float(covered[number - 1] / max(covered[-1], 1)))
        for percent, number in zip(COVERAGE_PERCENTS, numbers, strict=True)
    )

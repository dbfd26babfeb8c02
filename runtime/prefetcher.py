"""Reads for the next layer that begin while this one is computed."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmpack.layer_entry import LayerEntry
    from runtime.expert_cache import ExpertCache
    from runtime.expert_fetch import Fetch
    from runtime.transition_predictor import TransitionPredictor


@dataclass(slots=True)
class GuessCounts:
    """How good guesses were, over experts that were not resident: only those cost a read."""

    guessed: int = 0
    needed: int = 0  # by the layers that were guessed for
    right: int = 0  # both


class Prefetcher:
    """Begins a layer's fetch and, behind it, reads of what the next MoE layer is expected to lack."""

    def __init__(
        self,
        cache: ExpertCache,
        moe_layers: Sequence[LayerEntry],
        transitions: TransitionPredictor | None = None,
    ) -> None:
        """`moe_layers` are in the order they run; without transitions, whoever begins a fetch brings the guess."""
        self.cache = cache
        self.transitions = transitions
        self.counts = GuessCounts()
        self._next = {entry.layer: following for entry, following in pairwise(moe_layers)}
        self._guess: tuple[int, list[int]] | None = None  # the layer, and experts that it lacked

    def begin(self, layer: int, experts: Sequence[int], guess: Sequence[int] | None = None) -> Fetch:
        """ExpertCache.begin for one token's experts; `guess` are the next MoE layer's, the likeliest first."""
        self._count(layer, experts)
        fetch = self.cache.begin(layer, experts)
        following = self._next.get(layer)
        if following is not None and self.cache.absent(following.layer, range(following.num_experts)):
            if self.transitions is not None:
                guess = self.transitions.predict(following.layer, experts)
            assert guess is not None
            absent = self.cache.absent(following.layer, guess)
            self.cache.prefetch(following.layer, absent)
            self._guess = (following.layer, absent)
        return fetch

    def _count(self, layer: int, experts: Sequence[int]) -> None:
        """Compare the last guess with what the layer takes."""
        guess, self._guess = self._guess, None
        if guess is None or guess[0] != layer:  # none was made, or an interrupt came between
            return
        needed = self.cache.absent(layer, experts)
        self.counts.guessed += len(guess[1])
        self.counts.needed += len(needed)
        self.counts.right += len(set(needed).intersection(guess[1]))

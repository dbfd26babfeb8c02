"""Layer shares: every layer of a pool keeps about as many experts; within a layer another policy decides.

A token walks through the layers in order, so one order over all of them lets go exactly the layer that comes next
when memory holds less than a token needs. Here the layer that has most residents gives one up, and among those the
one that was walked through last: its next use is farthest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from profiles.slot_pool import SlotPool

if TYPE_CHECKING:
    from collections.abc import Container

    from lmpack.expert_key import ExpertKey
    from profiles.cache_policy import MakePolicy


class LayerShares:
    """One policy per layer of the pool, each made for an equal share of the slots."""

    def __init__(self, pool: SlotPool, make_policy: MakePolicy) -> None:
        share = max(1, round(pool.num_slots / len(pool.layers)))
        self._in_order = [make_policy(SlotPool(share, (layer,))) for layer in pool.layers]
        self._policies = dict(zip(pool.layers, self._in_order, strict=True))
        self._places = {layer: place for place, layer in enumerate(pool.layers)}
        self.name = f"layer+{self._in_order[0].name}"

    def __len__(self) -> int:
        return sum(map(len, self._in_order))

    def touch(self, key: ExpertKey) -> None:
        """Tell the layer's policy."""
        self._policies[key.layer].touch(key)

    def victim(self, newcomer: ExpertKey, protected: Container[ExpertKey]) -> ExpertKey:
        """Ask the layer that has most, the newcomer counted, then the others."""
        here = self._places[newcomer.layer]
        # back from the newcomer's layer; sorting keeps that order among equals
        backwards = [self._in_order[here - steps] for steps in range(len(self._in_order))]
        counts = list(map(len, backwards))
        counts[0] += 1
        for steps in sorted(range(len(counts)), key=counts.__getitem__, reverse=True):
            try:
                return backwards[steps].victim(newcomer, protected)
            except LookupError:
                continue
        raise LookupError(f"all {len(self)} resident experts are protected")

    def forget(self, key: ExpertKey) -> None:
        """Tell the layer's policy."""
        self._policies[key.layer].forget(key)

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
    from profiles.cache_policy import CachePolicy, MakePolicy


class LayerShares:
    """One policy per layer of the pool, each made for an equal share of the slots."""

    def __init__(self, pool: SlotPool, make_policy: MakePolicy) -> None:
        share = max(1, round(pool.num_slots / len(pool.layers)))
        self._policies = {layer: make_policy(SlotPool(share, (layer,))) for layer in pool.layers}
        self._places = {layer: place for place, layer in enumerate(pool.layers)}
        self.name = f"layer+{next(iter(self._policies.values())).name}"

    def __len__(self) -> int:
        return sum(len(policy) for policy in self._policies.values())

    def touch(self, key: ExpertKey) -> None:
        """Tell the layer's policy."""
        self._policies[key.layer].touch(key)

    def victim(self, newcomer: ExpertKey, protected: Container[ExpertKey]) -> ExpertKey:
        """Ask the layer that has most, the newcomer counted, then the others."""
        here, num_layers = self._places[newcomer.layer], len(self._places)

        def surplus(policy_of_layer: tuple[int, CachePolicy]) -> tuple[int, int]:
            layer, policy = policy_of_layer
            num_residents = len(policy) + (layer == newcomer.layer)
            return num_residents, (self._places[layer] - here - 1) % num_layers

        for _, policy in sorted(self._policies.items(), key=surplus, reverse=True):
            try:
                return policy.victim(newcomer, protected)
            except LookupError:
                continue
        raise LookupError(f"all {len(self)} resident experts are protected")

    def forget(self, key: ExpertKey) -> None:
        """Tell the layer's policy."""
        self._policies[key.layer].forget(key)

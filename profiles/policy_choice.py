"""Policy choice: a cache policy by its name, such as lru, layer+lrfu or pin+layer+lru."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmpack.errors import UsageError
from profiles.policies.layer_shares import LayerShares
from profiles.policies.lfu import LFU
from profiles.policies.lrfu import LRFU
from profiles.policies.lru import LRU
from profiles.policies.pinned import Pinned
from profiles.policies.s3_fifo import S3FIFO
from profiles.policies.slru import SLRU
from profiles.slot_pool import SlotPool

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lmpack.expert_key import ExpertKey
    from profiles.cache_policy import CachePolicy, MakePolicy

_PROVEN_SHARE = 0.5  # of the slots, that SLRU gives to experts off probation
_HALF_LIFE = 8  # touches per slot, of LRFU's counts
_PINNED_SHARE = 0.5  # of the slots, that go to the profile's most used experts

ORDERS: Mapping[str, MakePolicy] = {
    "lru": lambda pool: LRU(),
    "lfu": lambda pool: LFU(),
    "slru": lambda pool: SLRU(int(pool.num_slots * _PROVEN_SHARE)),
    "lrfu": lambda pool: LRFU(half_life=pool.num_slots * _HALF_LIFE),
    "s3fifo": lambda pool: S3FIFO(pool.num_slots),
}
"""The policies that stand alone; each is made for the slots it decides about."""


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """An order, over all layers of a pool or within each, and whether the most used experts are pinned."""

    order: str
    per_layer: bool = False
    pinned: bool = False

    @classmethod
    def parse(cls, text: str) -> PolicyChoice:
        """Read a name; raises UsageError that lists them."""
        *extras, order = text.split("+")
        if order not in ORDERS or extras not in ([], ["layer"], ["pin"], ["pin", "layer"]):
            raise UsageError(
                f"no cache policy is called {text[:40]!r}; expected {', '.join(ORDERS)}, each also with layer+ "
                "(a share of the memory for every layer) or pin+ (a profile's most used experts stay) before it, "
                "such as pin+layer+lru"
            )
        return cls(order, per_layer="layer" in extras, pinned="pin" in extras)

    @property
    def name(self) -> str:
        """What parse() reads."""
        return "pin+" * self.pinned + "layer+" * self.per_layer + self.order

    def make(self, pool: SlotPool, most_used: Sequence[ExpertKey] = ()) -> CachePolicy:
        """A policy for a pool; `most_used` are the experts to pin, the most used first, as many as have room."""
        pins: Sequence[ExpertKey] = ()
        if self.pinned:
            pins = pool.first_that_fit(most_used)[: int(pool.num_slots * _PINNED_SHARE)]
        others = SlotPool(pool.num_slots - len(pins), pool.layers)
        make_order = ORDERS[self.order]
        policy = LayerShares(others, make_order) if self.per_layer else make_order(others)
        return Pinned(pins, policy) if self.pinned else policy


DEFAULT_POLICY = PolicyChoice("lrfu", per_layer=True)
"""What reads least on recorded traces: benchmarks/policies.py prints the table."""

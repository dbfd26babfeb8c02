"""Cache simulation: a trace replayed through a policy, fetch for fetch as the runtime's cache asks for experts."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from lmpack.expert_key import ExpertKey
from profiles.prefill_order import prefill_order

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from profiles.cache_policy import CachePolicy
    from profiles.routing_trace import RoutingTrace
    from profiles.slot_pool import SlotPool


@dataclass(frozen=True, slots=True)
class Demand:
    """Experts of one layer that must be resident together; no expert twice."""

    keys: tuple[ExpertKey, ...]
    is_decode: bool  # for one token, not for a chunk of them


@dataclass(frozen=True, slots=True)
class CacheFigures:
    """Look-ups that found their expert resident, those that did not, and who went for them."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0

    def __add__(self, other: CacheFigures) -> CacheFigures:
        """Both together."""
        return CacheFigures(
            self.hits + other.hits, self.misses + other.misses, self.evictions + other.evictions
        )

    @property
    def hit_rate(self) -> float:
        """Share of look-ups that hit; 1 when there were none."""
        lookups = self.hits + self.misses
        return self.hits / lookups if lookups else 1.0


@dataclass(frozen=True, slots=True)
class Simulation:
    """Figures of one pool, apart for chunks of tokens and for single ones."""

    prefill: CacheFigures
    decode: CacheFigures

    @property
    def total(self) -> CacheFigures:
        """Of both."""
        return self.prefill + self.decode


def trace_demands(trace: RoutingTrace, pool: SlotPool) -> Iterator[Demand]:
    """What a run of the trace's tokens fetches from a pool, in order.

    A chunk fetches each expert once per layer, in prefill_order; where they are more than the pool has slots, in waves.
    """
    layers = [
        (index, [ExpertKey(layer, expert) for expert in range(trace.shape.num_experts[index])])
        for index, layer in enumerate(trace.shape.layers)
        if layer in pool.layers
    ]
    offsets = trace.chunk_offsets.tolist()
    for first, last in pairwise(offsets):
        for index, keys in layers:
            ids = trace.topk_ids[first:last, index]
            is_decode = len(ids) == 1
            experts = ids[0].tolist() if is_decode else prefill_order(ids)
            for wave in range(0, len(experts), pool.num_slots):
                wanted = experts[wave : wave + pool.num_slots]
                yield Demand(tuple(keys[expert] for expert in wanted), is_decode)


def simulate(
    demands: Iterable[Demand], pool: SlotPool, policy: CachePolicy, warm: Sequence[ExpertKey] = ()
) -> Simulation:
    """Serve the demands with a pool that starts empty, or with as many of `warm` as fit, the first ones."""
    resident = set(pool.first_that_fit(warm))
    for key in reversed(pool.first_that_fit(warm)):  # the first one is the best to keep
        policy.touch(key)
    prefill = decode = CacheFigures()
    for demand in demands:
        missing = [key for key in demand.keys if key not in resident]
        for key in reversed(demand.keys):
            if key in resident:
                policy.touch(key)
        num_evicted = 0
        for key in missing:
            if len(resident) == pool.num_slots:
                victim = policy.victim(key, demand.keys)
                policy.forget(victim)
                resident.remove(victim)
                num_evicted += 1
            resident.add(key)
        for key in reversed(missing):
            policy.touch(key)
        figures = CacheFigures(len(demand.keys) - len(missing), len(missing), num_evicted)
        if demand.is_decode:
            decode += figures
        else:
            prefill += figures
    return Simulation(prefill, decode)

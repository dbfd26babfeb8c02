"""Which experts are resident: a policy decides, a store moves."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from lmpack.errors import BudgetError
from lmpack.expert_key import ExpertKey
from profiles.cache_policy import LRU

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from profiles.cache_policy import CachePolicy
    from runtime.expert_bank import ExpertBank
    from runtime.expert_layout import ExpertLayout
    from runtime.expert_store import ExpertStore
    from runtime.memory_budget import MemoryBudget


class ExpertCache:
    """At most `budget.slots` experts of each layout are resident, each in a slot that does not move."""

    def __init__(
        self,
        store: ExpertStore,
        budget: MemoryBudget,
        make_policy: Callable[[], CachePolicy] = LRU,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.store = store
        self.hits = 0
        self.misses = 0
        self.evictions = 0
        self.bytes_read = 0
        self.read_s = 0.0
        self._clock = clock
        self._pools = {
            layer: pool
            for layout, num_slots in zip(budget.layouts, budget.slots, strict=True)
            for pool in [_Residents(layout, num_slots, make_policy())]
            for layer in layout.layers
        }
        self.policy_name = make_policy().name

    def bank(self, layer: int) -> ExpertBank:
        """The memory that the slots of this layer are in."""
        return self.store.bank(layer)

    def capacity(self, layer: int) -> int:
        """How many experts of this layer can be resident at once."""
        return self._pools[layer].num_slots

    def fetch(self, layer: int, experts: Sequence[int]) -> list[int]:
        """Slots of these experts, all resident until the next fetch; misses are read in parallel.

        BudgetError when they are more than `capacity`; StorageError when one cannot be read, which leaves
        the ones read before resident and the others not.
        """
        pool = self._pools[layer]
        slots = pool.slots
        keys = [ExpertKey(layer, expert) for expert in experts]
        missing = [key for key in dict.fromkeys(keys) if key not in slots]
        for key in keys:
            if key in slots:
                pool.policy.touch(key)
        self.hits += len(keys) - len(missing)
        if missing:
            self._read(pool, missing, frozenset(keys))
        return [slots[key] for key in keys]

    def close(self) -> None:
        """Forget everything and close the store."""
        self._pools.clear()
        self.store.close()

    def _read(self, pool: _Residents, missing: Sequence[ExpertKey], needed: frozenset[ExpertKey]) -> None:
        if len(needed) > pool.num_slots:
            raise BudgetError(
                f"{len(needed)} experts at once do not fit {pool.num_slots} slots; use more --ram"
            )
        while len(pool.slots) + len(missing) > pool.num_slots:
            victim = pool.policy.victim(needed)
            self._release(pool, victim)
            self.evictions += 1
        acquired = []
        for key in missing:
            pool.slots[key] = self.store.acquire(key)
            pool.policy.touch(key)
            acquired.append(pool.slots[key])
        started = self._clock()
        try:
            self.store.load(missing, acquired)
        except BaseException:
            for key in missing:
                self._release(pool, key)
            raise
        self.read_s += self._clock() - started
        self.misses += len(missing)
        self.bytes_read += len(missing) * pool.layout.stride

    def _release(self, pool: _Residents, key: ExpertKey) -> None:
        pool.policy.forget(key)
        self.store.release(key, pool.slots.pop(key))


class _Residents:
    """Who is resident among the experts of one layout."""

    def __init__(self, layout: ExpertLayout, num_slots: int, policy: CachePolicy) -> None:
        self.layout = layout
        self.num_slots = num_slots
        self.policy = policy
        self.slots: dict[ExpertKey, int] = {}

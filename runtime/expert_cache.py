"""Which experts are resident: a policy decides, a store moves."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from lmpack.errors import BudgetError
from lmpack.expert_key import ExpertKey
from profiles.policy_choice import DEFAULT_POLICY
from profiles.slot_pool import SlotPool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from profiles.cache_policy import CachePolicy, MakePolicy
    from runtime.expert_bank import ExpertBank
    from runtime.expert_store import ExpertStore
    from runtime.memory_budget import MemoryBudget


class ExpertCache:
    """Keeps as many experts of each layout resident as the store has slots, each in a slot that does not move.

    Called from one thread at a time. `hits` and `misses` count an expert once per fetch that asks for it;
    `bytes_read` is what the misses took, `read_s` the seconds by `clock` that fetches waited for them.
    """

    def __init__(
        self,
        store: ExpertStore,
        budget: MemoryBudget,
        make_policy: MakePolicy = DEFAULT_POLICY.make,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Take over the store, to close it with the cache; each layout of the budget gets a policy of its own."""
        self.store = store
        self.hits = 0
        self.misses = 0
        self.evictions = 0
        self.bytes_read = 0
        self.read_s = 0.0
        self._clock = clock
        self._layers: dict[int, _LayerResidents] = {}
        self.policy_name = "none"  # of a dense model
        for layout in budget.layouts:
            policy = make_policy(SlotPool(store.num_slots(layout.layers[0]), layout.layers))
            self.policy_name = policy.name
            for layer in layout.layers:
                self._layers[layer] = _LayerResidents(layer, layout.stride, policy)

    def bank(self, layer: int) -> ExpertBank:
        """The memory that the slots of this layer are in."""
        return self.store.bank(layer)

    def capacity(self, layer: int) -> int:
        """How many experts of this layer can be resident at once."""
        return self.store.num_slots(layer)

    def fetch(self, layer: int, experts: Sequence[int]) -> list[int]:
        """Slots of these experts of one layer, in their order, all resident until the next fetch.

        Misses are read in parallel; no expert of the call has to go for another. BudgetError when they are more
        than `capacity`; StorageError, which names the expert, when one cannot be read: then no miss of the call
        becomes resident, and the cache goes on working.
        """
        residents = self._layers[layer]
        slots, keys, policy = residents.slots, residents.keys, residents.policy
        wanted = dict.fromkeys(experts)
        missing = [expert for expert in wanted if expert not in slots]
        if missing:
            self._check_room(layer, len(wanted))
        for expert in wanted:
            if expert in slots:
                policy.touch(keys[expert])
        if missing:
            self._read(residents, missing, {residents.key(expert) for expert in wanted})
        self.hits += len(wanted) - len(missing)
        return [slots[expert] for expert in experts]

    def close(self) -> None:
        """Forget everything and close the store; a second time does nothing."""
        for residents in self._layers.values():
            residents.slots.clear()
        self.store.close()

    def _check_room(self, layer: int, num_experts: int) -> None:
        if num_experts > self.capacity(layer):
            raise BudgetError(
                f"layer {layer}: {num_experts} experts at once do not fit {self.capacity(layer)} slots; "
                "use more --ram"
            )

    def _read(self, residents: _LayerResidents, missing: Sequence[int], needed: set[ExpertKey]) -> None:
        keys = [residents.key(expert) for expert in missing]
        acquired: list[int] = []
        try:
            for key in keys:
                acquired.append(self._acquire(residents.policy, key, needed))
            started = self._clock()
            self.store.load(keys, acquired)
            self.read_s += self._clock() - started
        except BaseException:
            for key, slot in zip(keys, acquired, strict=False):  # those after the one that failed have none
                self.store.release(key, slot)
            raise
        for key, slot in zip(keys, acquired, strict=True):
            residents.slots[key.expert] = slot
            residents.policy.touch(key)
        self.misses += len(keys)
        self.bytes_read += len(keys) * residents.stride

    def _acquire(self, policy: CachePolicy, key: ExpertKey, needed: set[ExpertKey]) -> int:
        """A slot, for which experts outside of `needed` go when there is none."""
        while (slot := self.store.acquire(key)) is None:
            victim = policy.victim(key, needed)
            policy.forget(victim)
            self.store.release(victim, self._layers[victim.layer].slots.pop(victim.expert))
            self.evictions += 1
        return slot


class _LayerResidents:
    """Who is resident in one layer, and where."""

    def __init__(self, layer: int, stride: int, policy: CachePolicy) -> None:
        self.stride = stride
        self.policy = policy  # shared with the other layers of the layout
        self.slots: dict[int, int] = {}  # expert -> slot
        self.keys: dict[int, ExpertKey] = {}  # expert -> key, made once
        self._layer = layer

    def key(self, expert: int) -> ExpertKey:
        if expert not in self.keys:
            self.keys[expert] = ExpertKey(self._layer, expert)
        return self.keys[expert]

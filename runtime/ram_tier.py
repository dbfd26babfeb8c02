"""The experts that are in memory and not on the compute device."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from profiles.slot_pool import SlotPool

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from lmpack.expert_key import ExpertKey
    from profiles.cache_policy import CachePolicy, MakePolicy
    from runtime.copy_stream import CopyEvent
    from runtime.expert_store import ExpertStore
    from runtime.memory_budget import MemoryBudget


@dataclass(frozen=True, slots=True, eq=False)
class HostSlot:
    """A slot of the tier that somebody uses for an expert; the tier touches it no more until it is given back."""

    key: ExpertKey
    slot: int
    storage: Tensor  # uint8 [stride]
    filling: CopyEvent | None  # a copy into it that may not have ended
    drive_nbytes: int = 0  # what filling it took from the drive


class RamTier:
    """Keeps experts that the device has let go, as many as the store has slots; the policy says who goes for them.

    An expert is lent to the device and leaves, or is read from the drive for it: it is never in both. `lend` and
    `give_back` are for any thread, the rest for one. `hits` counts the experts that were here when they were asked for.
    """

    def __init__(self, store: ExpertStore, budget: MemoryBudget, make_policy: MakePolicy) -> None:
        """Take over a store in this process's memory, to close it with the tier."""
        self.hits = 0
        self._store = store
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._kept: dict[ExpertKey, int] = {}  # slots
        self._filling: dict[int, CopyEvent] = {}  # address of a slot -> the last copy into it
        self._policies: dict[int, CachePolicy] = {}  # by layer
        for layout in budget.layouts:
            policy = make_policy(SlotPool(store.num_slots(layout.layers[0]), layout.layers))
            self._policies |= dict.fromkeys(layout.layers, policy)

    @property
    def name(self) -> str:
        """How it reads from the drive."""
        return self._store.name

    def __contains__(self, key: ExpertKey) -> bool:
        with self._lock:
            return key in self._kept

    def storages(self) -> Iterator[Tensor]:
        """All the memory that slots are in, each piece once."""
        pieces = [self._store.bank(layer).storage for layer in self._policies]
        yield from {piece.data_ptr(): piece for piece in pieces}.values()

    def lend(self, key: ExpertKey) -> HostSlot:
        """The expert in a slot, from the drive where it is not here; a copy from there comes after all so far.

        Waits while all slots are lent. Raises StorageError, which names layer and expert, when it cannot be read.
        """
        with self._lock:
            if key in self._kept:
                self._policies[key.layer].forget(key)
                self.hits += 1
                return self._lent(key, self._kept.pop(key))
            while (lent := self._room(key)) is None:
                self._changed.wait()
        try:
            if lent.filling is not None:
                lent.filling.synchronize()
            drive_nbytes = self._store.read(key, lent.slot)
        except BaseException:
            self.give_back(lent)
            raise
        return HostSlot(key, lent.slot, lent.storage, None, drive_nbytes)

    def room(self, key: ExpertKey) -> HostSlot | None:
        """A slot for an expert that leaves the device, or None when all are lent."""
        with self._lock:
            return self._room(key)

    def keep(self, lent: HostSlot, filling: CopyEvent) -> None:
        """Keep the expert that this copy, submitted before now, brings into its slot."""
        with self._lock:
            self._filling[lent.storage.data_ptr()] = filling
            self._kept[lent.key] = lent.slot
            self._policies[lent.key.layer].touch(lent.key)
            self._changed.notify_all()

    def give_back(self, lent: HostSlot) -> None:
        """The slot is free, and no copy uses it any more."""
        with self._lock:
            self._store.release(lent.key, lent.slot)
            self._changed.notify_all()

    def close(self) -> None:
        """Give all memory back, when nothing is lent any more; a second time does nothing."""
        self._kept.clear()
        self._store.close()

    def _room(self, key: ExpertKey) -> HostSlot | None:
        slot = self._store.acquire(key)
        if slot is None:
            policy = self._policies[key.layer]
            try:
                victim = policy.victim(key, ())
            except LookupError:
                return None
            policy.forget(victim)
            self._store.release(victim, self._kept.pop(victim))
            slot = self._store.acquire(key)
            assert slot is not None, "one has just become free"
        return self._lent(key, slot)

    def _lent(self, key: ExpertKey, slot: int) -> HostSlot:
        bank = self._store.bank(key.layer)
        storage = bank.storage[slot * bank.stride : (slot + 1) * bank.stride]
        return HostSlot(key, slot, storage, self._filling.pop(storage.data_ptr(), None))

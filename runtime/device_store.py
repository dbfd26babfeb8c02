"""Experts in memory on the compute device; a tier of RAM lies between it and the drive."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from runtime.expert_bank import ExpertBank
from runtime.expert_store import open_store
from runtime.ram_tier import RamTier

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from lmpack.expert_key import ExpertKey
    from lmpack.pack import Pack
    from profiles.cache_policy import MakePolicy
    from runtime.copy_stream import CopyStream
    from runtime.expert_layout import ExpertLayout
    from runtime.memory_budget import MemoryBudget


class DeviceStore:
    """Copies experts from the RAM tier into slots on the device, and those that leave the device back into it.

    What makes it right: copies run in the order in which they are submitted. An expert's way out of a slot is
    submitted before the slot is free for the next one's way in, and neither begins before what was computed with it
    has ended. The thread that reads an expert waits for its copy, so that a computation waits for no other's.
    """

    def __init__(self, ram: RamTier, budget: MemoryBudget, copies: CopyStream) -> None:
        """Take over the tier and the stream, to close them with the store."""
        self.ram = ram
        self._copies = copies
        self._closed = False
        self._filled: set[ExpertKey] = set()  # on the device, whole
        self._pools = {
            layer: pool
            for layout, num_slots in zip(budget.layouts, budget.slots, strict=True)
            for pool in [_DeviceSlots(copies, layout, num_slots)]
            for layer in layout.layers
        }
        for storage in ram.storages():
            copies.pin(storage)

    @classmethod
    def open(
        cls,
        pack: Pack,
        budget: MemoryBudget,
        ram_budget: MemoryBudget,
        make_policy: MakePolicy,
        copies: CopyStream,
        *,
        verify: bool = False,
        progress: Callable[[int], None] = lambda _: None,
    ) -> DeviceStore:
        """A store over a tier that reads past the page cache; takes over the stream."""
        with ExitStack() as undo:
            undo.callback(copies.close)
            store = open_store("direct", pack, ram_budget, verify=verify, progress=progress)
            undo.callback(store.close)
            opened = cls(RamTier(store, ram_budget, make_policy), budget, copies)
            undo.pop_all()
        return opened

    @property
    def name(self) -> str:
        return f"{self.ram.name}, through RAM to the device"

    def bank(self, layer: int) -> ExpertBank:
        return self._pool(layer).bank

    def num_slots(self, layer: int) -> int:
        return self._pool(layer).bank.num_slots

    def acquire(self, key: ExpertKey) -> int | None:
        free_slots = self._pool(key.layer).free_slots
        return free_slots.pop() if free_slots else None

    def read(self, key: ExpertKey, slot: int) -> int:
        target = self._pool(key.layer).slot(slot)
        lent = self.ram.lend(key)
        try:
            self._copies.copy(lent.storage, target).synchronize()
        finally:
            self.ram.give_back(lent)
        self._filled.add(key)
        return lent.drive_nbytes

    def release(self, key: ExpertKey, slot: int) -> None:
        pool = self._pool(key.layer)
        if key in self._filled:  # or its read failed
            self._filled.remove(key)
            self._copies.follow_compute()
            lent = self.ram.room(key)
            if lent is not None:
                self.ram.keep(lent, self._copies.copy(pool.slot(slot), lent.storage))
        pool.free_slots.append(slot)

    def close(self) -> None:
        self._closed = True
        self._pools.clear()
        self._copies.close()
        self.ram.close()

    def _pool(self, layer: int) -> _DeviceSlots:
        if self._closed:
            raise ValueError("the expert store is closed")
        return self._pools[layer]


class _DeviceSlots:
    """The slots of one layout, in one bank; any of them takes any expert."""

    def __init__(self, copies: CopyStream, layout: ExpertLayout, num_slots: int) -> None:
        storage = copies.allocate(num_slots * layout.stride)
        self.bank = ExpertBank(storage, layout.stride, num_slots, layout.parts)
        self.free_slots = list(reversed(range(num_slots)))  # popped from the end

    def slot(self, slot: int) -> Tensor:
        start = slot * self.bank.stride
        return self.bank.storage[start : start + self.bank.stride]

"""Which store reads a pack, and with how many reads in flight: asked for, or measured once for each drive.

Where all experts fit, none is ever let go and a drive's rate matters only once: what counts then is that the kernel
keeps them for the next run, and that memory of our own need not be provided first.
"""

from __future__ import annotations

import random
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lmpack.byte_size import format_nbytes
from lmpack.errors import StorageError, UsageError
from lmpack.expert_key import ExpertKey
from runtime.direct_store import DirectStore
from runtime.drive_memory import recall_rates, remember_rates
from runtime.expert_readers import NUM_READERS, ExpertReaders, Read
from runtime.mmap_store import MmapStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmpack.pack import Pack
    from runtime.drive_memory import Rates
    from runtime.expert_store import ExpertStore
    from runtime.memory_budget import MemoryBudget

DEPTHS = (4, 8, 16)
_LIMIT_S = 0.25  # of each of the six measurements
_SMALLEST_NBYTES = 256 << 20  # of experts: below, reading all of them takes less time than measuring
_FASTER = 1.1  # direct reads keep to the budget exactly; others must be worth it
_ENOUGH = 0.95  # of the best rate: more reads in flight only wait longer for each other
_STORES = {"direct": DirectStore, "mmap": MmapStore}


@dataclass(frozen=True, slots=True)
class IoChoice:
    """How experts are read, and why."""

    store: str  # "mmap" or "direct"
    num_readers: int
    reason: str


def choose_io(name: str, pack: Pack, budget: MemoryBudget, *, anew: bool = False) -> IoChoice:
    """The store called `name`; for "auto", what is fastest on the drive that the pack is on.

    A drive is measured when it has not been before, or `anew`.
    """
    if name in _STORES:
        return IoChoice(name, NUM_READERS, "asked for")
    if name != "auto":
        raise UsageError(f"no store is called {name!r}; expected auto, mmap or direct")
    if pack.manifest.is_compressed:
        return IoChoice("direct", NUM_READERS, "compressed files cannot be mapped")
    if pack.reference is not None:
        return IoChoice("direct", NUM_READERS, "an expert's parts lie apart")
    if sum(layout.nbytes for layout in budget.layouts) < _SMALLEST_NBYTES:
        return IoChoice("direct", NUM_READERS, f"below {format_nbytes(_SMALLEST_NBYTES)} it is not measured")
    if budget.resident_share == 1.0:
        return IoChoice("mmap", NUM_READERS, "all of it fits")
    expert_nbytes = max(layout.stride for layout in budget.layouts)
    damage = ""
    try:
        rates = recall_rates(pack.path, expert_nbytes)
    except StorageError as error:
        rates, damage = None, f" ({error})"
    if rates is not None and not anew:
        return fastest(rates, "measured before")
    rates = measure_stores(pack, budget)
    failure = remember_rates(pack.path, expert_nbytes, rates)
    return fastest(
        rates, f"measured now, but not remembered: {failure}" if failure else f"measured now{damage}"
    )


def device_io(name: str) -> IoChoice:
    """How experts are read that go on to a compute device with memory of its own."""
    if name == "mmap":
        raise UsageError("--io mmap leaves no memory to copy to a GPU from; use --io direct or auto")
    return IoChoice(
        "direct", NUM_READERS, "asked for" if name == "direct" else "for a GPU it is always direct"
    )


def fastest(rates: Rates, when: str) -> IoChoice:
    """The faster store, and the fewest reads in flight that are near its best."""
    best = {store: max(by_depth.values()) for store, by_depth in rates.items()}
    store = "mmap" if best["mmap"] > _FASTER * best["direct"] else "direct"
    depth = min(depth for depth, rate in rates[store].items() if rate >= _ENOUGH * best[store])
    return IoChoice(store, depth, f"{when}: direct {best['direct']:.2f} GB/s, mmap {best['mmap']:.2f}")


def measure_stores(pack: Pack, budget: MemoryBudget) -> Rates:
    """GB/s of each store with so many reads in flight, over random experts that the page cache had forgotten.

    It takes some 1.5 seconds, and no more memory than the budget gives to experts.
    """
    layout = max(budget.layouts, key=lambda layout: layout.nbytes)
    keys = [
        ExpertKey(layer, expert)
        for layer in layout.layers
        for expert in range(pack.manifest.layer(layer).num_experts)
    ]
    random.Random(0).shuffle(keys)
    share = max(1, len(keys) // (len(DEPTHS) * len(_STORES)))  # no expert is read twice
    rates: dict[str, dict[int, float]] = {store: {} for store in _STORES}
    for depth in DEPTHS:
        for name, open_store in _STORES.items():
            slots = tuple(min(2 * depth, slots) for slots in budget.slots)
            batch, keys = keys[:share], keys[share:] + keys[:share]
            store = open_store(pack, replace(budget, slots=slots))
            readers = ExpertReaders(store.read, depth)
            try:
                num_read, spent_s = _read_for(store, readers, batch, _LIMIT_S)
            finally:
                readers.close()
                store.close()
            rates[name][depth] = num_read * layout.stride / spent_s / 1e9
    return rates


def _read_for(
    store: ExpertStore, readers: ExpertReaders, keys: Sequence[ExpertKey], limit_s: float
) -> tuple[int, float]:
    """Read experts, each once, for so long; how many, and how long it took."""
    under_way: deque[Read] = deque()

    def end_oldest() -> None:
        read = under_way.popleft()
        read.wakeup.get()
        if read.error is not None:
            raise read.error
        store.release(read.key, read.slot)

    num_read = 0
    started = time.perf_counter()
    for key in keys:
        if time.perf_counter() - started > limit_s:
            break
        while (slot := store.acquire(key)) is None:
            end_oldest()
        under_way.append(Read(key, slot))
        readers.start(under_way[-1])
        num_read += 1
    while under_way:
        end_oldest()
    return num_read, time.perf_counter() - started

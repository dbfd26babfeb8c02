"""The ways from a pack's expert files to memory on the compute device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from lmpack.errors import UsageError
from runtime.verified_store import VerifiedStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from lmpack.expert_key import ExpertKey
    from lmpack.pack import Pack
    from runtime.expert_bank import ExpertBank
    from runtime.memory_budget import MemoryBudget


class ExpertStore(Protocol):
    """Moves experts into slots of banks and decides nothing.

    Called from one thread at a time, read() aside; after close() every other call is a ValueError.
    """

    @property
    def name(self) -> str:
        """How it reads, as reports print it; where that is not what was asked for, with the reason."""

    def bank(self, layer: int) -> ExpertBank:
        """The memory that this layer's slots are in; no tensor over it may be used after close()."""

    def num_slots(self, layer: int) -> int:
        """How many experts can be resident at once among the layers that share this layer's slots."""

    def acquire(self, key: ExpertKey) -> int | None:
        """A slot of `bank(key.layer)` for an expert that has none; None when all are taken."""

    def read(self, key: ExpertKey, slot: int) -> int:
        """Read an expert into the slot it acquired; several threads may read at once, each another slot.

        Returns how many bytes came from the drive. Raises StorageError, which names layer and expert, when it cannot
        be read; the store goes on working.
        """

    def release(self, key: ExpertKey, slot: int) -> None:
        """Give back an expert's slot that nobody is reading into; its bytes are gone."""

    def close(self) -> None:
        """Give all memory back, when nobody is reading any more; a second time does nothing."""


def open_store(
    name: str,
    pack: Pack,
    budget: MemoryBudget,
    *,
    verify: bool = False,
    progress: Callable[[int], None] = lambda _: None,
) -> ExpertStore:
    """The store called "mmap" or "direct"; with `verify`, each expert's first read is compared with the manifest.

    `progress` is told of bytes of memory as they are provided, where a store needs that.
    """
    store = _open(name, pack, budget, progress)
    return VerifiedStore(store, pack) if verify else store


def _open(name: str, pack: Pack, budget: MemoryBudget, progress: Callable[[int], None]) -> ExpertStore:
    if name == "mmap":
        from runtime.mmap_store import MmapStore

        return MmapStore(pack, budget)
    if name == "direct":
        from runtime.direct_store import DirectStore

        return DirectStore(pack, budget, progress=progress)
    raise UsageError(f"no store is called {name!r}; expected mmap or direct")

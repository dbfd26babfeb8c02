"""The ways from a pack's expert files to memory on the compute device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from lmpack.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmpack.expert_key import ExpertKey
    from lmpack.pack import Pack
    from runtime.expert_bank import ExpertBank
    from runtime.memory_budget import MemoryBudget


class ExpertStore(Protocol):
    """Moves experts into slots of banks and decides nothing; called from one thread at a time."""

    @property
    def name(self) -> str:
        """How it reads, as reports print it."""

    def bank(self, layer: int) -> ExpertBank:
        """The memory that holds this layer's experts; no tensor over it outlives the store."""

    def acquire(self, key: ExpertKey) -> int:
        """A slot for an expert that has none; the caller sees to it that there is room."""

    def load(self, keys: Sequence[ExpertKey], slots: Sequence[int]) -> None:
        """Read experts into their slots, in parallel; StorageError names layer and expert of the first failure."""

    def release(self, key: ExpertKey, slot: int) -> None:
        """Give an expert's slot and memory back."""

    def close(self) -> None:
        """Join all threads and give all memory back; a second time does nothing."""


def open_store(name: str, pack: Pack, budget: MemoryBudget) -> ExpertStore:
    """The store called "mmap" or "direct"; "auto" is direct, which never shares memory with the page cache."""
    if name == "mmap":
        from runtime.mmap_store import MmapStore

        return MmapStore(pack)
    if name in ("auto", "direct"):
        from runtime.direct_store import DirectStore

        return DirectStore(pack, budget)
    raise UsageError(f"no store is called {name!r}; expected auto, mmap or direct")

"""Experts read whole from the drive, past the page cache, into slots of anonymous memory."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from typing import TYPE_CHECKING

import numpy as np

from lmpack.alignment import align_up
from lmpack.errors import StorageError
from lmpack.expert_key import ExpertKey
from lmpack.storage import RAW_STORAGE
from runtime.address_range import AddressRange
from runtime.compressed_experts import CompressedExperts
from runtime.expert_bank import ExpertBank
from runtime.expert_files import ExpertFiles, drop_extent
from runtime.page_cache import is_wholly_cached
from runtime.reading_room import ReadingRoom

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from lmpack.pack import Pack
    from lmpack.reference import FileExtent
    from runtime.expert_layout import ExpertLayout
    from runtime.memory_budget import MemoryBudget

_HUGE_PAGE_NBYTES = 2 << 20


class DirectStore:
    """Keeps experts in memory of its own: one allocation per layout, in huge pages, provided at once where not all
    experts fit, and otherwise when first filled.

    It reads with O_DIRECT; where the file system refuses that, through the page cache. Which of the two runs is
    fixed when the store is opened: see `direct` and `name`. An expert that the page cache holds is taken from
    there. Either way the page cache forgets it right after: nothing is kept twice.
    """

    def __init__(
        self,
        pack: Pack,
        budget: MemoryBudget,
        *,
        buffered: bool = False,
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`buffered` asks for reads through the page cache even where O_DIRECT works; `progress` is told of bytes of
        memory as the kernel provides them."""
        self._closed = False
        self._pack = pack
        self._files = ExpertFiles(pack)
        self._pools = {
            layer: pool
            for layout, num_slots in zip(budget.layouts, budget.slots, strict=True)
            for pool in [_SlotPool(pack, layout, num_slots, progress)]
            for layer in layout.layers
        }
        self._room = None if pack.manifest.storage == RAW_STORAGE else ReadingRoom(pack.manifest)
        self._compressed = CompressedExperts(pack) if pack.manifest.is_compressed else None
        self._reason = "asked for" if buffered else self._refusal(pack)

    @property
    def direct(self) -> bool:
        """Whether reads go past the page cache."""
        return not self._reason

    @property
    def name(self) -> str:
        """ "direct", with the reason where reads are buffered after all, and what else reading takes."""
        notes = [] if self.direct else [f"buffered: {self._reason}"]
        notes += [] if self._compressed is None else ["decompressing"]
        notes += [] if self._pack.reference is None else ["part by part"]
        return f"direct ({', '.join(notes)})" if notes else "direct"

    def bank(self, layer: int) -> ExpertBank:
        return self._pool(layer).banks[layer]

    def num_slots(self, layer: int) -> int:
        return self._pool(layer).num_slots

    def acquire(self, key: ExpertKey) -> int | None:
        return self._pool(key.layer).acquire(key)

    def read(self, key: ExpertKey, slot: int) -> int:
        target = self._pool(key.layer).view(key.layer, slot)
        room = target if self._room is None else self._room.room()
        nbytes = 0
        for extent in self._pack.expert_extents(key):
            lead = extent.offset % mmap.PAGESIZE  # O_DIRECT reads whole pages
            nbytes += self._read_pages(key, extent, room)
            if self._pack.reference is not None:
                part = np.frombuffer(target, np.uint8, extent.nbytes, extent.at)
                np.copyto(part, np.frombuffer(room, np.uint8, extent.nbytes, lead))  # lets other threads run
        if self._compressed is not None:
            self._compressed.restore(key, room, target)
        return nbytes

    def _read_pages(self, key: ExpertKey, extent: FileExtent, room: memoryview) -> int:
        """Read the pages that hold an extent; how many bytes the file gave."""
        start = extent.offset // mmap.PAGESIZE * mmap.PAGESIZE
        done, wanted = 0, extent.offset + extent.nbytes - start
        with self._files.open(key, extent, os.O_DIRECT if self.direct else 0) as descriptor:
            buffered = not self.direct
            if self.direct and is_wholly_cached(descriptor, extent.nbytes, extent.offset):
                fcntl.fcntl(descriptor, fcntl.F_SETFL, 0)  # no O_DIRECT
                buffered = True
            while done < wanted:
                pages = room[done : align_up(wanted, mmap.PAGESIZE)]
                got = os.preadv(descriptor, [pages], start + done)
                if got == 0:
                    raise StorageError(f"ends at byte {start + done} of {extent.file_nbytes}")
                done += got
            if buffered:
                drop_extent(descriptor, extent)
        return done

    def release(self, key: ExpertKey, slot: int) -> None:
        self._pool(key.layer).release(slot)

    def close(self) -> None:
        self._closed = True
        for pool in set(self._pools.values()):
            pool.close()
        self._pools.clear()

    def _pool(self, layer: int) -> _SlotPool:
        if self._closed:
            raise ValueError("the expert store is closed")
        return self._pools[layer]

    def _refusal(self, pack: Pack) -> str:
        for entry in pack.manifest.layers[:1]:
            extent = pack.expert_extents(ExpertKey(entry.layer, 0))[-1]
            last_byte = extent.offset + extent.nbytes - 1
            return refusal_of_direct_reads(extent.path, last_byte // mmap.PAGESIZE * mmap.PAGESIZE)
        return ""


def refusal_of_direct_reads(path: Path, offset: int) -> str:
    """Why the file system does not read the page at `offset` with O_DIRECT; empty when it does.

    Only EINVAL counts, open(2)'s and read(2)'s answer for files and alignments that O_DIRECT does not serve;
    whatever else is wrong is left to the reads themselves, which name the expert.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        try:
            with mmap.mmap(-1, mmap.PAGESIZE) as page:
                os.preadv(descriptor, [page], offset)
        finally:
            os.close(descriptor)
    except OSError as error:
        return "the file system refuses O_DIRECT" if error.errno == errno.EINVAL else ""
    return ""


class _SlotPool:
    """The slots of one layout.

    Where all its experts fit, each layer has a bank of its own, in which slot e is expert e. Otherwise the layers
    share one bank, and any slot takes any of their experts.
    """

    def __init__(
        self, pack: Pack, layout: ExpertLayout, num_slots: int, progress: Callable[[int], None]
    ) -> None:
        self.num_slots = num_slots
        self.banks: dict[int, ExpertBank] = {}
        self._stride = layout.stride
        self._range = AddressRange(num_slots * layout.stride, alignment=_HUGE_PAGE_NBYTES)
        self._range.fill_with_memory(huge_pages=True)
        self._all_fit = num_slots == layout.num_experts
        self._memory = self._range.view()
        if not self._all_fit:
            # Every slot will be filled, and on a virtual machine a page's first touch can take longer than reading
            # what goes into it.
            self._range.provide_memory(progress)
        self._first_slots: dict[int, int] = {}  # layer -> where its bank starts
        self._free_slots = [] if self._all_fit else list(reversed(range(num_slots)))  # popped from the end
        storage, first_slot = self._range.tensor(), 0
        for layer in layout.layers:
            length = pack.manifest.layer(layer).num_experts if self._all_fit else num_slots
            slots = storage[first_slot * layout.stride : (first_slot + length) * layout.stride]
            self.banks[layer] = ExpertBank(slots, layout.stride, length, layout.parts)
            self._first_slots[layer] = first_slot
            first_slot += length if self._all_fit else 0

    def acquire(self, key: ExpertKey) -> int | None:
        if self._all_fit:
            return key.expert
        return self._free_slots.pop() if self._free_slots else None

    def release(self, slot: int) -> None:
        if not self._all_fit:
            self._free_slots.append(slot)

    def view(self, layer: int, slot: int) -> memoryview:
        start = (self._first_slots[layer] + slot) * self._stride
        return self._memory[start : start + self._stride]

    def close(self) -> None:
        self.banks.clear()
        self._range.close()

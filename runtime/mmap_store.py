"""Experts mapped from the page cache, a whole layer in one run of addresses."""

from __future__ import annotations

import mmap
import os
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lmpack.alignment import align_up
from lmpack.errors import UsageError
from lmpack.expert_key import ExpertKey
from runtime.address_range import AddressRange
from runtime.expert_bank import ExpertBank
from runtime.expert_files import ExpertFiles

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmpack.manifest import ExpertPart, LayerEntry
    from lmpack.pack import Pack
    from lmpack.reference import FileExtent
    from runtime.memory_budget import MemoryBudget

# The kernel cuts one request to the device's read-ahead window without a word; this is the smallest usual one.
_WILLNEED_NBYTES = 128 * 1024
_COPY_NBYTES = 1 << 20
_LEAST_ALIGNMENT = 8  # of a part in memory: what the widest number of a dtype takes
# Mappings left to libraries, allocator and thread stacks; torch and ggml take some 500.
_OTHER_MAPPINGS = 4096


class MmapStore:
    """Slot e of a layer's bank is expert e: its file is mapped there while it is resident, nothing otherwise.

    The kernel keeps the bytes in its page cache, where other processes and the next run find them; a released
    expert is dropped from there, so that the budget holds for the page cache too. A slot is read-only, and empty
    ones may not be read (SIGSEGV). A file must not be truncated while it is mapped (SIGBUS).
    """

    def __init__(
        self,
        pack: Pack,
        budget: MemoryBudget,
        *,
        max_mappings: int | None = None,
        populate: bool = True,
    ) -> None:
        """At most `max_mappings` at a time, an expert and the hole beside it one each; None: the kernel's limit.

        Without `populate`, pages are brought in as on a kernel that has no MADV_POPULATE_READ.
        """
        if pack.manifest.is_compressed:
            raise UsageError(
                f"{pack.path}: is compressed, and compressed files cannot be mapped; use --io direct, or run: "
                f"lmpack unpack {pack.path} NEW.lmpack"
            )
        self._closed = False
        self._pack = pack
        self._files = ExpertFiles(pack)
        self._layers = {
            entry.layer: _LayerRange(pack, entry, populate=populate) for entry in pack.manifest.layers
        }
        self._released: deque[ExpertKey] = deque()  # unmapped, not yet dropped from the page cache
        if max_mappings is None:
            max_mappings = _max_map_count() - _OTHER_MAPPINGS
        limits = budget.slots
        most = max((len(region.starts) for region in self._layers.values()), default=1)  # for one expert
        # otherwise each may be a mapping of its own, hole or not
        if pack.manifest.num_experts * most > max_mappings:
            limits = _limited(budget.slots, (max_mappings - len(self._layers)) // (most + 1))
        self._reason = (
            f"{sum(limits)} experts at a time, by vm.max_map_count" if limits != budget.slots else ""
        )
        places = [_Places(num_slots) for num_slots in limits]
        self._places = {
            layer: place
            for layout, place in zip(budget.layouts, places, strict=True)
            for layer in layout.layers
        }

    @property
    def name(self) -> str:
        """ "mmap", with the reason where fewer experts are mapped than the budget allows."""
        return f"mmap ({self._reason})" if self._reason else "mmap"

    def bank(self, layer: int) -> ExpertBank:
        return self._layer(layer).bank

    def num_slots(self, layer: int) -> int:
        return self._places[layer].num_slots

    def acquire(self, key: ExpertKey) -> int | None:
        assert 0 <= key.expert < self._layer(key.layer).bank.num_slots
        places = self._places[key.layer]
        if places.taken == places.num_slots:
            return None
        places.taken += 1
        return key.expert

    def read(self, key: ExpertKey, slot: int) -> int:
        region = self._layer(key.layer)
        self._drop_released()
        extents = self._pack.expert_extents(key)
        for position, extent in enumerate(extents):
            with self._files.open(key, extent) as descriptor:
                for start in range(0, extent.nbytes, _WILLNEED_NBYTES):
                    nbytes = min(_WILLNEED_NBYTES, extent.nbytes - start)
                    os.posix_fadvise(descriptor, extent.offset + start, nbytes, os.POSIX_FADV_WILLNEED)
                region.map(slot, position, extent, descriptor)
        return sum(extent.nbytes for extent in extents)

    def release(self, key: ExpertKey, slot: int) -> None:
        self._layer(key.layer).empty(slot)
        self._places[key.layer].taken -= 1
        self._released.append(key)  # the next read drops them first, in a thread of its own

    def close(self) -> None:
        self._closed = True
        for region in self._layers.values():
            region.close()
        self._layers.clear()

    def _layer(self, layer: int) -> _LayerRange:
        if self._closed:
            raise ValueError("the expert store is closed")
        return self._layers[layer]

    def _drop_released(self) -> None:
        while True:
            try:
                key = self._released.popleft()
            except IndexError:
                return
            self._files.drop_from_page_cache(key)


class _LayerRange:
    """num_experts x stride of addresses, with a tensor over all of them.

    An expert of a reference pack is not laid out as elsewhere: each of its parts is mapped with the pages it is on.
    """

    def __init__(self, pack: Pack, entry: LayerEntry, *, populate: bool) -> None:
        self._populate = populate
        self.starts: tuple[int, ...] = (0,)  # where in a slot each extent is mapped
        parts, self.stride = entry.parts, entry.stride
        if pack.reference is not None:
            self.starts, parts, self.stride = _whole_pages(pack, entry)
        self._range = AddressRange(entry.num_experts * self.stride)
        self.bank = ExpertBank(self._range.tensor(), self.stride, entry.num_experts, parts)

    def map(self, expert: int, position: int, extent: FileExtent, descriptor: int) -> None:
        """Show an extent as a piece of this expert, every page of it, so that no product has to wait for one."""
        lead = extent.offset % mmap.PAGESIZE
        offset, nbytes = expert * self.stride + self.starts[position], lead + extent.nbytes
        self._range.map_file(offset, nbytes, descriptor, extent.offset - lead)
        if not (self._populate and self._range.populate(offset, nbytes)):
            # a drive's error shows here, not as a SIGBUS below
            _read_through(descriptor, extent.offset - lead, nbytes)
            self.bank.storage.numpy()[offset : offset + nbytes : mmap.PAGESIZE].max()

    def empty(self, expert: int) -> None:
        """Leave a hole where this expert was."""
        self._range.empty(expert * self.stride, self.stride)

    def close(self) -> None:
        self._range.close()


class _Places:
    """How many experts of one layout are mapped, and may be."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.taken = 0


def _whole_pages(pack: Pack, entry: LayerEntry) -> tuple[tuple[int, ...], tuple[ExpertPart, ...], int]:
    """Lay out a layer's experts as their parts lie on the pages of the source: where pages start, parts, stride.

    UsageError when a part does not begin at the same place of a page in all of them.
    """
    starts, parts, end = [], [], 0
    extents = [pack.expert_extents(ExpertKey(entry.layer, expert)) for expert in range(entry.num_experts)]
    for part, places in zip(entry.parts, zip(*extents, strict=True), strict=True):
        lead, *others = {extent.offset % mmap.PAGESIZE for extent in places}
        if others or lead % _LEAST_ALIGNMENT:
            raise UsageError(
                f"{pack.path}: layer {entry.layer}: {part.role} cannot be mapped from the source, its pages begin "
                f"elsewhere in each expert; use --io direct, or run: lmpack unpack {pack.path} NEW.lmpack"
            )
        starts.append(end)
        parts.append(replace(part, offset=end + lead))
        end = align_up(end + lead + part.nbytes, mmap.PAGESIZE)
    return tuple(starts), tuple(parts), end


def _read_through(descriptor: int, start: int, nbytes: int) -> None:
    """Bring bytes of a file into the page cache by reading them; OSError when the drive fails."""
    scratch = memoryview(np.empty(_COPY_NBYTES, np.uint8).data)
    done = 0
    while done < nbytes:
        got = os.preadv(descriptor, [scratch[: nbytes - done]], start + done)
        if got == 0:
            raise OSError(f"ends at byte {start + done} of {start + nbytes}")
        done += got


def _max_map_count() -> int:
    return int(Path("/proc/sys/vm/max_map_count").read_text(encoding="ascii"))


def _limited(slots: Sequence[int], most: int) -> tuple[int, ...]:
    """The slots of each layout, cut to `most` in all; the largest give way first."""
    limits = list(slots)
    for place, index in enumerate(sorted(range(len(slots)), key=slots.__getitem__)):
        limits[index] = min(slots[index], most // (len(slots) - place))
        most -= limits[index]
    return tuple(limits)

"""Experts mapped from the page cache, a whole layer in one run of addresses."""

from __future__ import annotations

import mmap
import os
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lmpack.errors import UsageError
from runtime.address_range import AddressRange
from runtime.expert_bank import ExpertBank
from runtime.expert_files import ExpertFiles

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmpack.expert_key import ExpertKey
    from lmpack.manifest import LayerEntry
    from lmpack.pack import Pack
    from runtime.memory_budget import MemoryBudget

# The kernel cuts one request to the device's read-ahead window without a word; this is the smallest usual one.
_WILLNEED_NBYTES = 128 * 1024
_COPY_NBYTES = 1 << 20
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
        self._layers = {entry.layer: _LayerRange(entry, populate=populate) for entry in pack.manifest.layers}
        self._released: deque[ExpertKey] = deque()  # unmapped, not yet dropped from the page cache
        if max_mappings is None:
            max_mappings = _max_map_count() - _OTHER_MAPPINGS
        limits = budget.slots
        if (
            pack.manifest.num_experts > max_mappings
        ):  # otherwise each may be a mapping of its own, hole or not
            limits = _limited(budget.slots, (max_mappings - len(self._layers)) // 2)
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
        (extent,) = self._pack.expert_extents(key)
        with self._files.open(key, extent) as descriptor:
            for offset in range(0, region.stride, _WILLNEED_NBYTES):
                nbytes = min(_WILLNEED_NBYTES, region.stride - offset)
                os.posix_fadvise(descriptor, offset, nbytes, os.POSIX_FADV_WILLNEED)
            region.map(slot, descriptor)
        return region.stride

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
    """num_experts x stride of addresses, with a tensor over all of them."""

    def __init__(self, entry: LayerEntry, *, populate: bool) -> None:
        self._populate = populate
        self.stride = entry.stride
        self._range = AddressRange(entry.num_experts * entry.stride)
        self.bank = ExpertBank(self._range.tensor(), entry.stride, entry.num_experts, entry.parts)

    def map(self, expert: int, descriptor: int) -> None:
        """Show a file as this expert, every page of it, so that no product has to wait for one."""
        offset = expert * self.stride
        self._range.map_file(offset, self.stride, descriptor)
        if not (self._populate and self._range.populate(offset, self.stride)):
            _read_whole(descriptor, self.stride)  # a drive's error shows here, not as a SIGBUS below
            self.bank.storage.numpy()[offset : offset + self.stride : mmap.PAGESIZE].max()

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


def _read_whole(descriptor: int, nbytes: int) -> None:
    """Bring a file's first bytes into the page cache by reading them; OSError when the drive fails."""
    scratch = memoryview(np.empty(_COPY_NBYTES, np.uint8).data)
    done = 0
    while done < nbytes:
        got = os.preadv(descriptor, [scratch[: nbytes - done]], done)
        if got == 0:
            raise OSError(f"ends at byte {done} of {nbytes}")
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

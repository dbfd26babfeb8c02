"""Experts read whole from the drive, past the page cache, into slots of anonymous memory."""

from __future__ import annotations

import errno
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import torch

from lmpack.errors import StorageError
from runtime.expert_bank import ExpertBank

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmpack.expert_key import ExpertKey
    from lmpack.pack import Pack
    from runtime.expert_layout import ExpertLayout
    from runtime.memory_budget import MemoryBudget

NUM_READERS = 8  # a drive needs several requests in flight; more gained nothing where we measured
_HUGE_PAGE_NBYTES = 2 << 20


class DirectStore:
    """One bank a layout; O_DIRECT where the file system takes it, else buffered reads that leave no cache behind."""

    def __init__(self, pack: Pack, budget: MemoryBudget) -> None:
        self.direct = True  # False once the file system has refused O_DIRECT
        self._pack = pack
        self._pools = {
            layer: pool
            for pool in map(_SlotPool, budget.layouts, budget.slots)
            for layer in pool.layout.layers
        }
        self._readers = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="expert-read")

    @property
    def name(self) -> str:
        return "direct" if self.direct else "direct (buffered: the file system refuses O_DIRECT)"

    def bank(self, layer: int) -> ExpertBank:
        return self._pools[layer].bank

    def acquire(self, key: ExpertKey) -> int:
        return self._pools[key.layer].free_slots.pop()

    def release(self, key: ExpertKey, slot: int) -> None:
        self._pools[key.layer].free_slots.append(slot)

    def load(self, keys: Sequence[ExpertKey], slots: Sequence[int]) -> None:
        reads = [self._readers.submit(self._read, key, slot) for key, slot in zip(keys, slots, strict=True)]
        errors = [read.exception() for read in reads]  # waits for all: a slot must not be written to later
        error = next((error for error in errors if error is not None), None)
        if error is not None:
            raise error

    def close(self) -> None:
        self._readers.shutdown()
        self._pools.clear()

    def _read(self, key: ExpertKey, slot: int) -> None:
        path = self._pack.expert_path(key)
        target = self._pools[key.layer].memory_of(slot)
        try:
            if self.direct:
                try:
                    _read_whole(path, target, os.O_DIRECT)
                    return
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    self.direct = False
            _read_whole(path, target, 0)
        except (OSError, EOFError) as error:
            raise StorageError(
                f"expert {key}: {path}: {error}; run: lmpack validate {self._pack.path}"
            ) from error


class _SlotPool:
    """The slots of one layout: huge-page memory that is not touched before a slot is first filled."""

    def __init__(self, layout: ExpertLayout, num_slots: int) -> None:
        self.layout = layout
        nbytes = num_slots * layout.stride
        region = mmap.mmap(-1, nbytes + _HUGE_PAGE_NBYTES)
        region.madvise(mmap.MADV_HUGEPAGE)
        everything = np.frombuffer(region, np.uint8)
        start = -everything.ctypes.data % _HUGE_PAGE_NBYTES
        self._memory = everything[start : start + nbytes]
        self.bank = ExpertBank(torch.from_numpy(self._memory), layout.stride, num_slots, layout.parts)
        self.free_slots = list(reversed(range(num_slots)))  # popped from the end: low slots first

    def memory_of(self, slot: int) -> memoryview:
        start = slot * self.layout.stride
        return memoryview(self._memory[start : start + self.layout.stride])


def _read_whole(path: os.PathLike[str], target: memoryview, flags: int) -> None:
    """Fill target from the start of a file; EOFError when the file is shorter."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        done = 0
        while done < len(target):
            got = os.preadv(descriptor, [target[done:]], done)
            if got == 0:
                raise EOFError(f"ends at byte {done} of {len(target)}")
            done += got
        if not flags & os.O_DIRECT:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)

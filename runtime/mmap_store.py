"""Experts mapped from the page cache, a whole layer in one run of addresses."""

from __future__ import annotations

import ctypes
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
    from lmpack.manifest import LayerEntry
    from lmpack.pack import Pack

NUM_READERS = 8
_PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MAP_POPULATE = 0x8000
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class MmapStore:
    """Slot e of a layer's bank is expert e: its file is mapped there while it is resident, nothing otherwise.

    The kernel keeps the bytes in its page cache; a released expert is dropped from there as well, so that the
    budget holds for both. Files must not be truncated while they are mapped: the process would die by SIGBUS.
    """

    name = "mmap"

    def __init__(self, pack: Pack) -> None:
        self._pack = pack
        self._layers = {entry.layer: _LayerRegion(entry) for entry in pack.manifest.layers}
        self._readers = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="expert-map")

    def bank(self, layer: int) -> ExpertBank:
        return self._layers[layer].bank

    def acquire(self, key: ExpertKey) -> int:
        return key.expert

    def load(self, keys: Sequence[ExpertKey], slots: Sequence[int]) -> None:
        loads = [self._readers.submit(self._map, key) for key in keys]
        errors = [load.exception() for load in loads]
        error = next((error for error in errors if error is not None), None)
        if error is not None:
            raise error

    def release(self, key: ExpertKey, slot: int) -> None:
        self._layers[key.layer].unmap(slot)
        path = self._pack.expert_path(key)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return  # gone meanwhile, and its pages with it
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)

    def close(self) -> None:
        self._readers.shutdown()
        for region in self._layers.values():
            region.close()
        self._layers.clear()

    def _map(self, key: ExpertKey) -> None:
        path = self._pack.expert_path(key)
        region = self._layers[key.layer]
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                nbytes = os.fstat(descriptor).st_size
                if nbytes != region.bank.stride:
                    raise StorageError(f"has {nbytes} bytes, the manifest says {region.bank.stride}")
                os.posix_fadvise(descriptor, 0, nbytes, os.POSIX_FADV_WILLNEED)
                region.map(key.expert, descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise StorageError(
                f"expert {key}: {path}: {error}; run: lmpack validate {self._pack.path}"
            ) from error


class _LayerRegion:
    """num_experts x stride of reserved addresses, with a tensor over all of them."""

    def __init__(self, entry: LayerEntry) -> None:
        self._stride = entry.stride
        self._nbytes = entry.num_experts * entry.stride
        self._address = _checked_mmap(
            None, self._nbytes, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1
        )
        buffer = (ctypes.c_uint8 * self._nbytes).from_address(self._address)
        storage = torch.from_numpy(np.ctypeslib.as_array(buffer))
        self.bank = ExpertBank(storage, entry.stride, entry.num_experts, entry.parts)

    def map(self, expert: int, descriptor: int) -> None:
        """Put a file over an expert's addresses and fault all of it in, so that no product does."""
        flags = mmap.MAP_SHARED | _MAP_FIXED | _MAP_POPULATE
        _checked_mmap(self._address + expert * self._stride, self._stride, mmap.PROT_READ, flags, descriptor)

    def unmap(self, expert: int) -> None:
        """Make the expert's addresses a hole again, which merges with the holes beside it."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        _checked_mmap(self._address + expert * self._stride, self._stride, _PROT_NONE, flags, -1)

    def close(self) -> None:
        _libc.munmap(self._address, self._nbytes)


def _checked_mmap(address: int | None, nbytes: int, protection: int, flags: int, descriptor: int) -> int:
    got = _libc.mmap(address, nbytes, protection, flags | _MAP_NORESERVE, descriptor, 0)
    if got == _MAP_FAILED:
        number = ctypes.get_errno()
        raise StorageError(f"{nbytes} bytes cannot be mapped: {os.strerror(number)}")
    return int(got)

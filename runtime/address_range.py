"""Addresses of this process, reserved at one go, under which memory or files come and go."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
_PROVIDED_NBYTES = 64 << 20
_NUM_PROVIDERS = 4  # one alone zeroes pages at half the speed of the memory
_ANONYMOUS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE

_libc = ctypes.CDLL(None, use_errno=True)
_mmap, _munmap, _madvise = _libc.mmap, _libc.munmap, _libc.madvise
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
]  # fmt: skip
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class AddressRange:
    """A run of addresses with nothing behind it until it is filled; offsets count from its start, in bytes.

    Tensors and memoryviews over it must not be touched after close(): the process would die by SIGSEGV. Without one, it
    goes with the last of them. Every method raises OSError when the kernel refuses.
    """

    def __init__(self, nbytes: int, *, alignment: int = mmap.PAGESIZE) -> None:
        self.nbytes = nbytes
        mapped_nbytes = nbytes + alignment - mmap.PAGESIZE
        mapped_at = _map(None, mapped_nbytes, _PROT_NONE, _ANONYMOUS)
        self._unmap = weakref.finalize(self, _munmap, mapped_at, mapped_nbytes)
        self._unmap.atexit = False  # daemon threads may work in it up to the end
        self.address = -(-mapped_at // alignment) * alignment

    def fill_with_memory(self, *, huge_pages: bool) -> None:
        """Put zeroed memory behind all of the range; the kernel provides each page when it is first touched."""
        _map(self.address, self.nbytes, mmap.PROT_READ | mmap.PROT_WRITE, _ANONYMOUS | _MAP_FIXED)
        if huge_pages and _advise(self.address, self.nbytes, mmap.MADV_HUGEPAGE) not in (0, errno.EINVAL):
            raise _error(f"huge pages for {self.nbytes} bytes")  # EINVAL: a kernel built without them

    def map_file(self, offset: int, nbytes: int, descriptor: int, file_offset: int = 0) -> None:
        """Show a file's bytes from a page on, read-only, over what was there; the descriptor may be closed then."""
        flags = mmap.MAP_SHARED | _MAP_FIXED
        _map(self.address + offset, nbytes, mmap.PROT_READ, flags, descriptor, file_offset)

    def populate(self, offset: int, nbytes: int) -> bool:
        """Read in and map every page, so that no access waits; False on kernels before 5.14, which cannot.

        Raises OSError (EFAULT) where a plain access would end the process: the drive failed, the file is short.
        """
        number = _advise(self.address + offset, nbytes, _MADV_POPULATE_READ)
        if number == errno.EINVAL:
            return False
        if number:
            raise OSError(number, "its pages cannot be read in")
        return True

    def provide_memory(self, progress: Callable[[int], None] = lambda _: None) -> None:
        """Have the kernel provide every page of memory now and not at its first touch; kernels before 5.14 cannot.

        `progress` is told of bytes, in any thread.
        """

        def provide(start: int) -> None:
            nbytes = min(_PROVIDED_NBYTES, self.nbytes - start)
            number = _advise(self.address + start, nbytes, _MADV_POPULATE_WRITE)
            if number not in (0, errno.EINVAL):
                raise OSError(number, f"{self.nbytes} bytes of memory: {os.strerror(number)}")
            progress(nbytes)

        with ThreadPoolExecutor(_NUM_PROVIDERS) as threads:
            for _ in threads.map(provide, range(0, self.nbytes, _PROVIDED_NBYTES)):
                pass

    def empty(self, offset: int, nbytes: int) -> None:
        """Take away what is behind these addresses; the hole merges with holes beside it."""
        _map(self.address + offset, nbytes, _PROT_NONE, _ANONYMOUS | _MAP_FIXED)

    def tensor(self) -> torch.Tensor:
        """The whole range as uint8, one-dimensional; nothing is touched or copied."""
        return torch.frombuffer(self._buffer(), dtype=torch.uint8)

    def view(self) -> memoryview:
        """The whole range as bytes."""
        return memoryview(self._buffer()).cast("B")

    def close(self) -> None:
        """Give addresses and memory back; a second time does nothing."""
        self._unmap()
        self.nbytes = 0

    def _buffer(self) -> ctypes.Array[ctypes.c_uint8]:
        buffer = (ctypes.c_uint8 * self.nbytes).from_address(self.address)
        buffer.owner = self  # type: ignore[attr-defined]
        return buffer


def _map(
    address: int | None, nbytes: int, protection: int, flags: int, descriptor: int = -1, file_offset: int = 0
) -> int:
    got = _mmap(address, nbytes, protection, flags, descriptor, file_offset)
    if got == _MAP_FAILED:
        raise _error(f"{nbytes} bytes cannot be mapped")
    return int(got)


def _advise(address: int, nbytes: int, advice: int) -> int:
    """The kernel's error number, 0 when it agreed."""
    return ctypes.get_errno() if _madvise(address, nbytes, advice) else 0


def _error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")

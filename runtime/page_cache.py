"""What the kernel keeps of a pack's files in its page cache, and how to have it keep more."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import TYPE_CHECKING

import numpy as np

from lmpack.errors import StorageError

if TYPE_CHECKING:
    from pathlib import Path

_CACHESTAT = 451  # on every architecture

_libc = ctypes.CDLL(None, use_errno=True)


def cached_nbytes(path: Path, offset: int = 0, nbytes: int | None = None) -> int | None:
    """How much of a file, or of so many of its bytes, is in the page cache, in whole pages (mincore(2)).

    None where the kernel does not tell: of a file that is neither ours nor writable it would call all of it cached.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            found = os.fstat(descriptor)
            if not (found.st_uid == os.geteuid() or os.access(path, os.W_OK)):
                return None
            stop = found.st_size if nbytes is None else min(found.st_size, offset + nbytes)
            start = offset // mmap.PAGESIZE * mmap.PAGESIZE
            return _cached(descriptor, start, stop) if start < stop else 0
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror or error}") from error


def is_wholly_cached(descriptor: int, nbytes: int, offset: int = 0) -> bool:
    """Whether the page cache surely holds bytes of an opened file (cachestat(2), Linux 6.5; before it, none are)."""
    wanted, found = (ctypes.c_uint64 * 2)(offset, nbytes), (ctypes.c_uint64 * 5)()
    failed = _libc.syscall(_CACHESTAT, descriptor, wanted, found, 0)
    return not failed and found[0] * mmap.PAGESIZE >= nbytes + offset % mmap.PAGESIZE


def _cached(descriptor: int, start: int, stop: int) -> int:
    with mmap.mmap(descriptor, stop - start, offset=start, prot=mmap.PROT_READ) as mapped:
        pages = np.empty(-(-(stop - start) // mmap.PAGESIZE), np.uint8)
        view = np.frombuffer(mapped, np.uint8)
        address = ctypes.c_void_p(view.ctypes.data)
        failed = _libc.mincore(address, ctypes.c_size_t(stop - start), ctypes.c_void_p(pages.ctypes.data))
        del view  # a mapping that somebody looks at cannot be closed
        if failed:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return int((pages & 1).sum()) * mmap.PAGESIZE

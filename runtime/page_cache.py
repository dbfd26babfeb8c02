"""What the kernel keeps of a pack's files in its page cache, and how to have it keep more."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
from typing import TYPE_CHECKING

import numpy as np

from lmpack.errors import StorageError
from lmpack.expert_key import ExpertKey

if TYPE_CHECKING:
    from pathlib import Path

    from lmpack.pack import Pack

_SAMPLE = 256
_CACHESTAT = 451  # on every architecture

_libc = ctypes.CDLL(None, use_errno=True)


def cached_nbytes(path: Path) -> int | None:
    """How much of a file is in the page cache, in whole pages (mincore(2)).

    None where the kernel does not tell: of a file that is neither ours nor writable it would call all of it cached.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            found = os.fstat(descriptor)
            if not (found.st_uid == os.geteuid() or os.access(path, os.W_OK)):
                return None
            return _cached(descriptor, found.st_size) if found.st_size else 0
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror or error}") from error


def cached_share(pack: Pack) -> float:
    """Share of the experts' bytes that is known to be in the page cache, by a sample where there are many."""
    keys = [
        ExpertKey(entry.layer, expert)
        for entry in pack.manifest.layers
        for expert in range(entry.num_experts)
    ]
    sample = random.Random(0).sample(keys, min(_SAMPLE, len(keys)))
    nbytes = sum(pack.manifest.layer(key.layer).stride for key in sample)
    return sum(cached_nbytes(pack.expert_path(key)) or 0 for key in sample) / nbytes if nbytes else 0.0


def is_wholly_cached(descriptor: int, nbytes: int) -> bool:
    """Whether the page cache surely holds an opened file (cachestat(2), Linux 6.5; before it, no file is known to)."""
    everything, found = (ctypes.c_uint64 * 2)(0, nbytes), (ctypes.c_uint64 * 5)()
    failed = _libc.syscall(_CACHESTAT, descriptor, everything, found, 0)
    return not failed and found[0] * mmap.PAGESIZE >= nbytes


def _cached(descriptor: int, nbytes: int) -> int:
    with mmap.mmap(descriptor, nbytes, prot=mmap.PROT_READ) as mapped:
        pages = np.empty(-(-nbytes // mmap.PAGESIZE), np.uint8)
        view = np.frombuffer(mapped, np.uint8)
        address = ctypes.c_void_p(view.ctypes.data)
        failed = _libc.mincore(address, ctypes.c_size_t(nbytes), ctypes.c_void_p(pages.ctypes.data))
        del view  # a mapping that somebody looks at cannot be closed
        if failed:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return int((pages & 1).sum()) * mmap.PAGESIZE

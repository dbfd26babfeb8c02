"""What the page cache holds of a file, as mincore(2) says it, and files that it has forgotten."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import TYPE_CHECKING

import numpy as np
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


def pages_in_cache(path: Path) -> int:
    """How many pages of a file that is not empty are in the page cache."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        pages = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
        address = np.frombuffer(mapped, np.uint8).ctypes.data
        failed = ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(mapped)), pages)
        assert not failed
        return sum(page & 1 for page in pages)


def forget(paths: Iterable[Path]) -> None:
    """Have the kernel forget these files; skip where it keeps them (tmpfs)."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
        if pages_in_cache(path):
            pytest.skip("this file system keeps all files in memory")

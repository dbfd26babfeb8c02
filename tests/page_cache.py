"""Files that the page cache has forgotten, for tests of what it holds."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from runtime.page_cache import cached_nbytes

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


def forget(paths: Iterable[Path]) -> None:
    """Have the kernel forget these files; skip where it keeps them (tmpfs)."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
        if cached_nbytes(path):
            pytest.skip("this file system keeps all files in memory")

"""A pack's expert files, or the source's that it refers to, opened one at a time; every failure names the expert."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lmpack.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from lmpack.expert_key import ExpertKey
    from lmpack.pack import Pack
    from lmpack.reference import FileExtent

# A link that replaced the file is not followed, a pipe is not waited for.
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK

# What opening gives when a file was removed, or when something else has its name.
_GONE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.ESPIPE}


class ExpertFiles:
    """Opens the files of a pack that was checked when it was opened and may have changed since."""

    def __init__(self, pack: Pack) -> None:
        self._pack = pack

    @contextmanager
    def open(self, key: ExpertKey, extent: FileExtent, flags: int = 0) -> Iterator[int]:
        """Lend a descriptor of a file that an expert has an extent in, for the length of the block.

        An OSError, also one of the block's own, becomes a StorageError that names layer, expert and file.
        """
        with self._errors(key, extent.path):
            descriptor = os.open(extent.path, _FLAGS | flags)
            try:
                _check_whole(descriptor, extent.file_nbytes)
                yield descriptor
            finally:
                os.close(descriptor)

    def drop_from_page_cache(self, key: ExpertKey) -> None:
        """Have the kernel forget an expert's pages that nobody maps; a file that is gone has none."""
        for extent in self._pack.expert_extents(key):
            with self._errors(key, extent.path):
                try:
                    descriptor = os.open(extent.path, _FLAGS)
                    try:
                        drop_extent(descriptor, extent)
                    finally:
                        os.close(descriptor)
                except OSError as error:
                    if error.errno not in _GONE:
                        raise

    @contextmanager
    def _errors(self, key: ExpertKey, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = error.strerror or str(error)
            raise StorageError(
                f"expert {key}: {path}: {reason}; run: lmpack validate {self._pack.path}"
            ) from error


def drop_extent(descriptor: int, extent: FileExtent) -> None:
    """Have the kernel forget the pages that lie wholly inside an extent."""
    os.posix_fadvise(descriptor, extent.offset, extent.nbytes, os.POSIX_FADV_DONTNEED)


def _check_whole(descriptor: int, nbytes: int) -> None:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise StorageError("not a regular file")
    if found.st_size != nbytes:
        verb = "truncated to" if found.st_size < nbytes else "grown to"
        raise StorageError(f"{verb} {found.st_size} bytes, expected {nbytes}")

"""SourceReader: one source file, read once from front to back, past the page cache when it is not in there.

A checkpoint is often larger than memory, and nobody reads it again: going through the page cache would only push out
what others need, and cost the time of filling it. A file that lies in the cache already is read from there.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Self

from lmpack.errors import SourceChangedError, StorageError

if TYPE_CHECKING:
    from types import TracebackType

    from converters.checkpoint import CheckpointFile

DIRECT_ALIGNMENT = 4096  # of offsets, lengths and memory; what every drive accepts
SLACK_NBYTES = 2 * DIRECT_ALIGNMENT  # a buffer needs this much more than the bytes asked for
_NUM_PROBES = 16


class SourceReader:
    """Reads ranges of a file into page-aligned buffers; notices when the file changes."""

    def __init__(self, file: CheckpointFile) -> None:
        """Open the file, past the page cache when most of it is not in there."""
        self.file = file
        self._alignment = 1
        self._descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        if not _is_cached(self._descriptor, file.nbytes):
            self._try_direct()
        if self._alignment == 1 and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def __enter__(self) -> Self:
        """Return the reader; raises SourceChangedError when the file is not what the checkpoint was made from."""
        try:
            self.check_unchanged()
        except SourceChangedError:
            os.close(self._descriptor)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def read(self, buffer: memoryview, offset: int, nbytes: int) -> memoryview:
        """Fill a page-aligned buffer, and return the part of it that is bytes [offset, offset + nbytes) of the file.

        The buffer must have SLACK_NBYTES more than nbytes. Raises SourceChangedError when the file ends early.
        """
        start = offset // self._alignment * self._alignment
        end = -(-(offset + nbytes) // self._alignment) * self._alignment
        done = 0
        while start + done < offset + nbytes:
            try:
                count = os.preadv(self._descriptor, [buffer[done : end - start]], start + done)
            except OSError as error:
                if error.errno == errno.EINVAL and self._alignment > 1:  # a drive with larger sectors
                    self._leave_direct()
                    return self.read(buffer, offset, nbytes)
                raise StorageError(
                    f"{self.file.path}: cannot be read at byte {start + done}: {error.strerror}"
                ) from error
            if count == 0:
                raise SourceChangedError(
                    f"{self.file.path}: ends at byte {start + done}, it had {self.file.nbytes} bytes a moment ago; wait "
                    "until it is complete"
                )
            done += count
        return buffer[offset - start : offset - start + nbytes]

    def check_unchanged(self) -> None:
        """Raise SourceChangedError when the file has another size or modification time than at first."""
        found = os.fstat(self._descriptor)
        if (found.st_size, found.st_mtime_ns) != (self.file.nbytes, self.file.mtime_ns):
            raise SourceChangedError(
                f"{self.file.path}: changed while it was being converted; wait until it is complete"
            )

    def _try_direct(self) -> None:
        try:
            direct = os.open(self.file.path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0))
        except OSError:
            return  # the file system has no such mode: the page cache serves as well
        os.close(self._descriptor)
        self._descriptor = direct
        self._alignment = DIRECT_ALIGNMENT if hasattr(os, "O_DIRECT") else 1

    def _leave_direct(self) -> None:
        os.close(self._descriptor)
        self._descriptor = os.open(self.file.path, os.O_RDONLY | os.O_CLOEXEC)
        self._alignment = 1


def _is_cached(descriptor: int, nbytes: int) -> bool:
    """Tell whether most of some pages spread over the file can be read without waiting for the drive."""
    if not hasattr(os, "RWF_NOWAIT") or nbytes < _NUM_PROBES * DIRECT_ALIGNMENT:
        return True
    piece, hits = bytearray(1), 0
    for probe in range(_NUM_PROBES):
        try:
            hits += os.preadv(descriptor, [piece], nbytes * probe // _NUM_PROBES, os.RWF_NOWAIT)
        except BlockingIOError:
            continue
        except OSError:
            return True  # the file system cannot tell
    return hits > _NUM_PROBES // 2

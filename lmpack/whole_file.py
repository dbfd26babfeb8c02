"""WholeFile: a file that appears with all of its bytes or not at all."""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, BinaryIO

from lmpack.drive import storage_errors, sync_path

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open what takes path's name when the block ends, on the drive by then; a file already there is replaced.

    Folders above it that are missing are made. When the block fails, path is as it was and nothing lies beside it. An
    OSError becomes a StorageError that names path.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")  # two runs may write it at once
    try:
        with storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(partial, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
            sync_path(path.absolute().parent)
    finally:
        with suppress(OSError):  # renamed away, or never made
            partial.unlink()

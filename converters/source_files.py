"""SourceFiles: how a conversion comes by the files of a checkpoint, one after the other."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Protocol

from lmpack.errors import SourceChangedError

if TYPE_CHECKING:
    from converters.checkpoint import CheckpointFile


class SourceFiles(Protocol):
    """Hands out files in the checkpoint's order; a download can stand behind it.

    The conversion knows the checkpoint's headers before it asks for the first file, and asks for a file only when it
    needs bytes that an interrupted conversion has not left in the pack.
    """

    @property
    def discards(self) -> bool:
        """Whether release() may delete: the pack is then synced and read back before each call."""

    def identity(self, file: CheckpointFile) -> str:
        """Name these very bytes in one ASCII word, another one once they have changed."""

    def fetch(self, file: CheckpointFile) -> CheckpointFile:
        """Return the file, whole and on a drive."""

    def release(self, file: CheckpointFile) -> None:
        """Hear that everything from the file is in the pack, and that nobody will ask for it again."""


class LocalFiles:
    """Files that lie where the checkpoint found them, and stay there."""

    discards = False

    def identity(self, file: CheckpointFile) -> str:
        """Size and both times: the second one cannot be set back by who changes the first."""
        try:
            found = os.stat(file.path)
        except OSError as error:
            raise SourceChangedError(
                f"{file.path}: is no longer there ({error.strerror}); bring it back"
            ) from error
        return f"{found.st_size}:{found.st_mtime_ns}:{found.st_ctime_ns}"

    def fetch(self, file: CheckpointFile) -> CheckpointFile:
        """Return the file itself."""
        return file

    def release(self, file: CheckpointFile) -> None:
        """Leave the file where it is."""

"""ByteOrigin: where bytes of a pack can be had again: another copy of it, or the checkpoint it was made from."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from converters.checkpoint import open_checkpoint
from lmpack.drive import read_into, storage_errors
from lmpack.errors import PackError
from lmpack.manifest import MANIFEST_FILE
from lmpack.pack_files import open_regular

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lmpack.manifest import Source


class ByteOrigin(Protocol):
    """Ranges of files, in a folder or on a hub; nobody trusts them before their hash is right."""

    @property
    def name(self) -> str:
        """What a message calls it."""

    @property
    def is_pack(self) -> bool:
        """Whether files are named as in a pack; otherwise they are named as the source's files."""

    def nbytes(self, file: str) -> int:
        """Return a file's size; raises PackError when there is no such file."""

    def read(self, file: str, offset: int, view: memoryview) -> None:
        """Fill view with bytes of a file; raises PackError when it has no such bytes, StorageError when it fails."""


@dataclass(frozen=True, slots=True)
class LocalOrigin:
    """Files on a drive."""

    name: str
    is_pack: bool
    paths: Mapping[str, Path]  # of source files; a pack's lie below its folder `name`

    def nbytes(self, file: str) -> int:
        """Return a file's size."""
        descriptor = self._open(file)
        try:
            return os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)

    def read(self, file: str, offset: int, view: memoryview) -> None:
        """Fill view with bytes of a file."""
        descriptor = self._open(file)
        try:
            with storage_errors(f"{self.name}: {file}"):
                count = read_into(view, descriptor, offset)
            if count < view.nbytes:
                raise PackError(f"{self.name}: {file} ends at byte {offset + count}")
        finally:
            os.close(descriptor)

    def _open(self, file: str) -> int:
        if self.is_pack:
            return open_regular(Path(self.name) / file)
        if file not in self.paths:
            raise PackError(f"{self.name}: has no file {file}")
        with storage_errors(self.paths[file]):
            return os.open(self.paths[file], os.O_RDONLY | os.O_CLOEXEC)


def open_local_origin(path: Path, source: Source | None) -> LocalOrigin:
    """Open a folder with a manifest as another copy of the pack, anything else as the checkpoint of this source.

    A checkpoint of one file may have been renamed. Raises CheckpointError or UsageError when it is none.
    """
    if os.path.lexists(path / MANIFEST_FILE):
        return LocalOrigin(os.fspath(path), True, {})
    files = open_checkpoint(path).files
    paths = {file.name: file.path for file in files}
    if source is not None and len(files) == len(source.files) == 1:
        paths = {source.files[0].name: files[0].path}
    return LocalOrigin(os.fspath(path), False, paths)

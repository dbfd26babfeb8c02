"""HubSource: a checkpoint on a hub, opened by its headers alone; each file comes when the conversion wants it.

While one file is converted the next one is fetched, never more, so with discarding at most two are on the drive.
A stand-in is a sparse file of the real one's name and size that holds only its header.
"""

from __future__ import annotations

import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Self

from converters.checkpoint import CheckpointFile, open_checkpoint
from converters.gguf_header import read_gguf_header_from
from converters.hub_download import download, download_all, missing_nbytes
from converters.safetensors_checkpoint import MAX_HEADER_NBYTES
from lmpack.drive import storage_errors
from lmpack.errors import HubError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from types import TracebackType

    from converters.checkpoint import Checkpoint
    from converters.hub_cache import HubCache
    from converters.hub_repo import HubFile, HubRepo

_FIRST_HEADER_NBYTES = 64  # of a safetensors file: its header's length, and enough to tell a web page from it


class HubSource:
    """The files of one checkpoint in a repository; use as a context, which ends what still runs."""

    def __init__(
        self,
        repo: HubRepo,
        weights: Sequence[HubFile],
        others: Sequence[HubFile],
        *,
        folder: Path,
        cache: HubCache | None,
        progress: Callable[[int], None],
    ) -> None:
        """Keep stand-ins and small files below folder; weights go to the cache, or without one to folder as well."""
        self.repo = repo
        self.weights = {file.name: file for file in weights}
        self.others = {file.path: file for file in others}
        self.progress = progress
        self._cache = cache
        self.stand_ins = folder / "checkpoint"
        self._files = folder / "files"
        self._header_nbytes: dict[str, int] = {}
        self._order: list[str] = []
        self._pool = ThreadPoolExecutor(1, "hub-source")
        self._coming: dict[str, Future[Path]] = {}

    def __enter__(self) -> Self:
        """Return the source itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the download that runs, if any; what was refused before one began leaves nothing behind."""
        if kind is not None:
            self.repo.client.stop()
        self._pool.shutdown(cancel_futures=True)
        if kind is not None and not self._coming:
            shutil.rmtree(self.stand_ins, ignore_errors=True)

    def open(self) -> Checkpoint:
        """Fetch the small files and every header, and open the checkpoint; raises as open_checkpoint does."""
        for file in self.weights.values():
            self._make_stand_in(file)
        download_all(
            self.repo, [(file, self.stand_ins / path) for path, file in self.others.items()], self.progress
        )
        first = min(self.weights)
        checkpoint = open_checkpoint(self.stand_ins / first if first.endswith(".gguf") else self.stand_ins)
        self._order = [file.name for file in checkpoint.files if file.name in self.weights]
        return checkpoint

    def missing_nbytes(self, file: HubFile) -> int:
        """Return how many bytes of a weight file are still to come."""
        if self._cache is not None:
            return self._cache.missing_nbytes(file)
        return missing_nbytes(file, self._files / file.name)

    @property
    def discards(self) -> bool:
        """Whether a file is deleted once it is in the pack."""
        return self._cache is None

    def identity(self, file: CheckpointFile) -> str:
        """Return what the hub says the file's hash is: it needs no file on the drive."""
        known = self.weights.get(file.name) or self.others[file.name]
        return known.expected_digest

    def fetch(self, file: CheckpointFile) -> CheckpointFile:
        """Return a file of the checkpoint where its bytes are, checked; the one after it comes meanwhile."""
        if file.name not in self.weights:
            return file
        at = self._order.index(file.name)
        for name in self._order[at : at + 2]:
            if name not in self._coming:
                self._coming[name] = self._pool.submit(self._bring, self.weights[name])
        path = self._coming[file.name].result()
        self._check_header(file, path)
        return CheckpointFile.of(path, file.name)

    def release(self, file: CheckpointFile) -> None:
        """Delete a file that came for this conversion only."""
        if self.discards and file.name in self.weights:
            (self._files / file.name).unlink(missing_ok=True)

    def _bring(self, file: HubFile) -> Path:
        if self._cache is not None:
            return self._cache.fetch(file, self.progress)
        path = self._files / file.name
        download(self.repo, file, path, self.progress)
        return path

    def _make_stand_in(self, file: HubFile) -> None:
        path = self.stand_ins / file.name
        with storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as written:
                reader = _HeaderReader(self.repo, file)
                raw = _read_header(reader)
                written.write(raw)
                written.truncate(file.nbytes)
        self._header_nbytes[file.name] = len(raw)

    def _check_header(self, file: CheckpointFile, path: Path) -> None:
        """The plan was made from the stand-in, the hash is of the whole file: both must have the same header."""
        nbytes = self._header_nbytes[file.name]
        with path.open("rb") as real, file.path.open("rb") as stand_in:
            if real.read(nbytes) != stand_in.read(nbytes):
                raise HubError(
                    f"{self.repo.repo_id}: {file.name}: the header that came first is not the file's; run it again, "
                    "or without the proxy or mirror between"
                )


class _HeaderReader:
    """The first bytes of a file on the hub, fetched as they are read, and remembered."""

    def __init__(self, repo: HubRepo, file: HubFile) -> None:
        self.raw = b""
        self.repo = repo
        self.file = file

    def read(self, nbytes: int, /) -> bytes:
        end = min(len(self.raw) + nbytes, self.file.nbytes)
        more = b"".join(self.repo.stream(self.file, len(self.raw), end))
        self.raw += more
        return more


def _read_header(reader: _HeaderReader) -> bytes:
    """Return as much of a file as opening it as a checkpoint needs; only a GGUF's header must be sound for that."""
    file = reader.file
    if file.name.lower().endswith(".gguf"):
        read_gguf_header_from(reader, file.nbytes, f"{reader.repo.repo_id}: {file.path}")
    else:
        length = int.from_bytes(reader.read(_FIRST_HEADER_NBYTES)[:8], "little")
        if length <= MAX_HEADER_NBYTES:
            reader.read(max(0, 8 + length - len(reader.raw)))
    return reader.raw

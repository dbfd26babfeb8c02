"""Compressed experts: read into a scratch of the reading thread, decompressed from there into a slot."""

from __future__ import annotations

import mmap
from threading import local
from typing import TYPE_CHECKING

from lmpack.alignment import align_up
from lmpack.decompression import SCRATCH_NBYTES, Decompressor
from lmpack.errors import PackError, StorageError
from runtime.expert_readers import MAX_GUESSES_IN_FLIGHT, NUM_READERS

if TYPE_CHECKING:
    from lmpack.expert_key import ExpertKey
    from lmpack.manifest import Manifest
    from lmpack.pack import Pack


def decompression_nbytes(manifest: Manifest) -> int:
    """What all reading threads' scratch takes together, at most; nothing where files are as they are."""
    if not manifest.is_compressed:
        return 0
    return (NUM_READERS + MAX_GUESSES_IN_FLIGHT) * (_largest_file_nbytes(manifest) + SCRATCH_NBYTES)


class CompressedExperts:
    """Lends every reading thread room for one compressed file, and restores what was read there."""

    def __init__(self, pack: Pack) -> None:
        self._pack = pack
        self._largest_nbytes = _largest_file_nbytes(pack.manifest)
        self._threads = local()

    def room(self) -> memoryview:
        """This thread's memory for a compressed file, whole pages long: O_DIRECT reads need that."""
        if not hasattr(self._threads, "room"):
            self._threads.room = memoryview(mmap.mmap(-1, self._largest_nbytes))
            self._threads.decompressor = Decompressor()
        room: memoryview = self._threads.room
        return room

    def restore(self, key: ExpertKey, target: memoryview) -> None:
        """Fill a slot from the file in this thread's room; StorageError names the expert when it is damaged."""
        layer = self._pack.manifest.layer(key.layer)
        stored = layer.experts[key.expert].stored
        assert stored is not None
        try:
            self._threads.decompressor.restore_expert(self.room(), stored, layer.parts, target)
        except PackError as error:
            path = self._pack.expert_path(key)
            raise StorageError(
                f"expert {key}: {path}: {error}; run: lmpack validate {self._pack.path}"
            ) from None


def _largest_file_nbytes(manifest: Manifest) -> int:
    largest = max((expert.file_nbytes for layer in manifest.layers for expert in layer.experts), default=1)
    return align_up(largest, mmap.PAGESIZE)

"""Memory of each reading thread, for what is read before it has its place in a slot."""

from __future__ import annotations

import mmap
from threading import local
from typing import TYPE_CHECKING

from lmpack.alignment import align_up
from lmpack.decompression import SCRATCH_NBYTES
from runtime.expert_readers import MAX_GUESSES_IN_FLIGHT, NUM_READERS

if TYPE_CHECKING:
    from lmpack.manifest import Manifest


class ReadingRoom:
    """Lends every thread the same room again and again, whole pages long: O_DIRECT reads need that."""

    def __init__(self, manifest: Manifest) -> None:
        self._nbytes = _room_nbytes(manifest)
        self._threads = local()

    def room(self) -> memoryview:
        """This thread's."""
        if not hasattr(self._threads, "room"):
            self._threads.room = memoryview(mmap.mmap(-1, self._nbytes))
        room: memoryview = self._threads.room
        return room


def reading_nbytes(manifest: Manifest) -> int:
    """What all reading threads need beside slots, at most; nothing where experts lie in files as in slots."""
    each = 0
    if manifest.is_compressed:
        each = _room_nbytes(manifest) + SCRATCH_NBYTES
    elif manifest.is_reference:
        each = _room_nbytes(manifest)
    return (NUM_READERS + MAX_GUESSES_IN_FLIGHT) * each


def _room_nbytes(manifest: Manifest) -> int:
    """The longest compressed file, or the longest part with the rest of the pages at its ends."""
    if manifest.is_compressed:
        lengths = (expert.file_nbytes for layer in manifest.layers for expert in layer.experts)
    else:
        lengths = (part.nbytes + mmap.PAGESIZE for layer in manifest.layers for part in layer.parts)
    return align_up(max(lengths, default=1), mmap.PAGESIZE)

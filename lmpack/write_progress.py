"""Write progress: which bytes of a pack have been written, and their hashes so far."""

from __future__ import annotations

import hashlib
from threading import Lock
from typing import TYPE_CHECKING

from lmpack.padded_digest import PaddedDigest

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from lmpack.layer_entry import ExpertPart


class ExpertProgress:
    """The parts of one expert that are written; hashes them as they pass while they come in layout order."""

    __slots__ = ("_digest", "lock", "sha256", "written")

    def __init__(self) -> None:
        self.lock = Lock()
        self.written: set[int] = set()  # positions in the layer's parts
        self.sha256 = ""  # of the whole file, once it is whole
        self._digest: PaddedDigest | None = PaddedDigest()

    def add(self, position: int, part: ExpertPart, view: memoryview) -> None:
        """Note a part as written; the running hash is given up when parts before it are still missing."""
        if self._digest is not None and position == len(self.written):
            self._digest.add(part.offset, view)
        else:
            self._digest = None
        self.written.add(position)

    def finish(self, path: Path | None, stride: int) -> None:
        """Fix the hash of the whole file; reads it back, if there is one, when its parts came out of order."""
        if self._digest is not None:
            self.sha256 = self._digest.finish(stride)
        elif path is not None:
            with open(path, "rb") as file:
                self.sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        self._digest = None  # a large model has tens of thousands of experts


class LayerProgress:
    """The layout of one layer and the progress of its experts."""

    __slots__ = ("experts", "gaps", "parts", "positions", "stride")

    def __init__(self, parts: Sequence[ExpertPart], stride: int, num_experts: int) -> None:
        self.parts = tuple(parts)
        self.positions = {part.role: position for position, part in enumerate(parts)}
        self.stride = stride
        ends = [part.offset + part.nbytes for part in parts]
        starts = [part.offset for part in parts[1:]]
        self.gaps = [(end, start - end) for end, start in zip(ends, starts, strict=False) if start > end]
        self.experts = [ExpertProgress() for _ in range(num_experts)]


class StreamProgress:
    """How much of a shared tensor or a kept file is written, front to back, and the hash of that."""

    __slots__ = ("digest", "written_nbytes")

    def __init__(self) -> None:
        self.digest = hashlib.sha256()
        self.written_nbytes = 0

    def add(self, view: memoryview) -> None:
        """Note the next bytes as written."""
        self.digest.update(view)
        self.written_nbytes += view.nbytes

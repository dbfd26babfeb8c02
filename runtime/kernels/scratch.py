"""Scratch memory, and who has which place in it."""

from __future__ import annotations

import torch

from lmpack.alignment import align_up

_ALIGNMENT = 64  # a cache line


class Scratch:
    """Memory that programs take turns to use; it grows to what the largest needs."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)

    def fit(self, nbytes: int) -> None:
        """Have room for so many bytes; what was there is lost when it has to grow."""
        if nbytes > len(self.memory):
            self.memory = torch.empty(0, dtype=torch.uint8)  # free the old memory before asking for more
            memory = torch.empty(nbytes + _ALIGNMENT, dtype=torch.uint8)
            self.memory = memory[-memory.data_ptr() % _ALIGNMENT :][:nbytes]


class ScratchPlaces:
    """Hands out places of a scratch behind `end`, and takes back those whose last use has passed."""

    def __init__(self, end: int) -> None:
        self.end = align_up(end, _ALIGNMENT)
        self._free: list[tuple[int, int]] = []  # offset, nbytes
        self._taken: list[tuple[int, int, int]] = []  # last use, offset, nbytes

    def take(self, nbytes: int, last_use: int) -> int:
        """The offset of a place that is used up to a step."""
        nbytes = align_up(nbytes, _ALIGNMENT)
        fitting = [(size, offset) for offset, size in self._free if size >= nbytes]
        if fitting:
            size, offset = min(fitting)
            self._free.remove((offset, size))
            if size > nbytes:
                self._free.append((offset + nbytes, size - nbytes))
        else:
            offset, self.end = self.end, self.end + nbytes
        self._taken.append((last_use, offset, nbytes))
        return offset

    def leave(self, index: int) -> None:
        """Free what is not used after this step."""
        self._free += [(offset, nbytes) for last_use, offset, nbytes in self._taken if last_use <= index]
        self._taken = [taken for taken in self._taken if taken[0] > index]
        self._free.sort()
        merged: list[tuple[int, int]] = []
        for offset, nbytes in self._free:
            if merged and sum(merged[-1]) == offset:
                merged[-1] = (merged[-1][0], merged[-1][1] + nbytes)
            else:
                merged.append((offset, nbytes))
        self._free = merged

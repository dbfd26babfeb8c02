"""The programs used last, kept for the next time."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from runtime.kernels.scratch import Scratch

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from runtime.kernels.ggml_program import Program

_MAX_PROGRAMS = 64  # up to 1 MB each; prefills of many lengths leave theirs behind


class Programs:
    """The programs used last, and the scratch that they share."""

    def __init__(self) -> None:
        self.scratch = Scratch()
        self._by_key: OrderedDict[Hashable, Program] = OrderedDict()

    def get(self, key: Hashable, record: Callable[[], Program]) -> Program:
        """The program of this key, recorded when there is none."""
        program = self._by_key.get(key)
        if program is None:
            if len(self._by_key) == _MAX_PROGRAMS:
                self._by_key.popitem(last=False)[1].close()
            program = self._by_key[key] = record()
        self._by_key.move_to_end(key)
        return program

    def close(self) -> None:
        """Free all of them."""
        while self._by_key:
            self._by_key.popitem()[1].close()
        self.scratch = Scratch()

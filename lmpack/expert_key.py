"""ExpertKey: the name of one routed expert, the unit that lmpack stores, caches and counts."""

from __future__ import annotations

from typing import NamedTuple


class ExpertKey(NamedTuple):
    """One routed expert of one layer; both numbers count from 0 and sort in file order."""

    layer: int
    expert: int

    def __str__(self) -> str:
        """Give the form used in paths and messages: L003/E0127."""
        return f"L{self.layer:03d}/E{self.expert:04d}"

    @property
    def file(self) -> str:
        """The path of this expert's own file inside a pack: experts/L003/E0127.bin."""
        return f"experts/{self}.bin"

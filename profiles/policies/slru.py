"""SLRU: an expert is on probation until its second use; those on probation go first.

Segmented LRU of Karedla et al., "Caching Strategies to Improve Disk System Performance", Computer 27 (1994).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container

    from lmpack.expert_key import ExpertKey


class SLRU:
    """Two LRU orders: a hit moves an expert to the second, whose oldest falls back when it is full."""

    name = "slru"

    def __init__(self, num_proven: int) -> None:
        """At most `num_proven` experts are off probation."""
        self._num_proven = num_proven
        self._probation: OrderedDict[ExpertKey, None] = OrderedDict()  # the longest unused first, both
        self._proven: OrderedDict[ExpertKey, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._probation) + len(self._proven)

    def touch(self, key: ExpertKey) -> None:
        """Take in a newcomer on probation; prove a resident."""
        if key in self._proven:
            self._proven.move_to_end(key)
        elif key in self._probation:
            del self._probation[key]
            self._proven[key] = None
            if len(self._proven) > self._num_proven:
                fallen, _ = self._proven.popitem(last=False)
                self._probation[fallen] = None
        else:
            self._probation[key] = None

    def victim(self, newcomer: ExpertKey, protected: Container[ExpertKey]) -> ExpertKey:
        """Name the longest unused on probation; a proven one only when there is no other."""
        for segment in (self._probation, self._proven):
            for key in segment:
                if key not in protected:
                    return key
        raise LookupError(f"all {len(self)} resident experts are protected")

    def forget(self, key: ExpertKey) -> None:
        """Drop the expert from its segment."""
        segment = self._proven if key in self._proven else self._probation
        del segment[key]

"""LRU: the least recently used expert goes first."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container

    from lmpack.expert_key import ExpertKey


class LRU:
    """Keeps residents in the order of their last use."""

    name = "lru"

    def __init__(self) -> None:
        self._by_age: OrderedDict[ExpertKey, None] = OrderedDict()  # the longest unused first

    def __len__(self) -> int:
        return len(self._by_age)

    def touch(self, key: ExpertKey) -> None:
        """Make the expert the youngest."""
        self._by_age[key] = None
        self._by_age.move_to_end(key)

    def victim(self, newcomer: ExpertKey, protected: Container[ExpertKey]) -> ExpertKey:
        """Name the oldest that is not protected; looks at no more than the protected ones before it."""
        for key in self._by_age:
            if key not in protected:
                return key
        raise LookupError(f"all {len(self)} resident experts are protected")

    def forget(self, key: ExpertKey) -> None:
        """Drop the expert from the order."""
        del self._by_age[key]

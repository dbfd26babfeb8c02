"""Cache policy: which resident expert goes when another one needs its place.

The runtime's cache and the simulator ask the same objects, so that a simulated hit rate is the engine's. A policy
orders keys; it owns no bytes, knows no sizes and never decides that somebody must go.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Container

    from lmpack.expert_key import ExpertKey


class CachePolicy(Protocol):
    """Hears of every use and every departure, and names the next to go."""

    @property
    def name(self) -> str:
        """What reports call the policy."""

    def touch(self, key: ExpertKey) -> None:
        """Note that an expert is used now; one that was not resident has just become so."""

    def victim(self, protected: Container[ExpertKey]) -> ExpertKey:
        """Name the resident expert outside of `protected` that goes next; it stays resident until forget().

        Raises LookupError when every resident expert is protected.
        """

    def forget(self, key: ExpertKey) -> None:
        """Note that a resident expert has gone; raises KeyError for one that was not resident."""


class LRU:
    """The least recently used expert goes first."""

    name = "LRU"

    def __init__(self) -> None:
        self._by_age: OrderedDict[ExpertKey, None] = OrderedDict()  # the longest unused first

    def touch(self, key: ExpertKey) -> None:
        """Make the expert the youngest."""
        self._by_age[key] = None
        self._by_age.move_to_end(key)

    def victim(self, protected: Container[ExpertKey]) -> ExpertKey:
        """Name the oldest that is not protected; looks at no more than the protected ones before it."""
        for key in self._by_age:
            if key not in protected:
                return key
        raise LookupError(f"all {len(self._by_age)} resident experts are protected")

    def forget(self, key: ExpertKey) -> None:
        """Drop the expert from the order."""
        del self._by_age[key]

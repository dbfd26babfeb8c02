"""Which resident expert gives way to a new one; the simulator and the runtime use the same classes."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Container

    from lmpack.expert_key import ExpertKey


class CachePolicy(Protocol):
    """Orders keys and owns no bytes."""

    @property
    def name(self) -> str:
        """As reports print it."""

    def touch(self, key: ExpertKey) -> None:
        """The key is used now; one not seen before becomes resident."""

    def victim(self, protected: Container[ExpertKey]) -> ExpertKey:
        """The resident key to evict next, none of `protected`; it stays resident until `forget`."""

    def forget(self, key: ExpertKey) -> None:
        """The key is no longer resident."""


class LRU:
    """Evicts the least recently used."""

    name = "LRU"

    def __init__(self) -> None:
        self._order: OrderedDict[ExpertKey, None] = OrderedDict()  # oldest first

    def touch(self, key: ExpertKey) -> None:
        self._order[key] = None
        self._order.move_to_end(key)

    def victim(self, protected: Container[ExpertKey]) -> ExpertKey:
        victim = next((key for key in self._order if key not in protected), None)
        assert victim is not None, "every resident expert is protected"
        return victim

    def forget(self, key: ExpertKey) -> None:
        del self._order[key]

"""Cache policy: which resident expert goes when another one needs its place.

The runtime's cache and the simulator ask the same objects, so that a simulated hit rate is the engine's. A policy
orders keys; it owns no bytes, knows no sizes and never decides that somebody must go.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from lmpack.expert_key import ExpertKey
    from profiles.slot_pool import SlotPool

    MakePolicy = Callable[[SlotPool], "CachePolicy"]


class CachePolicy(Protocol):
    """Hears of every use and every departure, and names the next to go."""

    @property
    def name(self) -> str:
        """What reports call the policy, and what `--policy` takes."""

    def __len__(self) -> int:
        """How many experts are resident."""

    def touch(self, key: ExpertKey) -> None:
        """Note that an expert is used now; one that was not resident has just become so."""

    def victim(self, newcomer: ExpertKey, protected: Container[ExpertKey]) -> ExpertKey:
        """Name the resident expert outside of `protected` that makes room for `newcomer`.

        It stays resident until forget(). Raises LookupError when every resident expert is protected.
        """

    def forget(self, key: ExpertKey) -> None:
        """Note that a resident expert has gone; raises KeyError for one that was not resident."""

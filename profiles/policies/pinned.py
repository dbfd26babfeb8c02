"""Pinned: some experts stay once they are there; among the others another policy decides."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Container

    from lmpack.expert_key import ExpertKey
    from profiles.cache_policy import CachePolicy


class Pinned:
    """Never lets a pinned expert go while an unprotected other one is resident."""

    def __init__(self, pins: Collection[ExpertKey], others: CachePolicy) -> None:
        self._pins = frozenset(pins)
        self._resident: dict[ExpertKey, None] = {}  # the pinned ones, in the order they came
        self._others = others
        self.name = f"pin+{others.name}"

    def __len__(self) -> int:
        return len(self._resident) + len(self._others)

    def touch(self, key: ExpertKey) -> None:
        """Tell the other policy, unless the expert is pinned."""
        if key in self._pins:
            self._resident[key] = None
        else:
            self._others.touch(key)

    def victim(self, newcomer: ExpertKey, protected: Container[ExpertKey]) -> ExpertKey:
        """Ask the other policy; where that has nobody, the pinned one that came first goes."""
        try:
            return self._others.victim(newcomer, protected)
        except LookupError:
            for key in self._resident:
                if key not in protected:
                    return key
            raise LookupError(f"all {len(self)} resident experts are protected") from None

    def forget(self, key: ExpertKey) -> None:
        """Drop a pinned expert, or tell the other policy."""
        if key in self._pins:
            del self._resident[key]
        else:
            self._others.forget(key)

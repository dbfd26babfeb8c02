"""Which experts of one layer are resident, and where."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmpack.expert_key import ExpertKey

if TYPE_CHECKING:
    from profiles.cache_policy import CachePolicy
    from runtime.expert_guesses import ExpertGuesses


class LayerResidents:
    """A layer's slots, and what it shares with the other layers of its layout: a policy and guesses."""

    def __init__(self, layer: int, stride: int, policy: CachePolicy, guesses: ExpertGuesses) -> None:
        self.layer = layer
        self.stride = stride
        self.policy = policy
        self.guesses = guesses
        self.slots: dict[int, int] = {}  # expert -> slot
        self.keys: dict[int, ExpertKey] = {}  # expert -> key, made once

    def key(self, expert: int) -> ExpertKey:
        """An expert's key."""
        if expert not in self.keys:
            self.keys[expert] = ExpertKey(self.layer, expert)
        return self.keys[expert]

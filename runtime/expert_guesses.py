"""Experts read before anybody asked for them, each in a slot that it keeps until it is used or must go."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmpack.expert_key import ExpertKey
    from runtime.expert_readers import Read


class ExpertGuesses:
    """The guesses among one layout's experts, oldest first; they are no policy's concern until they are used."""

    def __init__(self) -> None:
        self._reads: dict[ExpertKey, Read] = {}
        self._passed: dict[ExpertKey, Read] = {}  # those whose layer has had its turn without them

    def __contains__(self, key: ExpertKey) -> bool:
        return key in self._reads

    def __len__(self) -> int:
        return len(self._reads)

    def add(self, guess: Read) -> None:
        """Keep a guess, which has its slot."""
        self._reads[guess.key] = guess

    def take(self, key: ExpertKey) -> Read | None:
        """Hand out the guess of an expert, if there is one."""
        self._passed.pop(key, None)
        return self._reads.pop(key, None)

    def take_ended(self, key: ExpertKey) -> Read | None:
        """Hand out the guess of an expert, if there is one that is no longer on its way."""
        guess = self._reads.get(key)
        return self.take(key) if guess is not None and guess.ended else None

    def take_passed(self) -> Read | None:
        """Hand out the oldest guess that is not on its way and whose layer has had its turn."""
        key = next((key for key, guess in self._passed.items() if guess.ended), None)
        return self.take(key) if key is not None else None

    def take_oldest(self) -> Read | None:
        """Hand out the oldest guess."""
        return self.take(next(iter(self._reads))) if self._reads else None

    def pass_layer(self, layer: int) -> list[Read]:
        """Note that a layer has its turn; gives the guesses for it that were in vain."""
        in_vain = {key: guess for key, guess in self._reads.items() if key.layer == layer}
        self._passed.update(in_vain)
        return list(in_vain.values())

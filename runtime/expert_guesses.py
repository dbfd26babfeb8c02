"""Experts read before anybody asked for them, each in a slot that it keeps until it is used or must go."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.expert_readers import Read

if TYPE_CHECKING:
    from lmpack.expert_key import ExpertKey
    from runtime.expert_readers import ExpertReaders
    from runtime.expert_store import ExpertStore


class ExpertGuesses:
    """The guesses among one layout's experts, oldest first; they are no policy's concern until they are used.

    `useful` counts those that were asked for, `wasted` those that were read and went before that.
    """

    def __init__(self, store: ExpertStore, readers: ExpertReaders) -> None:
        self.useful = 0
        self.wasted = 0
        self._wasted_nbytes = 0
        self._store = store
        self._readers = readers
        self._reads: dict[ExpertKey, Read] = {}
        self._passed: dict[ExpertKey, Read] = {}  # those whose layer has had its turn without them

    def __contains__(self, key: ExpertKey) -> bool:
        return key in self._reads

    def __len__(self) -> int:
        return len(self._reads)

    @property
    def unused_nbytes(self) -> int:
        """What the drive gave for guesses that nobody has asked for, be they still here or gone."""
        return self._wasted_nbytes + sum(guess.drive_nbytes for guess in self._reads.values())

    def begin(self, key: ExpertKey, slot: int) -> Read:
        """Begin to read an expert into a slot, which is the guess's from now on."""
        guess = self._reads[key] = Read(key, slot, is_guess=True)
        self._readers.start(guess)
        return guess

    def take(self, key: ExpertKey) -> Read | None:
        """Hand out the guess of an expert that is asked for, if there is one, with its slot."""
        guess = self._remove(key)
        self.useful += guess is not None
        return guess

    def take_read(self, key: ExpertKey) -> Read | None:
        """The same for one that has been read by now; the slot of one that failed is free again."""
        guess = self._reads.get(key)
        if guess is None or not guess.ended:
            return None
        if guess.error is None:
            return self.take(key)
        self._drop(key)
        return None

    def pass_layer(self, layer: int) -> None:
        """A layer has its turn: do not read what was guessed in vain and waits; the rest is the first to go."""
        in_vain = {key: guess for key, guess in self._reads.items() if key.layer == layer}
        self._passed.update(in_vain)
        for key, guess in in_vain.items():
            if self._readers.cancel(guess):
                self._drop(key)

    def drop_passed(self) -> bool:
        """Free the slot of the oldest guess in vain that is not on its way; whether there was one."""
        key = next((key for key, guess in self._passed.items() if guess.ended), None)
        if key is not None:
            self._drop(key)
        return key is not None

    def drop_oldest(self) -> None:
        """Free the slot of the oldest guess, when its read has ended."""
        self._drop(next(iter(self._reads)))

    def _remove(self, key: ExpertKey) -> Read | None:
        self._passed.pop(key, None)
        return self._reads.pop(key, None)

    def _drop(self, key: ExpertKey) -> None:
        guess = self._remove(key)
        assert guess is not None
        self._readers.settle([guess])
        if guess.begun and guess.error is None:
            self.wasted += 1
            self._wasted_nbytes += guess.drive_nbytes
        self._store.release(guess.key, guess.slot)

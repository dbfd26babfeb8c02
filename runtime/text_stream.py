"""TextStream: generated tokens become text as soon as it is final.

Final is what neither a later token nor a stop string can change: characters whose bytes are complete, and text that
cannot be the beginning of a stop string.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Protocol

from lmpack.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence


class TokenBytes(Protocol):
    """The part of a Tokenizer that a stream needs."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text."""

    def is_special(self, token_id: int) -> bool:
        """Whether a token is no part of an answer's text."""


class TextStream:
    """One answer; push its tokens, show what comes back, and call finish when no more tokens follow.

    What it returns, put together, does not depend on where the tokens' borders lie: it is the text of all bytes,
    with U+FFFD for what is no UTF-8, cut before the stop string that is complete first (the longest of those that
    are complete at the same character).
    """

    def __init__(
        self, tokenizer: TokenBytes, stop: Sequence[str] = (), *, show_special: bool = False
    ) -> None:
        if "" in stop:
            raise UsageError(
                "a stop string is empty, which would stop before the first character; leave it out"
            )
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._show_special = show_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._withheld = ""
        self.stopped = False  # a stop string was found; nothing more will come

    def push(self, token_id: int) -> str:
        """Take the next token and return the text that is final now."""
        if self.stopped or (not self._show_special and self._tokenizer.is_special(token_id)):
            return ""
        return self._take(self._decoder.decode(self._tokenizer.token_bytes(token_id)), is_last=False)

    def finish(self) -> str:
        """Return what was withheld; the bytes of an unfinished character are one U+FFFD."""
        if self.stopped:
            return ""
        return self._take(self._decoder.decode(b"", final=True), is_last=True)

    def _take(self, text: str, *, is_last: bool) -> str:
        self._withheld += text
        found = [(at + len(stop), at) for stop in self._stop if (at := self._withheld.find(stop)) >= 0]
        if found:
            self.stopped = True
            return self._release(min(found)[1])
        return self._release(len(self._withheld) - (0 if is_last else self._num_undecided()))

    def _num_undecided(self) -> int:
        """How many characters at the end could still become a stop string."""
        text = self._withheld
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest

    def _release(self, num_characters: int) -> str:
        final, self._withheld = self._withheld[:num_characters], self._withheld[num_characters:]
        return final

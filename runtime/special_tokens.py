"""SpecialTokens: finds the tokens in a text that are matched whole, before any words are formed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.vocabulary import TokenKind

if TYPE_CHECKING:
    from runtime.vocabulary import Vocabulary

_C_WHITE_SPACE = " \t\n\v\f\r"  # what C's isspace knows


class SpecialTokens:
    """Cuts texts at special tokens as llama.cpp does: the longest first, each wherever the ones before it left text.

    User-defined tokens are always matched, control and unknown tokens only when asked for.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        texts, kinds = vocabulary.texts, vocabulary.kinds
        matched = TokenKind.CONTROL | TokenKind.USER_DEFINED | TokenKind.UNKNOWN
        found = [i for i, kind in enumerate(kinds) if kind & matched]
        found.sort(key=lambda i: -len(texts[i].encode(errors="surrogateescape")))
        self._all = [(texts[i], i) for i in found]
        self._shown = [(texts[i], i) for i in found if not kinds[i].is_hidden]
        self._vocabulary = vocabulary

    def split(self, text: str, *, parse_special: bool) -> list[str | int]:
        """Return the text's parts in order: token ids, and the texts between them; none is empty."""
        parts: list[str | int] = [text] if text else []
        candidates = self._all if parse_special else self._shown
        if not parts or not candidates:
            return parts
        # vocabularies have thousands of special tokens and a text few; a search per candidate would dominate
        starts = {text[i : i + 2] for i in range(len(text))} | set(text)
        for token_text, token_id in candidates:
            if token_text[:2] in starts and token_text in text:
                parts = self._split_at(parts, token_text, token_id)
        return parts

    def _split_at(self, parts: list[str | int], token_text: str, token_id: int) -> list[str | int]:
        strips_before = token_id in self._vocabulary.strips_before
        strips_after = token_id in self._vocabulary.strips_after
        cut: list[str | int] = []
        for part in parts:
            if isinstance(part, int):
                cut.append(part)
                continue
            pieces = part.split(token_text)
            if strips_before:
                pieces[:-1] = [piece.rstrip(_C_WHITE_SPACE) for piece in pieces[:-1]]
            if strips_after:
                pieces[1:] = [piece.lstrip(_C_WHITE_SPACE) for piece in pieces[1:]]
            for i, piece in enumerate(pieces):
                cut += [token_id] if i else []
                cut += [piece] if piece else []
        return cut

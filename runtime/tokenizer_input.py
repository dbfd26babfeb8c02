"""Tokenizer input: what callers hand to a tokenizer, checked at the border."""

from __future__ import annotations

from lmpack.errors import UsageError


def check_text(text: str) -> None:
    """Refuse text that no UTF-8 can hold; raises UsageError with the place."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"text: character {error.start} is the lone surrogate U+{ord(text[error.start]):04X}, which is no "
            "character; decode the bytes it came from as UTF-8, or join the pair it was half of"
        ) from None


def check_token_id(token_id: int, vocab_size: int) -> None:
    """Refuse an id outside the vocabulary; raises UsageError with the range."""
    if not 0 <= token_id < vocab_size:
        raise UsageError(f"token id {token_id}: the vocabulary has ids 0 to {vocab_size - 1}")

"""Vocabulary: a model's tokens with their texts, kinds and scores, whatever file they come from.

What follows from texts alone, which tokens are control tokens and which end a generation, is llama.cpp's rule
(llama_vocab::load, build 11549).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag
from typing import TYPE_CHECKING

from runtime.end_of_generation import END_TEXTS, FILL_ENDS, FILL_TEXTS, is_channel_end, is_plain_tag

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from runtime.pre_tokenizer import PreTokenizer

# gpt-oss's channel marks: always shown, so that its answers can be taken apart
_SHOWN_MARKS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")


class TokenKind(IntFlag):
    """What a token is; a normal token that looks like a control token is both."""

    UNDEFINED = 0
    UNKNOWN = 1
    UNUSED = 2
    NORMAL = 4
    CONTROL = 8
    USER_DEFINED = 16
    BYTE = 32

    @property
    def is_hidden(self) -> bool:
        """Whether text matches it only when special tokens are parsed, and answers do not show it."""
        return bool(self & (TokenKind.CONTROL | TokenKind.UNKNOWN))


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens by id and the rules that go with them; an id is an index into texts, kinds and scores.

    A text that is not UTF-8 keeps its bytes as surrogate escapes.
    """

    texts: Sequence[str]
    ids: Mapping[str, int]
    kinds: Sequence[TokenKind]
    eog_ids: frozenset[int]
    special_ids: Mapping[str, int]  # "bos", "eos", "pad", "unk", ... -> id
    adds_bos: bool
    adds_eos: bool
    adds_space: bool  # before a text that follows no other text
    pre_tokenizer: PreTokenizer | None = None  # None: SentencePiece
    merges: Sequence[str] = ()  # "left right", best first; with a pre-tokenizer
    scores: Sequence[float] = ()  # without one
    strips_after: frozenset[int] = frozenset()  # ids of tokens that swallow the white space behind them
    strips_before: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def bos_id(self) -> int | None:
        """The token that starts a text."""
        return self.special_ids.get("bos")

    @property
    def eos_id(self) -> int | None:
        """The token that ends a text."""
        return self.special_ids.get("eos")


def settle_kinds(
    ids: Mapping[str, int], kinds: NDArray[np.uint8], special_ids: Mapping[str, int]
) -> tuple[list[TokenKind], frozenset[int]]:
    """Return the tokens' kinds, corrected where a text says more than the file, and the ids that end a generation.

    kinds: [vocab_size] of TokenKind's values; special_ids may hold eos, eot, eom and fim_*.
    """
    kinds = kinds.copy()
    eog_ids = {special_ids[name] for name in (*FILL_ENDS, "eos", "eot", "eom") if name in special_ids}
    for name, texts in FILL_TEXTS.items():
        found = min((ids[text] for text in texts if text in ids), default=None)
        if found is not None and name not in special_ids:
            kinds[found] |= TokenKind.CONTROL
            eog_ids.update([found] if name in FILL_ENDS else [])
    for text in END_TEXTS & ids.keys():
        kinds[ids[text]] |= TokenKind.CONTROL
        eog_ids.add(ids[text])
    for text in _SHOWN_MARKS:
        if text in ids:
            kinds[ids[text]] = TokenKind.USER_DEFINED
    if "<|end|>" in ids and is_channel_end(ids):
        kinds[ids["<|end|>"]] = TokenKind.USER_DEFINED
        eog_ids.discard(ids["<|end|>"])
    if "</s>" in ids and is_plain_tag(ids, eog_ids):
        kinds[ids["</s>"]] = TokenKind.NORMAL
        eog_ids.discard(ids["</s>"])
    by_value = [TokenKind(value) for value in range(64)]
    return [by_value[value] for value in kinds.tolist()], frozenset(eog_ids)

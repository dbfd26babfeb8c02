"""VocabularyTokenizer: a tokenizer made from a vocabulary, as llama.cpp makes one from a GGUF."""

from __future__ import annotations

import re
from functools import cached_property
from typing import TYPE_CHECKING

from runtime.byte_pair_encoder import BYTES_BY_CHARACTER, SPACE, BytePairEncoder
from runtime.sentencepiece_bpe import SentencePieceEncoder
from runtime.special_tokens import SpecialTokens
from runtime.tokenizer_input import check_text, check_token_id
from runtime.vocabulary import TokenKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from runtime.vocabulary import Vocabulary


class VocabularyTokenizer:
    """See Tokenizer; tokens, pieces and texts equal llama.cpp's for the same vocabulary."""

    def __init__(self, vocabulary: Vocabulary, chat_template: str | None = None) -> None:
        self.vocabulary = vocabulary
        self.chat_template = chat_template
        self.vocab_size = len(vocabulary)
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        self.eog_ids = vocabulary.eog_ids
        self.adds_bos = vocabulary.adds_bos
        self.adds_eos = vocabulary.adds_eos
        self._cleans_spaces = vocabulary.pre_tokenizer is not None and vocabulary.pre_tokenizer.cleans_spaces
        self._is_byte_level = vocabulary.pre_tokenizer is not None and vocabulary.pre_tokenizer.is_byte_level

    @cached_property
    def special_texts(self) -> Mapping[str, str]:
        """The special tokens' texts by the names that chat templates use: bos_token, eos_token, ..."""
        texts = self.vocabulary.texts
        return {f"{name}_token": texts[token_id] for name, token_id in self.vocabulary.special_ids.items()}

    @cached_property
    def _special_tokens(self) -> SpecialTokens:
        return SpecialTokens(self.vocabulary)

    @cached_property
    def _encoder(self) -> BytePairEncoder | SentencePieceEncoder:
        if self.vocabulary.pre_tokenizer is None:
            return SentencePieceEncoder(self.vocabulary)
        return BytePairEncoder(self.vocabulary)

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Return the text's token ids; see Tokenizer."""
        check_text(text)
        vocabulary, encoder = self.vocabulary, self._encoder
        adds_space = vocabulary.adds_space and vocabulary.pre_tokenizer is None
        ids: list[int] = []
        if add_special and vocabulary.adds_bos:
            assert vocabulary.bos_id is not None, "checked when the vocabulary was read"
            ids.append(vocabulary.bos_id)
        follows_text = False
        for part in self._special_tokens.split(text, parse_special=parse_special):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += encoder.encode(" " + part if adds_space and not follows_text else part)
            follows_text = isinstance(part, str)
        if add_special and vocabulary.adds_eos:
            assert vocabulary.eos_id is not None, "checked when the vocabulary was read"
            ids.append(vocabulary.eos_id)
        return ids

    def decode(
        self, ids: Iterable[int], *, remove_special: bool = False, unparse_special: bool = True
    ) -> str:
        """Return the ids' text; see Tokenizer."""
        ids = list(ids)
        strips_space = self.vocabulary.adds_space
        if remove_special:
            if self.adds_bos and ids and ids[0] == self.bos_id:
                del ids[0]
                strips_space = False
            if self.adds_eos and ids and ids[-1] == self.eos_id:
                del ids[-1]
        pieces = [self.token_bytes(i) if unparse_special or not self.is_special(i) else b"" for i in ids]
        if strips_space and pieces:
            pieces[0] = pieces[0].removeprefix(b" ")
        joined = b"".join(pieces)
        return (_without_loose_spaces(joined) if self._cleans_spaces else joined).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text, which need not be whole characters."""
        check_token_id(token_id, self.vocab_size)
        text, kind = self.vocabulary.texts[token_id], self.vocabulary.kinds[token_id]
        if kind.is_hidden or kind & TokenKind.USER_DEFINED:
            return text.encode(errors="surrogateescape")
        if kind & TokenKind.NORMAL:
            if self._is_byte_level:
                return _from_byte_characters(text)
            return text.replace(SPACE, " ").encode(errors="surrogateescape")
        if kind & TokenKind.BYTE:
            return bytes([_byte_value(text)])
        return b""  # unused: nothing is known about its text

    def piece(self, token_id: int) -> str:
        """Return a token's bytes as text, with U+FFFD for what is no whole character."""
        return self.token_bytes(token_id).decode(errors="replace")

    def is_special(self, token_id: int) -> bool:
        """Say whether a token steers the model and is no part of an answer's text."""
        check_token_id(token_id, self.vocab_size)
        return self.vocabulary.kinds[token_id].is_hidden


def _from_byte_characters(text: str) -> bytes:
    """Undo the byte-level mapping; a text with other characters is shown as llama.cpp shows it."""
    try:
        return bytes([BYTES_BY_CHARACTER[char] for char in text])
    except KeyError:
        raw = text.encode(errors="surrogateescape")
    shown = b""
    for char in raw.decode(errors="replace"):
        byte = BYTES_BY_CHARACTER.get(char)
        shown += (
            bytes([byte]) if byte is not None else b"[UNK_BYTE_0x%s%s]" % (char.encode().hex().encode(), raw)
        )
    return shown


def _byte_value(text: str) -> int:
    """The byte of <0x0A>; 0 for a text of another form."""
    try:
        return int(text[3:5], 16)
    except ValueError:
        return 0


def _without_loose_spaces(text: bytes) -> bytes:
    """Take out spaces before punctuation and contractions, as clean_up_tokenization_spaces means it."""
    text = re.sub(rb" ([?!.,])", rb"\1", text)
    text = text.replace(b" ' ", b"'")
    return re.sub(rb" (?='(?:[sm]|re|ve))", b"", text)

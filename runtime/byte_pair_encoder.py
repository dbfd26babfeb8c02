"""BytePairEncoder: byte-level BPE over a vocabulary and its merges, with the `tokenizers` library.

llama.cpp merges by texts and looks tokens up at the end, so it also accepts merges whose result is no token, and
falls back to single bytes there. The library wants every merge in its vocabulary; such texts get ids beyond the
vocabulary here, which are replaced after encoding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers import Tokenizer, models

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from runtime.vocabulary import Vocabulary

SPACE = "\u2581"  # ▁, how vocabularies that are not byte-level write a space
_UNKNOWN = "\0unknown\0"  # a text that no merge makes


def _byte_characters() -> str:
    """GPT-2's printable character for each byte: itself where it prints, else one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    codes = {byte: byte for byte in printable} | {byte: 0x100 + n for n, byte in enumerate(others)}
    return "".join(chr(codes[byte]) for byte in range(256))


BYTE_CHARACTERS = _byte_characters()
BYTES_BY_CHARACTER: Mapping[str, int] = {char: byte for byte, char in enumerate(BYTE_CHARACTERS)}


class BytePairEncoder:
    """Turns text without special tokens into ids."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        pre_tokenizer = vocabulary.pre_tokenizer
        assert pre_tokenizer is not None, "byte-pair vocabularies have a pre-tokenizer"
        self._is_byte_level = pre_tokenizer.is_byte_level
        self._keeps_newline_runs = pre_tokenizer.keeps_newline_runs
        self._vocab_size = len(vocabulary)
        self._ids = vocabulary.ids
        merges = _pairs(_utf8_texts(vocabulary.merges))
        ids = {text: vocabulary.ids[text] for text in _utf8_texts(vocabulary.texts)}
        extra = {text for left, right in merges for text in (left, right, left + right) if text not in ids}
        # the library would keep a word whole that is an extra text, and knows nothing of runs of newlines
        self._looks_words_up = (
            pre_tokenizer.ignores_merges and bool(extra)
        ) or pre_tokenizer.keeps_newline_runs
        if self._is_byte_level:
            extra.update(char for char in BYTE_CHARACTERS if char not in ids)
        else:
            # else the library would join what stands on both sides of an unknown character
            extra.add(_UNKNOWN)
        self._in_bytes: dict[int, list[int]] = {}
        for token_id, text in enumerate(sorted(extra), start=self._vocab_size):
            ids[text] = token_id
            self._in_bytes[token_id] = self._byte_ids(text)
        self._model = models.BPE(
            ids,
            merges,
            ignore_merges=pre_tokenizer.ignores_merges and not self._looks_words_up,
            byte_fallback=not self._is_byte_level,
            unk_token=None if self._is_byte_level else _UNKNOWN,
        )
        self._words = pre_tokenizer.build()
        self._library = Tokenizer(self._model)
        self._library.pre_tokenizer = self._words

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; characters that no token and no byte token stands for are left out."""
        if not self._is_byte_level:
            text = text.replace(" ", SPACE)
        if not self._looks_words_up:
            return self._known(self._library.encode(text, add_special_tokens=False).ids)
        ids: list[int] = []
        for word, _ in self._words.pre_tokenize_str(text):
            if word in self._ids and (word[0] == "\n" or not self._keeps_newline_runs):
                ids.append(self._ids[word])
            else:
                ids += self._known([token.id for token in self._model.tokenize(word)])
        return ids

    def _known(self, ids: list[int]) -> list[int]:
        """Replace ids beyond the vocabulary by what they stand for."""
        if self._in_bytes and ids and max(ids) >= self._vocab_size:
            return [known for found in ids for known in self._in_bytes.get(found, (found,))]
        return ids

    def _byte_ids(self, text: str) -> list[int]:
        """The tokens for a text that is none: one for each of its bytes, where there is one."""
        if text == _UNKNOWN:
            return []
        if self._is_byte_level:
            names = [char for char in text if char.isascii()]  # a byte >= 0x80 alone is no text
        else:
            names = [f"<0x{byte:02X}>" for byte in text.encode()]
        return [self._ids[name] for name in names if name in self._ids]


def _pairs(merges: Iterable[str]) -> list[tuple[str, str]]:
    """Split "left right" at the first space behind the first character; of two equal merges the first counts."""
    pairs: dict[tuple[str, str], None] = {}
    for merge in merges:
        space = merge.find(" ", 1)
        if space > 0:
            pairs.setdefault((merge[:space], merge[space + 1 :]))
    return list(pairs)


def _utf8_texts(texts: Sequence[str]) -> Sequence[str]:
    """The texts that are UTF-8: no text holds the others, and the library takes none."""
    try:
        "\0".join(texts).encode()
        return texts
    except UnicodeEncodeError:
        return [text for text in texts if not any(0xD800 <= ord(char) < 0xE000 for char in text)]

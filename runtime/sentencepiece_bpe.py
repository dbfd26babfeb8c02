"""SentencePieceEncoder: merges the pair whose joined token has the best score, the leftmost of equals.

The `tokenizers` library ranks merges one by one and cannot say that two are equal, which decides how runs of one
character fall apart; hence this file. The order is llama.cpp's (llm_tokenizer_spm) and SentencePiece's own.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from lmpack.errors import CheckpointError
from runtime.byte_pair_encoder import SPACE

if TYPE_CHECKING:
    from runtime.vocabulary import Vocabulary

_MAX_CACHED_WORDS = 50_000


class SentencePieceEncoder:
    """Turns text without special tokens into ids; the caller has put the leading space where one belongs."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._ids = vocabulary.ids
        # negative, because the heap gives the smallest first
        self._costs = {text: -score for text, score in zip(vocabulary.texts, vocabulary.scores, strict=True)}
        self._byte_ids = [
            vocabulary.ids.get(f"<0x{byte:02X}>", vocabulary.ids.get(chr(byte) if byte < 0x80 else ""))
            for byte in range(256)
        ]
        self._unknown_id = vocabulary.special_ids.get("unk")
        # two characters that no token has side by side are never merged: text can be cut there
        self._neighbours = {text[i : i + 2] for text in vocabulary.texts for i in range(len(text) - 1)}
        self._cache: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        text = text.replace(" ", SPACE)
        neighbours, cache = self._neighbours, self._cache
        ids: list[int] = []
        start = 0
        for i in range(1, len(text) + 1):
            if text[i - 1 : i + 1] in neighbours:
                continue
            word = text[start:i]
            start = i
            found = cache.get(word)
            if found is None:
                if len(cache) >= _MAX_CACHED_WORDS:
                    cache.clear()
                found = cache[word] = self._word_ids(word)
            ids += found
        return ids

    def _word_ids(self, word: str) -> list[int]:
        ids: list[int] = []
        for symbol in self._merged(word):
            token_id = self._ids.get(symbol)
            if token_id is None:
                ids += self._bytes_of(symbol)
            else:
                ids.append(token_id)
        return ids

    def _merged(self, word: str) -> list[str]:
        """Merge pairs of symbols until no two neighbours form a token."""
        costs = self._costs
        lengths = [1] * len(word)  # of the symbol that starts at each character; 0: merged into one before it
        following = [*range(1, len(word)), -1]
        previous = [*range(-1, len(word) - 1)]
        queue = [
            (costs[word[i : i + 2]], i, i + 1, 2) for i in range(len(word) - 1) if word[i : i + 2] in costs
        ]
        heapify(queue)
        while queue:
            _, left, right, length = heappop(queue)
            if not lengths[left] or not lengths[right] or lengths[left] + lengths[right] != length:
                continue  # one of them has been merged since
            lengths[left], lengths[right] = length, 0
            after = following[left] = following[right]
            if after >= 0:
                previous[after] = left
                joined = length + lengths[after]
                cost = costs.get(word[left : left + joined])
                if cost is not None:
                    heappush(queue, (cost, left, after, joined))
            before = previous[left]
            if before >= 0:
                joined = lengths[before] + length
                cost = costs.get(word[before : before + joined])
                if cost is not None:
                    heappush(queue, (cost, before, left, joined))
        return [word[i : i + length] for i, length in enumerate(lengths) if length]

    def _bytes_of(self, symbol: str) -> list[int]:
        ids = [self._byte_ids[byte] for byte in symbol.encode()]
        if None not in ids:
            return [i for i in ids if i is not None]
        if self._unknown_id is None:
            raise CheckpointError(
                f"the vocabulary has no token for {symbol!r}, no byte tokens <0x00> to <0xFF> and no unknown token"
            )
        return [self._unknown_id]

"""The vocabulary in a SentencePiece file (tokenizer.model), read without the sentencepiece package.

The file is a protocol buffer, sentencepiece_model.proto: field 1 repeats the pieces (text 1, score 2, type 3), field 2
is how it was trained (model type 3, special ids 40 to 43), field 3 how text is normalised (character map 2, dummy
prefix 3). Fields not named here do not change how text is tokenized.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np

from lmpack.errors import CheckpointError, UnsupportedError
from runtime.hf_config import HFTokenizerConfig
from runtime.vocabulary import TokenKind, Vocabulary, settle_kinds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

MAX_FILE_NBYTES = 64 << 20  # Gemma's 256,000 pieces take 4 MB
_NORMAL, _BPE = 1, 2  # defaults and values of the proto's enums
_KINDS = {
    1: TokenKind.NORMAL,
    2: TokenKind.UNKNOWN,
    3: TokenKind.CONTROL,
    4: TokenKind.USER_DEFINED,
    5: TokenKind.UNUSED,
    6: TokenKind.BYTE,
}
_ADDED_SCORE = -1000.0  # below every piece of the file; llama.cpp's converter writes the same


def vocabulary_from_sentencepiece(path: Path) -> Vocabulary:
    """Read a tokenizer.model and the JSON files beside it.

    Raises CheckpointError when it is not one, UnsupportedError for a model that is not BPE or that rewrites text.
    """
    if path.stat().st_size > MAX_FILE_NBYTES:
        raise CheckpointError(
            f"{path}: larger than {MAX_FILE_NBYTES} bytes, which no SentencePiece vocabulary is"
        )
    try:
        pieces, trainer, normalizer = _parts(path.read_bytes())
    except (IndexError, ValueError, struct.error):
        raise CheckpointError(f"{path}: is not a SentencePiece model; download it again") from None
    if not pieces:
        raise CheckpointError(f"{path}: is not a SentencePiece model: it has no pieces")
    if trainer.get(3, 1) != _BPE:
        raise UnsupportedError(
            f"{path}: a SentencePiece model of type {trainer.get(3, 1)!r}, only BPE (2) is supported"
        )
    if normalizer.get(2):
        raise UnsupportedError(
            f"{path}: rewrites text with a character map, which is not supported; save a tokenizer.json with transformers"
        )
    texts, scores, kinds = [list(column) for column in zip(*pieces, strict=True)]
    config = HFTokenizerConfig.read(path.parent)
    _add_tokens(path.parent, config, texts, scores, kinds)
    return _vocabulary(path, texts, scores, kinds, _special_ids(trainer, texts, config), normalizer, config)


def _add_tokens(
    folder: Path, config: HFTokenizerConfig, texts: list[str], scores: list[float], kinds: list[TokenKind]
) -> None:
    """Put the tokens that were added to the file's pieces in their places, and unused ones between and after them."""
    for token in config.added_tokens:
        while len(texts) <= token.token_id < config.vocab_size:
            _append_unused(texts, scores, kinds)
        if token.token_id >= len(texts):
            raise CheckpointError(
                f"{folder}: added token {token.text!r:.40} has id {token.token_id}, the vocabulary ends at "
                f"{len(texts) - 1}"
            )
        if kinds[token.token_id] != TokenKind.UNUSED or texts[token.token_id].startswith("[PAD"):
            texts[token.token_id] = token.text
            scores[token.token_id] = _ADDED_SCORE
            kinds[token.token_id] = TokenKind.CONTROL if token.is_special else TokenKind.USER_DEFINED
    while len(texts) < config.vocab_size:
        _append_unused(texts, scores, kinds)


def _vocabulary(
    path: Path,
    texts: list[str],
    scores: list[float],
    kinds: list[TokenKind],
    special_ids: Mapping[str, int],
    normalizer: Mapping[int, int | bytes],
    config: HFTokenizerConfig,
) -> Vocabulary:
    ids = {text: i for i, text in reversed(list(enumerate(texts)))}
    settled, eog_ids = settle_kinds(ids, np.array(kinds, np.uint8), special_ids)
    adds_bos = config.adds_bos is not False
    if adds_bos and "bos" not in special_ids:
        raise CheckpointError(
            f"{path}: texts start with a bos token, and there is none; set add_bos_token to false"
        )
    return Vocabulary(
        texts=texts,
        ids=ids,
        kinds=settled,
        eog_ids=eog_ids | set(config.eos_ids),
        special_ids=special_ids,
        adds_bos=adds_bos,
        adds_eos=config.adds_eos is True and "eos" in special_ids,
        adds_space=bool(normalizer.get(3, 1)),
        scores=scores,
    )


def _append_unused(texts: list[str], scores: list[float], kinds: list[TokenKind]) -> None:
    texts.append(f"[PAD{len(texts)}]")
    scores.append(_ADDED_SCORE)
    kinds.append(TokenKind.UNUSED)


def _special_ids(
    trainer: Mapping[int, int | bytes], texts: list[str], config: HFTokenizerConfig
) -> dict[str, int]:
    """The special tokens: as the JSON files name them, else as the model was trained."""
    trained = {
        "unk": trainer.get(40, 0),
        "bos": trainer.get(41, 1),
        "eos": trainer.get(42, 2),
        "pad": trainer.get(43, -1),
    }
    found = {name: i for name, i in trained.items() if isinstance(i, int) and 0 <= i < len(texts)}
    for name, text in config.special_texts.items():
        if text in texts:
            found[name.removesuffix("_token")] = texts.index(text)
    return found


def _parts(
    raw: bytes,
) -> tuple[list[tuple[str, float, TokenKind]], dict[int, int | bytes], dict[int, int | bytes]]:
    pieces: list[tuple[str, float, TokenKind]] = []
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    for number, value in _fields(raw):
        if not isinstance(value, bytes):
            continue
        if number == 1:
            piece = dict(_fields(value))
            text, score, kind = piece.get(1, b""), piece.get(2, bytes(4)), piece.get(3, _NORMAL)
            if not isinstance(text, bytes) or not isinstance(score, bytes) or not isinstance(kind, int):
                raise ValueError("a piece with fields of the wrong type")
            pieces.append(
                (text.decode(), struct.unpack("<f", score)[0], _KINDS.get(kind, TokenKind.UNDEFINED))
            )
        elif number == 2:
            trainer = dict(_fields(value))
        elif number == 3:
            normalizer = dict(_fields(value))
    return pieces, trainer, normalizer


def _fields(raw: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield a message's fields: their numbers, and ints for varints, bytes for all else."""
    position = 0
    while position < len(raw):
        tag, position = _varint(raw, position)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == 0:
            value, position = _varint(raw, position)
            yield number, value - (1 << 64) if value >> 63 else value
            continue
        if wire_type == 2:
            nbytes, position = _varint(raw, position)
        elif wire_type in (1, 5):
            nbytes = 8 if wire_type == 1 else 4
        else:
            raise ValueError(f"wire type {wire_type}")
        if position + nbytes > len(raw):
            raise ValueError("a field longer than its message")
        yield number, raw[position : position + nbytes]
        position += nbytes


def _varint(raw: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = raw[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than 64 bits")

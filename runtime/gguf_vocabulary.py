"""The vocabulary in a GGUF's metadata: the keys tokenizer.ggml.*."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from lmpack.errors import CheckpointError, UnsupportedError
from runtime.pre_tokenizer import pre_tokenizer_named
from runtime.vocabulary import TokenKind, Vocabulary, settle_kinds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from runtime.pre_tokenizer import PreTokenizer

# the kind for each value of tokenizer.ggml.token_type
_KINDS = np.array(
    [
        TokenKind.UNDEFINED,
        TokenKind.NORMAL,
        TokenKind.UNKNOWN,
        TokenKind.CONTROL,
        TokenKind.USER_DEFINED,
        TokenKind.UNUSED,
        TokenKind.BYTE,
    ],
    np.uint8,
)
# our names of special tokens: the key tokenizer.ggml.…_token_id
_SPECIAL_KEYS = {
    "bos": "bos",
    "eos": "eos",
    "eot": "eot",
    "eom": "eom",
    "unk": "unknown",
    "sep": "seperator",  # the specification's spelling
    "pad": "padding",
    "mask": "mask",
    "fim_pre": "fim_pre",
    "fim_suf": "fim_suf",
    "fim_mid": "fim_mid",
    "fim_pad": "fim_pad",
    "fim_rep": "fim_rep",
    "fim_sep": "fim_sep",
}
# llama.cpp's ids where a file names none
_SENTENCEPIECE_IDS = {"bos": 1, "eos": 2, "unk": 0}
_BPE_IDS = {"bos": 11, "eos": 11}


def vocabulary_from_gguf(metadata: Mapping[str, Any], where: str) -> Vocabulary:
    """Read the vocabulary that a GGUF's metadata hold; `where` names the file in errors.

    Raises CheckpointError when keys are missing or contradict each other, UnsupportedError for a tokenizer model
    or pre-tokenizer that is not known.
    """
    keys = _TokenizerKeys(metadata, where)
    model = keys.text("model")
    if model == "llama":
        return _read(keys, None, _SENTENCEPIECE_IDS)
    if model == "gemma4":
        return _read(keys, pre_tokenizer_named("gemma4", where), {})
    if model == "gpt2":
        name = keys.text("pre", "default")
        pre_tokenizer = pre_tokenizer_named(name, f"{where}: tokenizer.ggml.pre")
        return _read(keys, pre_tokenizer, _BPE_IDS if pre_tokenizer.has_bos else {"eos": _BPE_IDS["eos"]})
    raise UnsupportedError(
        f"{where}: tokenizer.ggml.model is {model!r:.80}; known are: gpt2 (byte-level BPE), gemma4, llama (SentencePiece)"
    )


def _read(
    keys: _TokenizerKeys,
    pre_tokenizer: PreTokenizer | None,
    default_ids: Mapping[str, int],
) -> Vocabulary:
    texts = keys.strings("tokens")
    texts = [text or f"[EMPTY_{i}]" for i, text in enumerate(texts)]
    ids = {text: i for i, text in enumerate(texts)}
    if len(ids) < len(texts):
        i = next(i for i, text in enumerate(texts) if ids[text] != i)
        raise CheckpointError(
            f"{keys.where}: tokens {i} and {ids[texts[i]]} have the same text {texts[i]!r:.80}"
        )
    adds_bos = keys.flag("add_bos_token", pre_tokenizer.adds_bos if pre_tokenizer else True)
    if pre_tokenizer and pre_tokenizer.must_add_bos:
        adds_bos = True
    adds_eos = keys.flag("add_eos_token", False)
    special_ids = keys.special_ids(len(texts))
    for name, is_added in (("bos", adds_bos), ("eos", adds_eos)):
        default = default_ids.get(name, len(texts))
        is_used = is_added if pre_tokenizer else True
        if is_used and name not in special_ids and default < len(texts):
            special_ids[name] = default
        if is_added and name not in special_ids:
            raise CheckpointError(
                f"{keys.where}: tokenizer.ggml.add_{name}_token is true, and {name}_token_id names no token"
            )
    kinds, eog_ids = settle_kinds(ids, keys.kinds(len(texts)), special_ids)
    strips_after, strips_before = _strips(keys.general_name, ids, kinds, pre_tokenizer)
    return Vocabulary(
        texts=texts,
        ids=ids,
        kinds=kinds,
        eog_ids=eog_ids,
        special_ids=special_ids,
        adds_bos=adds_bos,
        adds_eos=adds_eos,
        adds_space=keys.flag("add_space_prefix", pre_tokenizer is None),
        pre_tokenizer=pre_tokenizer,
        merges=keys.strings("merges") if pre_tokenizer else (),
        scores=() if pre_tokenizer else keys.scores(len(texts)),
        strips_after=strips_after,
        strips_before=strips_before,
    )


def _strips(
    general_name: str,
    ids: Mapping[str, int],
    kinds: Sequence[TokenKind],
    pre_tokenizer: PreTokenizer | None,
) -> tuple[frozenset[int], frozenset[int]]:
    """Return the tokens that swallow the white space behind and before them; GGUF has no key for that."""
    if pre_tokenizer and pre_tokenizer.strips_before_mask and "<mask>" in ids:
        return frozenset(), frozenset({ids["<mask>"]})
    if "phi-3" in general_name.lower() or "phi3" in general_name.lower():
        special = {i for i, kind in enumerate(kinds) if kind.is_hidden or kind & TokenKind.USER_DEFINED}
        special |= {ids[text] for text in ("</s>",) if text in ids}
        special -= {ids[text] for text in ("<unk>", "<s>", "<|endoftext|>") if text in ids}
        return frozenset(special), frozenset()
    return frozenset(), frozenset()


class _TokenizerKeys:
    """Typed access to tokenizer.ggml.*; whatever is wrong is a CheckpointError that names the key."""

    def __init__(self, metadata: Mapping[str, Any], where: str) -> None:
        self.metadata = metadata
        self.where = where
        name = metadata.get("general.name", "")
        self.general_name = name if isinstance(name, str) else ""

    def text(self, key: str, default: str | None = None) -> str:
        found = self.metadata.get(f"tokenizer.ggml.{key}", default)
        if found is None:
            raise CheckpointError(
                f"{self.where}: has no tokenizer.ggml.{key}, so no text can be tokenized; use a GGUF with a vocabulary"
            )
        if not isinstance(found, str):
            raise self.error(key, found, "a string")
        return found

    def flag(self, key: str, default: bool) -> bool:
        found = self.metadata.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(found, bool):
            raise self.error(key, found, "true or false")
        return found

    def strings(self, key: str) -> list[str]:
        found = self.metadata.get(f"tokenizer.ggml.{key}")
        if found is None:
            raise CheckpointError(f"{self.where}: has no tokenizer.ggml.{key}; convert the model again")
        if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
            raise self.error(key, found, "an array of strings")
        return found

    def kinds(self, vocab_size: int) -> NDArray[np.uint8]:
        """[vocab_size] of TokenKind's values; tokens are normal when the file says nothing."""
        types = self.numbers("token_type", vocab_size)
        if types is None:
            return np.full(vocab_size, TokenKind.NORMAL, np.uint8)
        known = (types >= 0) & (types < len(_KINDS))
        return _KINDS[np.where(known, types, 0).astype(np.int64)]

    def scores(self, vocab_size: int) -> list[float]:
        scores = self.numbers("scores", vocab_size)
        return [0.0] * vocab_size if scores is None else scores.tolist()

    def numbers(self, key: str, vocab_size: int) -> NDArray[Any] | None:
        found = self.metadata.get(f"tokenizer.ggml.{key}")
        if found is None:
            return None
        if not isinstance(found, np.ndarray) or found.ndim != 1 or found.dtype.kind not in "iuf":
            raise self.error(key, found, "an array of numbers")
        if len(found) < vocab_size:
            raise CheckpointError(
                f"{self.where}: tokenizer.ggml.{key} has {len(found)} entries for {vocab_size} tokens"
            )
        return found[:vocab_size]

    def special_ids(self, vocab_size: int) -> dict[str, int]:
        """The special tokens that the file names; an id outside the vocabulary counts as not given."""
        ids = {}
        for name, key in _SPECIAL_KEYS.items():
            found = self.metadata.get(f"tokenizer.ggml.{key}_token_id")
            if found is None:
                continue
            if not isinstance(found, int) or isinstance(found, bool):
                raise self.error(f"{key}_token_id", found, "a token id")
            if 0 <= found < vocab_size:
                ids[name] = found
        return ids

    def error(self, key: str, found: object, expected: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: tokenizer.ggml.{key} is {found!r:.40}, expected {expected}")

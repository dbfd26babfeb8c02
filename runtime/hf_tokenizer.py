"""HFTokenizer: the tokenizer of a safetensors folder that has a tokenizer.json."""

from __future__ import annotations

import re
import threading
from functools import cached_property
from typing import TYPE_CHECKING, Any

import tokenizers

from lmpack.errors import CheckpointError
from runtime.byte_pair_encoder import BYTES_BY_CHARACTER, SPACE
from runtime.end_of_generation import end_ids_by_text
from runtime.hf_config import HFTokenizerConfig
from runtime.tokenizer_input import check_text, check_token_id

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")


class HFTokenizer:
    """See Tokenizer; the ids equal those of transformers' AutoTokenizer for the same folder.

    With parse_special=False the text of a special token is read as plain text, which transformers calls
    split_special_tokens.
    """

    def __init__(self, folder: Path) -> None:
        where = folder / "tokenizer.json"
        try:
            self._library = tokenizers.Tokenizer.from_file(str(where))
        except Exception as error:  # the library raises no narrower class
            raise CheckpointError(
                f"{where}: the tokenizers library cannot read it ({error}); download it again"
            ) from error
        self._library.no_truncation()
        self._library.no_padding()
        self._encoding = threading.Lock()  # encode_special_tokens is a switch of the whole library object
        config = HFTokenizerConfig.read(folder)
        ids = self._library.get_vocab(with_added_tokens=True)
        self._texts = {i: text for text, i in ids.items()}
        self._added = self._library.get_added_tokens_decoder()
        self.vocab_size = max(config.vocab_size, max(self._texts, default=-1) + 1)
        self.chat_template = config.chat_template
        self.special_texts: Mapping[str, str] = config.special_texts
        self.bos_id = ids.get(config.special_texts.get("bos_token", ""))
        self.eos_id = ids.get(config.special_texts.get("eos_token", ""))
        self._prefix, self._suffix = self._added_ids()
        if config.adds_bos is not None and self.bos_id is not None:
            self._prefix = _with_or_without(self._prefix, self.bos_id, config.adds_bos)
        if config.adds_eos is not None and self.eos_id is not None:
            self._suffix = _with_or_without(self._suffix, self.eos_id, config.adds_eos)
        self.adds_bos = self.bos_id is not None and self.bos_id in self._prefix
        self.adds_eos = self.eos_id is not None and self.eos_id in self._suffix
        eos_ids = {*config.eos_ids} if self.eos_id is None else {*config.eos_ids, self.eos_id}
        self.eog_ids = end_ids_by_text(ids, eos_ids)

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Return the text's token ids; see Tokenizer."""
        check_text(text)
        with self._encoding:
            self._library.encode_special_tokens = not parse_special
            ids: list[int] = self._library.encode(text, add_special_tokens=False).ids
        return [*self._prefix, *ids, *self._suffix] if add_special else ids

    def decode(
        self, ids: Iterable[int], *, remove_special: bool = False, unparse_special: bool = True
    ) -> str:
        """Return the ids' text; see Tokenizer."""
        ids = list(ids)
        for token_id in ids:
            check_token_id(token_id, self.vocab_size)
        if remove_special:
            if ids[: len(self._prefix)] == self._prefix:
                del ids[: len(self._prefix)]
            if self._suffix and ids[-len(self._suffix) :] == self._suffix:
                del ids[-len(self._suffix) :]
        text: str = self._library.decode(ids, skip_special_tokens=not unparse_special)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text, which need not be whole characters."""
        check_token_id(token_id, self.vocab_size)
        text = self._texts.get(token_id, "")  # no text: an id that only pads the embedding matrix
        if token_id in self._added:
            return text.encode()
        if self._is_byte_level:
            return b"".join(
                bytes([BYTES_BY_CHARACTER[char]]) if char in BYTES_BY_CHARACTER else char.encode()
                for char in text
            )
        byte = _BYTE_TOKEN.fullmatch(text)
        return bytes([int(byte[1], 16)]) if byte else text.replace(SPACE, " ").encode()

    def piece(self, token_id: int) -> str:
        """Return a token's bytes as text, with U+FFFD for what is no whole character."""
        return self.token_bytes(token_id).decode(errors="replace")

    def is_special(self, token_id: int) -> bool:
        """Say whether a token steers the model and is no part of an answer's text."""
        check_token_id(token_id, self.vocab_size)
        return token_id in self._added and self._added[token_id].special

    @cached_property
    def _is_byte_level(self) -> bool:
        decoder = self._library.decoder
        state: Any = decoder.__getstate__() if decoder is not None else b""
        return b"ByteLevel" in state

    def _added_ids(self) -> tuple[list[int], list[int]]:
        """What the post-processor puts before and behind a text."""
        plain = self._library.encode("a", add_special_tokens=False).ids
        whole = self._library.encode("a", add_special_tokens=True).ids
        for start in range(len(whole) - len(plain) + 1):
            if whole[start : start + len(plain)] == plain:
                return whole[:start], whole[start + len(plain) :]
        raise CheckpointError("tokenizer.json: its post-processor changes the text's own tokens")


def _with_or_without(ids: list[int], token_id: int, is_wanted: bool) -> list[int]:
    if is_wanted:
        return ids if token_id in ids else [token_id]
    return [i for i in ids if i != token_id]

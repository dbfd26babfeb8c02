"""Tokenizer: text to token ids and back, from a pack, a GGUF or a safetensors folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from converters.gguf_header import read_gguf_header
from lmpack.errors import CheckpointError, UnsupportedError, UsageError
from lmpack.manifest import MANIFEST_FILE
from lmpack.pack import Pack
from runtime.gguf_vocabulary import vocabulary_from_gguf
from runtime.hf_config import HFTokenizerConfig
from runtime.hf_tokenizer import HFTokenizer
from runtime.sentencepiece_file import vocabulary_from_sentencepiece
from runtime.vocabulary_tokenizer import VocabularyTokenizer

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from converters.gguf_header import GGUFHeader


class Tokenizer(Protocol):
    """What the engine and the commands need of a tokenizer; one contract, whatever file it comes from."""

    @property
    def vocab_size(self) -> int:
        """Ids are 0 to vocab_size - 1."""

    @property
    def bos_id(self) -> int | None:
        """The token that starts a text."""

    @property
    def eos_id(self) -> int | None:
        """The token that ends a text."""

    @property
    def eog_ids(self) -> frozenset[int]:
        """The tokens that end a generation: end of text, of turn, of message."""

    @property
    def adds_bos(self) -> bool:
        """Whether encode puts bos_id before a text."""

    @property
    def adds_eos(self) -> bool:
        """Whether encode puts eos_id behind a text."""

    @property
    def chat_template(self) -> str | None:
        """The model's Jinja template for chats."""

    @property
    def special_texts(self) -> Mapping[str, str]:
        """The special tokens' texts by the names that templates use: bos_token, eos_token, ..."""

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Return the text's token ids.

        add_special puts the tokens around it that the model wants (bos, eos); parse_special reads the texts of
        control tokens in it as those tokens, which is right for a rendered chat and wrong for what a user typed.
        Raises UsageError for lone surrogates.
        """

    def decode(
        self, ids: Iterable[int], *, remove_special: bool = False, unparse_special: bool = True
    ) -> str:
        """Return the ids' text, with U+FFFD for bytes that are no character.

        remove_special leaves out the tokens that add_special adds; unparse_special shows control tokens.
        """

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text, which need not be whole characters."""

    def piece(self, token_id: int) -> str:
        """Return a token's bytes as text, with U+FFFD for what is no whole character."""

    def is_special(self, token_id: int) -> bool:
        """Say whether a token steers the model and is no part of an answer's text."""


def load_tokenizer(pack: Pack) -> Tokenizer:
    """Return the tokenizer of a pack's source.

    Raises CheckpointError when the source had none, UnsupportedError for a kind that is not known.
    """
    source = pack.manifest.source
    if source.kind == "gguf":
        for source_file in source.files:  # of a split set, the first shard holds the vocabulary
            header = read_gguf_header(pack.kept_path(source_file))
            if "tokenizer.ggml.model" in header.metadata:
                return tokenizer_from_gguf(header, str(pack.path))
        raise CheckpointError(f"{pack.path}: its GGUF has no vocabulary (tokenizer.ggml.model)")
    for name in ("tokenizer.json", "tokenizer.model"):
        kept = pack.kept_file(name)
        if kept is not None:
            return tokenizer_from_hf(kept.parent)
    raise CheckpointError(f"{pack.path}: its source has neither tokenizer.json nor tokenizer.model")


def tokenizer_from_gguf(header: GGUFHeader, where: str = "GGUF") -> Tokenizer:
    """Return the tokenizer that a GGUF's metadata describe; `where` names the file in errors."""
    template = header.metadata.get("tokenizer.chat_template")
    return VocabularyTokenizer(
        vocabulary_from_gguf(header.metadata, where), template if isinstance(template, str) else None
    )


def tokenizer_from_hf(folder: Path) -> Tokenizer:
    """Return the tokenizer of a safetensors folder: tokenizer.json, else a SentencePiece tokenizer.model."""
    if (folder / "tokenizer.json").is_file():
        return HFTokenizer(folder)
    if (folder / "tokenizer.model").is_file():
        vocabulary = vocabulary_from_sentencepiece(folder / "tokenizer.model")
        return VocabularyTokenizer(vocabulary, HFTokenizerConfig.read(folder).chat_template)
    others = sorted(
        path.name for pattern in ("*.tiktoken", "tiktoken.model") for path in folder.glob(pattern)
    )
    if others:
        raise UnsupportedError(
            f"{folder / others[0]}: tiktoken files are not supported; save a tokenizer.json with transformers"
        )
    raise CheckpointError(f"{folder}: has neither tokenizer.json nor tokenizer.model")


def open_tokenizer(path: Path | str) -> Tokenizer:
    """Return the tokenizer of a pack, a GGUF file (weights are not needed), or a folder of either container."""
    path = Path(path)
    if (path / MANIFEST_FILE).is_file():
        return load_tokenizer(Pack.open(path))
    if path.is_file() and path.name in ("tokenizer.json", "tokenizer.model"):
        return tokenizer_from_hf(path.parent)
    if path.is_file():
        return tokenizer_from_gguf(read_gguf_header(path), str(path))
    if not path.is_dir():
        raise UsageError(f"{path}: no such file or folder")
    shards = sorted(path.glob("*.gguf"))
    if not shards:
        return tokenizer_from_hf(path)
    for shard in shards:
        header = read_gguf_header(shard)
        if "tokenizer.ggml.model" in header.metadata:
            return tokenizer_from_gguf(header, str(shard))
    raise CheckpointError(f"{path}: none of its {len(shards)} GGUF files has a vocabulary")

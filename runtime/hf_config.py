"""HFTokenizerConfig: what the JSON files beside a Hugging Face tokenizer say about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

from converters.json_object import read_json_object
from lmpack.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that tokenizer_config.json adds to the vocabulary."""

    token_id: int
    text: str
    is_special: bool


@dataclass(frozen=True, slots=True)
class HFTokenizerConfig:
    """The parts of tokenizer_config.json, generation_config.json and config.json that concern tokens."""

    special_texts: Mapping[str, str]  # "bos_token" -> "<s>"
    eos_ids: tuple[int, ...]  # generation ends at any of these
    adds_bos: bool | None  # None: the files don't say
    adds_eos: bool | None
    added_tokens: tuple[AddedToken, ...]
    vocab_size: int  # rows of the embedding matrix; 0 when unknown
    chat_template: str | None

    @classmethod
    def read(cls, folder: Path) -> HFTokenizerConfig:
        """Read the files that are there; raises CheckpointError for one that is not a JSON object."""
        config = _read_optional(folder / "tokenizer_config.json")
        special_map = _read_optional(folder / "special_tokens_map.json")
        generation = _read_optional(folder / "generation_config.json")
        model = _read_optional(folder / "config.json")
        text_model = model.get("text_config")
        texts = {name: _token_text(config.get(name) or special_map.get(name)) for name in _SPECIAL_TOKENS}
        eos = generation.get("eos_token_id", model.get("eos_token_id"))
        if isinstance(text_model, dict):
            model = text_model | model
        return cls(
            special_texts={name: text for name, text in texts.items() if text},
            eos_ids=tuple(filter(_is_id, eos if isinstance(eos, list) else [eos])),
            adds_bos=_flag(config.get("add_bos_token")),
            adds_eos=_flag(config.get("add_eos_token")),
            added_tokens=_added_tokens(folder, config),
            vocab_size=model["vocab_size"] if _is_id(model.get("vocab_size")) else 0,
            chat_template=_chat_template(folder, config),
        )


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.exists() else {}


def _added_tokens(folder: Path, config: Mapping[str, Any]) -> tuple[AddedToken, ...]:
    added = {}
    for text, token_id in _read_optional(folder / "added_tokens.json").items():
        if _is_id(token_id):
            added[token_id] = AddedToken(token_id, text, is_special=False)
    decoder = config.get("added_tokens_decoder")
    for key, entry in decoder.items() if isinstance(decoder, dict) else ():
        if key.isdecimal() and isinstance(entry, dict) and isinstance(entry.get("content"), str):
            added[int(key)] = AddedToken(int(key), entry["content"], is_special=entry.get("special") is True)
    return tuple(added[token_id] for token_id in sorted(added))


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The template: a file of its own before tokenizer_config.json, as transformers reads them."""
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        try:
            return jinja.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{jinja}: byte {error.start} is not UTF-8") from None
    for found in (
        _read_optional(folder / "chat_template.json").get("chat_template"),
        config.get("chat_template"),
    ):
        if isinstance(found, str):
            return found
        if isinstance(found, list):  # [{"name": "default", "template": ...}, {"name": "tool_use", ...}]
            named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
            default = named.get("default")
            if isinstance(default, str):
                return default
    return None


def _token_text(found: object) -> str:
    if isinstance(found, dict):
        found = found.get("content")
    return found if isinstance(found, str) else ""


def _flag(found: object) -> bool | None:
    return found if isinstance(found, bool) else None


def _is_id(found: object) -> TypeGuard[int]:
    return isinstance(found, int) and not isinstance(found, bool) and found >= 0

"""Prompt file: a set of prompts, one a line, as plain text or as JSON lines.

.txt    every line that is not blank is a prompt, as it stands
.jsonl  {"prompt": "text"} or {"messages": [{"role": "user", "content": "text"}, ...]}; other keys are ignored

UTF-8, lines end with LF or CRLF, blank lines are skipped.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from lmpack.errors import UsageError
from lmpack.strict_json import JsonError, check_list, check_object, parse_json, shown
from lmpack.text_file import read_text_bytes

if TYPE_CHECKING:
    from pathlib import Path

MAX_MESSAGES = 4096
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text, or a chat that the model's template turns into one."""

    line: int  # in its file, from 1
    text: str | None
    messages: tuple[Message, ...]  # empty for a text


@dataclass(frozen=True, slots=True)
class PromptSet:
    """The prompts of a file."""

    path: Path
    prompts: tuple[Prompt, ...]  # at least one
    sha256: str  # of the file's bytes

    def at(self, prompt: Prompt) -> str:
        """Where a prompt stands, for messages: FILE:LINE."""
        return f"{self.path}:{prompt.line}"


def read_prompt_set(path: Path) -> PromptSet:
    """Read a .txt or .jsonl file; raises UsageError naming file and line, OSError when it cannot be read."""
    parsers = {".txt": _parse_text, ".jsonl": _parse_json_line}
    parse = parsers.get(path.suffix.lower())
    if parse is None:
        raise UsageError(f"{path}: expected a .txt file (one prompt a line) or a .jsonl file")
    with open(path, "rb") as file:
        raw = read_text_bytes(file, str(path))
    lines = enumerate(raw.removeprefix(_BYTE_ORDER_MARK).split(b"\n"), start=1)
    prompts = tuple(
        parse(line.removesuffix(b"\r"), number, f"{path}:{number}") for number, line in lines if line.strip()
    )
    if not prompts:
        raise UsageError(f"{path}: no prompts, every line is blank")
    return PromptSet(path, prompts, hashlib.sha256(raw).hexdigest())


def _parse_text(raw: bytes, line: int, at: str) -> Prompt:
    try:
        return Prompt(line, raw.decode("utf-8"), ())
    except UnicodeDecodeError as error:
        raise UsageError(f"{at}: byte {error.start} of the line is not UTF-8") from None


def _parse_json_line(raw: bytes, line: int, at: str) -> Prompt:
    try:
        document = parse_json(raw)
        if not isinstance(document, dict) or ("prompt" in document) == ("messages" in document):
            _refuse("an object", '{"prompt": ...} or {"messages": [...]}', document)
        if "prompt" in document:
            return Prompt(line, _text(document["prompt"], "prompt"), ())
        messages = check_list(document["messages"], "messages", shortest=1, longest=MAX_MESSAGES)
        return Prompt(line, None, tuple(_message(value, index) for index, value in enumerate(messages)))
    except JsonError as error:
        raise UsageError(f"{at}: {str(error).removeprefix('line 1 ')}") from None


def _message(value: object, index: int) -> Message:
    at = f"messages[{index}]"
    message = check_object(value, frozenset({"role", "content"}), at)
    return Message(_text(message["role"], f"{at}.role"), _text(message["content"], f"{at}.content"))


def _text(value: object, at: str) -> str:
    """Return a string that has characters and can be written as UTF-8."""
    if not isinstance(value, str) or not value:
        _refuse(at, "a string that is not empty", value)
    if any("\ud800" <= char <= "\udfff" for char in value):
        _refuse(at, "a string without lone surrogates", value)
    return value


def _refuse(at: str, expected: str, value: object) -> NoReturn:
    raise JsonError(f"{at}: expected {expected}, got {shown(value)}")

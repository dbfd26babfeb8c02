"""Text that a user gives: typed as an option, on standard input, or in a file."""

from __future__ import annotations

from typing import Any

import click

from lmpack.cli.path_argument import ExistingPath
from lmpack.errors import UsageError
from lmpack.text_file import read_text_bytes


class Word(click.types.StringParamType):
    """A name, a size, a choice: something."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return what was given."""
        word = super().convert(value, param, ctx)
        if not word.strip():
            self.fail("it is empty; give a value, or leave the option out", param, ctx)
        return word


class Text(click.types.StringParamType):
    """A text in UTF-8, which file names and old terminals need not be."""

    def __init__(self, *, may_be_empty: bool = True) -> None:
        self.may_be_empty = may_be_empty

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the text as it was given."""
        text = super().convert(value, param, ctx)
        if not text and not self.may_be_empty:
            self.fail("it is empty; give some text, or leave the option out", param, ctx)
        try:
            check_utf8(text)
        except UsageError as error:
            self.fail(str(error), param, ctx)
        return text


class TextPath(ExistingPath):
    """A file for read_text(): on a drive, a pipe, or "-" for standard input."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, allow_dash=True)


def check_utf8(text: str) -> None:
    """Raise UsageError unless the text was UTF-8 when it came in: Python keeps other bytes as U+DC00 + byte."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        byte = ord(text[error.start]) & 0xFF
        raise UsageError(
            f"byte 0x{byte:02X} after {error.start} characters is not UTF-8; give it as UTF-8 text"
        ) from None


def read_text(file: str) -> str:
    """A file's text, its line ends as they are, for they are tokens too; UsageError when it is not UTF-8, or huge."""
    name = "standard input" if file == "-" else file
    with click.open_file(file, "rb") as opened:
        raw = read_text_bytes(opened, name)
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{name}: byte {error.start} is not UTF-8; give it as UTF-8 text") from None


def text_or_file(text: str | None, file: str | None) -> str:
    """What -p TEXT or -f FILE gives; UsageError unless it is exactly one of them."""
    if (text is None) == (file is None):
        raise UsageError("give the text with either -p TEXT or -f FILE")
    return read_text(file) if file is not None else text or ""

"""Text that a user gives: typed as an option, or in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from lmpack.errors import UsageError


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
            text.encode()
        except UnicodeEncodeError as error:
            byte = ord(text[error.start]) & 0xFF  # Python keeps what it cannot decode as U+DC00 + byte
            self.fail(
                f"byte 0x{byte:02X} after {error.start} characters is not UTF-8; use a terminal that writes UTF-8",
                param,
                ctx,
            )
        return text


def read_text(file: str) -> str:
    """A file's text, its line ends as they are, for they are tokens too; UsageError when it is not UTF-8."""
    try:
        return Path(file).read_bytes().decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{file}: byte {error.start} is not UTF-8; save it as UTF-8 text") from None


def text_or_file(text: str | None, file: str | None) -> str:
    """What -p TEXT or -f FILE gives; UsageError unless it is exactly one of them."""
    if (text is None) == (file is None):
        raise UsageError("give the text with either -p TEXT or -f FILE")
    return read_text(file) if file is not None else text or ""

"""The text a command works on: an option's, or a file's."""

from __future__ import annotations

from pathlib import Path

from lmpack.errors import UsageError


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

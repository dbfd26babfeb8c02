"""Standard streams: UTF-8 whatever the locale says, and named in the error when one of them refuses."""

from __future__ import annotations

import io
import os
import sys
from typing import Any, TextIO

STANDARD_OUTPUT = "standard output"


def use_utf8() -> None:
    """Names in packs, texts and reports are UTF-8; a locale of another encoding would find a pack's files missing.

    Python then starts again in its UTF-8 mode. A stream that the caller closed gives and takes nothing.
    """
    if sys.getfilesystemencoding() != "utf-8" and "utf8" not in sys._xoptions:
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115 (open until we exit)
    elif isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    sys.stdout = _output(sys.stdout, STANDARD_OUTPUT)
    sys.stderr = _output(sys.stderr, "standard error")


def drop_refused_output() -> None:
    """Point a stream that takes no more at nothing, so that the interpreter's last flush cannot fail."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, stream.fileno())
            os.close(nothing)


def _output(stream: TextIO | None, title: str) -> TextIO:
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8")
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Output(stream.fileno(), title)),
        encoding="utf-8",
        errors="backslashreplace",  # a file name may hold any bytes
        line_buffering=stream.isatty() or title == "standard error",
    )


class _Output(io.FileIO):
    """A descriptor for writing, whose errors say which stream it was."""

    def __init__(self, descriptor: int, title: str) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._title = title

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            error.filename = self._title
            raise

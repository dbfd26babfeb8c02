"""Text file: what a user wrote for a model, read at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmpack.byte_size import format_nbytes
from lmpack.errors import UsageError

if TYPE_CHECKING:
    from typing import IO

MAX_TEXT_NBYTES = 64 << 20
"""The longest contexts there are, ten million tokens, take some 40 MB; a device or a pipe may have no end."""


def read_text_bytes(file: IO[bytes], name: str) -> bytes:
    """All that is left of an open file; UsageError, which calls it `name`, when that is more than MAX_TEXT_NBYTES."""
    raw = file.read(MAX_TEXT_NBYTES + 1)
    if len(raw) > MAX_TEXT_NBYTES:
        raise UsageError(
            f"{name}: larger than {format_nbytes(MAX_TEXT_NBYTES)}, which no model's context holds; give a part of it"
        )
    return raw

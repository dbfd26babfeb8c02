"""Byte sizes as people write them: 8GiB, 500MB, 10%."""

from __future__ import annotations

import re
from decimal import Decimal

from lmpack.errors import UsageError

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([a-z]*|%)", re.IGNORECASE)
_EXPECTED = "a number of bytes with KB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB (powers of 1024)"


def parse_byte_size(text: str, total: int | None = None) -> int:
    """Return the bytes that text names, rounded down; "10%" needs a total.

    Raises UsageError for anything else: a bare "8G" is refused because tools disagree about what it means.
    """
    match = _SIZE.fullmatch(text.strip())
    unit = match.group(2).lower() if match else ""
    if match is None or (unit != "%" and unit not in _UNITS):
        percent = ", or a percentage" if total is not None else ""
        raise UsageError(f"size {text[:40]!r}: expected {_EXPECTED}{percent}, such as 8GiB")
    number = Decimal(match.group(1))
    if unit != "%":
        return int(number * _UNITS[unit])
    if total is None:
        raise UsageError(f"size {text[:40]!r}: a percentage means nothing here; give bytes, such as 8GiB")
    if number > 100:
        raise UsageError(f"size {text[:40]!r}: expected at most 100%")
    return int(number * total / 100)


def format_nbytes(nbytes: int) -> str:
    """Give a size for people: 512 B, 8.0 GiB."""
    if abs(nbytes) < 1024:
        return f"{nbytes} B"
    size = float(nbytes)
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if abs(size) < 1023.95:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} TiB"

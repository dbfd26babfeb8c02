"""Plural forms: 1 file, 2 files."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Return the number with its noun, which takes an s unless it is one."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"

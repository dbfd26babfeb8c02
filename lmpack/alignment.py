"""Alignment: where the parts of a pack's files may start, and how far a file is padded."""

from __future__ import annotations

PART_ALIGNMENT = 256
"""Parts of an expert start at multiples of this: what GPU copies and the widest SIMD loads want."""

DEFAULT_PAGE_SIZE = 4096
MIN_PAGE_SIZE = 4096
MAX_PAGE_SIZE = 2 * 1024 * 1024
"""A huge page; larger padding would only waste the drive."""


def align_up(offset: int, alignment: int) -> int:
    """Return the smallest multiple of alignment that is not below offset."""
    return -(-offset // alignment) * alignment


def is_page_size(page_size: int) -> bool:
    """Tell whether format 1 allows page_size: a power of two from 4,096 to 2 MiB."""
    return MIN_PAGE_SIZE <= page_size <= MAX_PAGE_SIZE and page_size & (page_size - 1) == 0

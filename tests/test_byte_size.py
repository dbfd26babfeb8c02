"""Byte sizes: what people write, and what they are shown."""

from __future__ import annotations

import pytest

from lmpack.byte_size import format_nbytes, parse_byte_size
from lmpack.errors import UsageError


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("1024", 1024),
        ("512B", 512),
        ("8GiB", 8 * 2**30),
        ("8gib", 8 * 2**30),
        ("500MB", 500_000_000),
        ("1.5 KiB", 1536),
        (" 2TB ", 2 * 10**12),
        ("0.1KB", 100),
        ("1.0000001KB", 1000),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_sizes_are_exact(text: str, nbytes: int) -> None:
    assert parse_byte_size(text) == nbytes


def test_a_percentage_is_of_the_total() -> None:
    assert parse_byte_size("10%", total=1001) == 100
    assert parse_byte_size("12.5 %", total=8 * 2**40) == 2**40
    assert parse_byte_size("100%", total=7) == 7


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GiB",
        "-1",
        "8G",
        "8 gigs",
        "1e9",
        "nan",
        "inf",
        "1.5.5MB",
        "٣GB",
        "101%",
        "8GiB 2",
        "1" * 40,
        "0x10",
    ],
)
def test_everything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match="expected"):
        parse_byte_size(text, total=100)


def test_a_percentage_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="percentage means nothing here"):
        parse_byte_size("10%")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1024 * 1024 - 1, "1.0 MiB"),
        (8 * 2**30, "8.0 GiB"),
        (3 * 2**41, "6.0 TiB"),
        (2**60, "1048576.0 TiB"),
    ],
)
def test_sizes_are_shown_with_the_unit_that_fits(nbytes: int, text: str) -> None:
    assert format_nbytes(nbytes) == text

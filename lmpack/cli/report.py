"""Reports: how a command hands its result to a person's terminal or to another program."""

from __future__ import annotations

import json
import re
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_SURROGATE = re.compile("[\ud800-\udfff]")


def print_json(document: object) -> None:
    """Print one JSON document to stdout; NaN and Infinity are refused because JSON has none.

    A file name that is not UTF-8 cannot be told in JSON: what does not fit becomes U+FFFD.
    """
    text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)
    click.echo(_SURROGATE.sub("\ufffd", text))


def one_line(text: str) -> str:
    """Return text that anybody may have chosen as one line that cannot steer a terminal."""
    return "".join(map(_shown, text))


def echo_incomplete(left_out: Sequence[str], missing: Sequence[str]) -> None:
    """Say on stderr which files a conversion did not take, and what a run will look for in vain."""
    for name in left_out:
        click.echo(one_line(f"left out, no part of the checkpoint: {name}"), err=True)
    if missing:
        click.echo(f"lmpack run will need what this checkpoint lacks: {' and '.join(missing)}", err=True)


@contextmanager
def told_when_interrupted(advice: str) -> Iterator[None]:
    """Say on stderr how to go on when Ctrl-C or a signal ends the block."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        with suppress(OSError):  # a terminal that hung up takes no line
            click.echo(one_line(f"lmpack: interrupted; {advice}"), err=True)
        raise


def _shown(char: str) -> str:
    if char.isprintable():
        return char
    return " " if char.isspace() else ascii(char)[1:-1]

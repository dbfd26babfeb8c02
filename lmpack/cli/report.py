"""Reports: how a command hands its result to another program."""

from __future__ import annotations

import json

import click


def print_json(document: object) -> None:
    """Print one JSON document to stdout; NaN and Infinity are refused because JSON has none."""
    click.echo(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False))

"""Hub options: what every command that talks to a hub is given."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import click

if TYPE_CHECKING:
    from collections.abc import Callable

F = TypeVar("F", bound="Callable[..., object]")


def token_option(command: F) -> F:
    """Add --token."""
    return click.option(
        "--token",
        metavar="TOKEN",
        help="Access token. Better in HF_TOKEN or by `hf auth login`: others may see a command line.",
    )(command)


def revision_option(command: F) -> F:
    """Add --revision."""
    return click.option("--revision", default="main", show_default=True, help="A branch, tag or commit.")(
        command
    )

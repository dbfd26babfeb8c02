"""Hub options: what every command that talks to a hub is given."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, TypeVar

import click

from lmpack.cli.path_argument import ModelPath
from lmpack.cli.progress import echo_above_bar
from lmpack.cli.text_input import Word

if TYPE_CHECKING:
    from collections.abc import Callable

    from converters.hub_client import HubClient

F = TypeVar("F", bound="Callable[..., object]")


def token_option(command: F) -> F:
    """Add --token."""
    return click.option(
        "--token",
        type=Word(),
        metavar="TOKEN",
        help="Access token. Better in HF_TOKEN or by `hf auth login`: others may see a command line.",
    )(command)


def revision_option(command: F) -> F:
    """Add --revision."""
    return click.option(
        "--revision", type=Word(), default="main", show_default=True, help="A branch, tag or commit."
    )(command)


def hub_client(token: str | None = None) -> HubClient:
    """Return a client that says on stderr what it waits for, above a progress bar."""
    from converters.hub_client import HubClient

    return HubClient(token=token, notice=lambda text: echo_above_bar(f"lmpack: {text}"))


class ModelPathOrRepo(ModelPath):
    """A pack or checkpoint on this machine, else the name of a repository: OWNER/NAME, OWNER/NAME:MODEL."""

    name = "path or repository"
    _REPO = re.compile(r"(hf://)?[\w.-]{1,96}/[\w.-]{1,96}(:[^:]+)?", re.ASCII)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return what was given; is_repo() tells which of the two it is."""
        return value if self.is_repo(os.fsdecode(value)) else super().convert(value, param, ctx)

    @classmethod
    def is_repo(cls, value: str) -> bool:
        """Tell whether nothing of this name is here, and a hub may have it."""
        return not os.path.lexists(value) and cls._REPO.fullmatch(value) is not None

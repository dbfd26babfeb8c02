"""Path arguments: what a path on the command line must name, checked before the command runs."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Any

import click

from lmpack.drive import advice
from lmpack.manifest import MANIFEST_FILE

_SHARD_NUMBER = re.compile(r"-\d{5}-of-\d{5}$")


class ExistingPath(click.Path):
    """What is there; a name that the system cannot even look for is told from one that nothing has."""

    def __init__(self, **kinds: Any) -> None:
        super().__init__(exists=True, **kinds)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path, of the type that was asked for."""
        try:
            os.stat(value)
        except (FileNotFoundError, NotADirectoryError):
            pass  # super() says so, or takes - as standard input
        except OSError as error:
            self.fail(f"{os.fsdecode(value)}: {advice(error)}", param, ctx)
        return super().convert(value, param, ctx)


class ModelPath(ExistingPath):
    """A pack, or a checkpoint that could become one; what it holds is for the command to find out."""


class PackPath(ExistingPath):
    """A pack's folder; a checkpoint is refused with the command that makes a pack of it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path as text; whether the pack is sound is found out by opening it."""
        given = os.fsdecode(super().convert(value, param, ctx))
        path = Path(given)
        if (path / MANIFEST_FILE).exists():
            return given
        kind = _checkpoint_kind(path)
        if kind is not None:
            self.fail(
                f"{given} is a {kind} checkpoint, not a pack; make one first: "
                f"lmpack convert {shlex.quote(given)} {shlex.quote(_pack_name(path))}",
                param,
                ctx,
            )
        if not path.is_dir():
            pack = next((folder for folder in path.parents if (folder / MANIFEST_FILE).exists()), None)
            hint = f"give the pack itself: {pack}" if pack else "a pack is a folder that lmpack convert made"
            self.fail(f"{given} is not a folder; {hint}", param, ctx)
        return given


class PackOrProfilePath(PackPath):
    """A pack's folder, or a file that lmpack profile wrote."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path as text."""
        from profiles.routing_file import is_routing_file

        given = os.fsdecode(ExistingPath.convert(self, value, param, ctx))
        return given if is_routing_file(Path(given)) else super().convert(value, param, ctx)


class NewPath(click.Path):
    """A file or folder to be written; what is there already is for the command to judge."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path, of the type that was asked for, below folders that exist or can be made."""
        if not os.fspath(value):
            self.fail("it is empty; name what is to be written", param, ctx)
        try:
            os.lstat(value)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            pass
        except OSError as error:
            self.fail(f"{os.fsdecode(value)}: {advice(error)}", param, ctx)
        for folder in reversed(Path(value).absolute().parents):
            if folder.exists() and not folder.is_dir():
                self.fail(f"{os.fspath(value)}: {folder} is a file, not a folder", param, ctx)
        return super().convert(value, param, ctx)


def _pack_name(checkpoint: Path) -> str:
    """What to call its pack: a shard's number and a file's suffix say nothing about the model."""
    named = Path(os.path.abspath(checkpoint))  # "." has a name, too; what a link leads to may have a hash
    stem = named.name if checkpoint.is_dir() else _SHARD_NUMBER.sub("", named.stem)
    return f"{stem}.lmpack"


def _checkpoint_kind(path: Path) -> str | None:
    """GGUF or safetensors, by what a file starts with or a folder has in it; None for anything else."""
    names = [path.name]
    if path.is_dir():
        names = os.listdir(path)
    elif not path.is_file():
        return None
    elif _starts_with(path, b"GGUF"):
        return "GGUF"
    if any(name.endswith(".gguf") for name in names):
        return "GGUF"
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        return "safetensors"
    return None


def _starts_with(path: Path, magic: bytes) -> bool:
    with open(path, "rb") as file:
        return file.read(len(magic)) == magic

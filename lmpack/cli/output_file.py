"""Output file: what a command will write when its work is done, checked before the work begins."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from lmpack.drive import existing_parent
from lmpack.errors import StorageError, UsageError

if TYPE_CHECKING:
    from pathlib import Path


def check_output(path: Path, pack: Path) -> None:
    """Raise UsageError where path would damage the pack, StorageError where its folder cannot be written to or made."""
    folder = path.resolve().parent
    if pack.resolve() in (folder, *folder.parents) and folder != pack.resolve() / "profiles":
        raise UsageError(f"{path}: would damage the pack; write outside of it, or into its profiles/ folder")
    existing = existing_parent(folder)
    if not os.access(existing, os.W_OK):
        raise StorageError(f"{path}: the folder {existing} cannot be written to; choose another")

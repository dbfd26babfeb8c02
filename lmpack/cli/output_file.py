"""Output file: what a command will write when its work is done, checked before the work begins."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from lmpack.errors import StorageError, UsageError

if TYPE_CHECKING:
    from pathlib import Path


def check_output(path: Path, pack: Path) -> None:
    """Raise UsageError where path would damage the pack or has no folder, StorageError where that is read-only."""
    folder = path.resolve().parent
    if not folder.is_dir():
        raise UsageError(f"{path}: the folder {path.parent} does not exist; make it first")
    if pack.resolve() in (folder, *folder.parents) and folder != pack.resolve() / "profiles":
        raise UsageError(f"{path}: would damage the pack; write outside of it, or into its profiles/ folder")
    if not os.access(folder, os.W_OK):
        raise StorageError(f"{path}: the folder {path.parent} cannot be written to; choose another")

"""Output file: what a command will write when its work is done, checked before the work begins."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from lmpack.drive import existing_parent
from lmpack.errors import StorageError

if TYPE_CHECKING:
    from pathlib import Path


def check_output(path: Path) -> None:
    """Raise UsageError where path would damage a pack, StorageError where its folder cannot be written to or made."""
    from lmpack.pack import refuse_inside_pack

    refuse_inside_pack(path, is_profile=True)
    existing = existing_parent(path.resolve().parent)
    if not os.access(existing, os.W_OK):
        raise StorageError(f"{path}: the folder {existing} cannot be written to; choose another")

"""The folder where this user's programs keep what can be made again: measurements of drives, ends of sessions."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from lmpack.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Mapping


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """lmpack's own in $XDG_CACHE_HOME, or in ~/.cache where that is unset, empty or relative (XDG Base Directory 0.8).

    Raises StorageError for a user who has no home either, as in a container that runs under a bare number.
    """
    folder = Path(environment.get("XDG_CACHE_HOME", ""))
    if not folder.is_absolute():
        try:
            folder = Path.home() / ".cache"
        except RuntimeError as error:
            raise StorageError(
                f"user {os.getuid()} has no home folder to keep a cache in; set HOME or XDG_CACHE_HOME"
            ) from error
    return folder / "lmpack"

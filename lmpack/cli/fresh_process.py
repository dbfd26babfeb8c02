"""Fresh process: a command line run by an interpreter of its own, so that the memory it reports is its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import TYPE_CHECKING

from lmpack.errors import LmpackError

if TYPE_CHECKING:
    from collections.abc import Sequence


def run_fresh(args: Sequence[str], *, keep_output: bool = False) -> tuple[int, str]:
    """Run `lmpack ARGS` and return its exit code, and what it wrote to stdout where that is to be kept.

    Raises LmpackError when a signal ended it.
    """
    sys.stdout.flush()
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "lmpack", *args],
        stdout=subprocess.PIPE if keep_output else None,
        encoding="utf-8",
        check=False,
    )
    if ended.returncode < 0:
        name = signal.Signals(-ended.returncode).name
        hint = "; the system may be out of memory: use a smaller --ram" if name == "SIGKILL" else ""
        raise LmpackError(f"lmpack {args[0]}: ended by {name}{hint}")
    return ended.returncode, ended.stdout or ""

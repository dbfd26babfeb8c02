"""Fresh process: work done by an interpreter of its own, so that the memory it reports is its own."""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from lmpack.errors import LmpackError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

P = ParamSpec("P")
R = TypeVar("R")
_OUT_OF_MEMORY = "the system may be out of memory: use a smaller --ram"


def call_fresh(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Return what a module's function gives, or raise what it raises; LmpackError when its process was killed."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        try:
            return process.submit(function, *args, **kwargs).result()
        except BrokenProcessPool:
            raise LmpackError(f"its process was killed; {_OUT_OF_MEMORY}") from None


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
        hint = f"; {_OUT_OF_MEMORY}" if name == "SIGKILL" else ""
        raise LmpackError(f"lmpack {args[0]}: ended by {name}{hint}")
    return ended.returncode, ended.stdout or ""

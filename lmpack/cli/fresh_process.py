"""Fresh process: work done by an interpreter of its own, so that the memory it reports is its own."""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any, TypeVar

from lmpack.errors import LmpackError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection

R = TypeVar("R")


def call_fresh(function: Callable[..., R], *args: object) -> R:
    """Return what a module's function gives, or raise what it raises; LmpackError when a signal ended its process."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_outcome, args=(sender, function, args), daemon=True)
    process.start()
    sender.close()
    try:
        outcome = receiver.recv()
    except EOFError:
        process.join()
        raise _ended_by(process.exitcode or 0, "its process") from None
    except BaseException:  # we were told to end
        process.kill()
        raise
    process.join()
    if isinstance(outcome, BaseException):
        raise outcome
    result: R = outcome
    return result


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
        raise _ended_by(ended.returncode, f"lmpack {args[0]}")
    return ended.returncode, ended.stdout or ""


def _send_outcome(sender: Connection, function: Callable[..., object], args: tuple[Any, ...]) -> None:
    try:
        sender.send(function(*args))
    except (LmpackError, OSError, KeyboardInterrupt) as error:
        sender.send(error)  # whatever else is a bug, and shows its traceback


def _ended_by(exit_code: int, what: str) -> LmpackError:
    name = signal.Signals(-exit_code).name if exit_code < 0 else f"exit code {exit_code}"
    hint = "; the system may be out of memory: use a smaller --ram" if name == "SIGKILL" else ""
    return LmpackError(f"{what}: ended by {name}{hint}")

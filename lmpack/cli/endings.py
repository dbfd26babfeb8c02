"""Endings: Ctrl-C, kill and a terminal that hangs up end the process by way of all that cleans up."""

from __future__ import annotations

import os
import signal
import sys
from _thread import start_new_thread
from typing import TYPE_CHECKING, NoReturn

from lmpack.cli.standard_streams import drop_refused_output

if TYPE_CHECKING:
    from types import FrameType

_ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def listen() -> None:
    """From now on SIGINT raises KeyboardInterrupt and the others SystemExit; what the caller ignores stays ignored."""
    for ending in _ENDINGS:
        if signal.getsignal(ending) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(ending, _end)
    sys.unraisablehook = _send_again


def leave(exit_code: int) -> NoReturn:
    """End at once: the interpreter takes up to a second to let go of torch, and shows an interrupt as a traceback."""
    for ending in _ENDINGS:
        if signal.getsignal(ending) is _end:
            signal.signal(ending, signal.SIG_DFL)
    drop_refused_output()
    os._exit(exit_code)


def _end(ending: int, frame: FrameType | None) -> NoReturn:
    """Raise; but end where nothing is left to clean up, or nothing yet: an exception would abort torch's import."""
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if frame.f_code is leave.__code__ or (
            frame.f_code.co_name == "<module>" and module.startswith("torch")
        ):
            os._exit(128 + ending)
        frame = frame.f_back
    if ending == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + ending)


def _send_again(ignored: sys.UnraisableHookArgs) -> None:
    """Python ignores what is raised in a destructor: let the ending come again, from a thread, which is after it."""
    error = ignored.exc_value
    if isinstance(error, KeyboardInterrupt):
        start_new_thread(os.kill, (os.getpid(), signal.SIGINT))
    elif isinstance(error, SystemExit):
        start_new_thread(os.kill, (os.getpid(), int(error.code or 0) - 128))
    else:
        sys.__unraisablehook__(ignored)

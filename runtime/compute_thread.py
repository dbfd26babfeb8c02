"""Where an engine computes: an interrupt reaches the thread that waits, and leaves no computation half done."""

from __future__ import annotations

import atexit
import os
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from runtime.interruptible import InterruptibleThread, take

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class AbandonedError(Exception):
    """Nobody waits for this computation any more, or the thread was closed while another one waits."""


@dataclass(slots=True, eq=False)
class _Call:
    function: Callable[[], Any]
    answers: SimpleQueue[tuple[Any, BaseException | None]] = field(default_factory=SimpleQueue)
    is_abandoned: bool = False


class ComputeThread:
    """Computes one call after the other; what an interrupt abandons has ended before the next one begins."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._current: _Call | None = None
        self._process_id = os.getpid()
        self._is_closed = False
        self._thread = InterruptibleThread(self._serve, "compute")
        self._thread.start()
        # The interpreter's end unwinds daemon threads, and torch's C++ aborts the process when it is unwound.
        atexit.register(self.close)

    @property
    def is_here(self) -> bool:
        """False in a fork of the process that made it, where the thread does not run."""
        return self._process_id == os.getpid()

    def run(self, function: Callable[[], T]) -> T:
        """What the function returns or raises there; an exception that a signal raises here abandons it.

        ValueError when the thread is closed, or belongs to another process.
        """
        if self._is_closed or not self.is_here:
            raise ValueError("the engine is closed, or this process is a fork of the one that loaded it")
        call = _Call(function)
        try:
            # Both ends are C's: a signal comes before or after, and leaves no lock taken.
            self._calls.put(call)
            result, error = take(call.answers)
        except BaseException:
            call.is_abandoned = True
            raise
        if error is None:
            return result  # type: ignore[no-any-return]
        try:
            raise error
        finally:
            del error  # or it and this frame would keep each other, and all that it went through

    def check(self) -> None:
        """From within a long computation: raises AbandonedError, through all of it, when it is to end."""
        if self._is_closed or (self._current is not None and self._current.is_abandoned):
            raise AbandonedError

    def close(self) -> None:
        """End the thread, what it computes at the next check; may be called again, after an interrupt as well."""
        if not self.is_here:
            return
        self._is_closed = True
        self._calls.put(None)
        self._thread.wait_for_end()
        atexit.unregister(self.close)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            self._current = call
            try:
                call.answers.put((call.function(), None))
            except BaseException as error:  # noqa: BLE001 (it is the caller's)
                call.answers.put((None, error))
            self._current = None
            del call

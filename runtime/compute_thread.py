"""Where an engine computes: an interrupt reaches the thread that waits, and leaves no computation half done."""

from __future__ import annotations

from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class AbandonedError(Exception):
    """Nobody waits for this computation any more; no caller sees it."""


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
        self._thread = Thread(target=self._serve, name="compute", daemon=True)
        self._thread.start()

    def run(self, function: Callable[[], T]) -> T:
        """What the function returns or raises there; an exception that a signal raises here abandons it."""
        call = _Call(function)
        try:
            # Both ends are C's: a signal comes before or after, and leaves no lock taken.
            self._calls.put(call)
            result, error = call.answers.get()
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
        """From within a long computation: raises AbandonedError, through all of it, when nobody waits for it."""
        if self._current is not None and self._current.is_abandoned:
            raise AbandonedError

    def close(self) -> None:
        """Join the thread, when it has ended what it computes; may be called again."""
        self._calls.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            self._current = call
            try:
                call.answers.put((call.function(), None))
            except BaseException as error:  # noqa: BLE001 (it is the caller's)
                call.answers.put((None, error))
            self._current = None
            del call

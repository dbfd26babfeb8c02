"""Progress bars: on stderr, and only when a person watches."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from functools import cache
from threading import Lock, RLock
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tqdm import tqdm


@contextmanager
def progress_bar(
    total: int | None, *, unit: str = "B", description: str = ""
) -> Iterator[Callable[[int], None]]:
    """Show a bar for `total` units while the block runs; call what it yields with the units just done.

    Without a total it counts. unit "B" counts bytes and is shown as KiB, MiB, GiB. The call is safe from any thread.
    """
    if total == 0 or not sys.stderr.isatty():
        yield lambda _: None
        return
    lock = Lock()
    with _bars()(
        total=total,
        unit=unit,
        unit_scale=unit == "B",
        unit_divisor=1024,
        desc=description or None,
        file=sys.stderr,
        leave=False,
    ) as bar:

        def advance(done: int) -> None:
            with lock:
                bar.update(done)

        yield advance


def echo_above_bar(text: str) -> None:
    """Say a line on stderr, where a bar may be."""
    _bars().write(text, file=sys.stderr)


@cache
def _bars() -> type[tqdm[Any]]:
    """The library, which takes a while to import."""
    from tqdm import tqdm

    # Its own lock is a semaphore of the system's, which a process that is killed leaves behind.
    tqdm.set_lock(RLock())
    return tqdm  # type: ignore[no-any-return]

"""Progress bars: on stderr, and only when a person watches."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from threading import Lock, RLock
from typing import TYPE_CHECKING

from tqdm import tqdm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

tqdm.set_lock(RLock())  # its own is a semaphore of the system's, which a process that is killed leaves behind


@contextmanager
def progress_bar(
    total: int | None, *, unit: str = "B", description: str = ""
) -> Iterator[Callable[[int], None]]:
    """Show a bar for `total` units while the block runs; call what it yields with the units just done.

    Without a total it counts. unit "B" counts bytes and is shown as KiB, MiB, GiB. The call is safe from any thread.
    """
    lock = Lock()
    with tqdm(
        total=total,
        unit=unit,
        unit_scale=unit == "B",
        unit_divisor=1024,
        desc=description or None,
        file=sys.stderr,
        disable=not sys.stderr.isatty(),
        leave=False,
    ) as bar:

        def advance(done: int) -> None:
            with lock:
                bar.update(done)

        yield advance

"""How fast a drive reads: one request or several in flight, past the page cache or through it."""

from __future__ import annotations

import errno
import mmap
import os
import random
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmpack.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_MAX_FILES = 256  # kept open at once
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW


@dataclass(frozen=True, slots=True)
class ReadRate:
    """What one way of reading reached, from files that the page cache had forgotten."""

    request_nbytes: int
    in_flight: int
    direct: bool
    gigabytes_per_s: float | None  # None: the file system refuses O_DIRECT


def measure_reads(
    files: Sequence[Path], request_nbytes: int, *, in_flight: int, direct: bool, limit_s: float, seed: int = 0
) -> ReadRate:
    """Read requests at random places of the files, each place once at most, for `limit_s` seconds.

    The files must be at least as long as a request. Raises StorageError for one that cannot be read.
    """
    numbers = random.Random(seed)
    chosen = numbers.sample(list(files), min(_MAX_FILES, len(files)))
    descriptors: list[int] = []
    try:
        for path in chosen:
            descriptors.append(_open_cold(path, direct=direct))
        places = [
            (descriptor, offset)
            for descriptor in descriptors
            for offset in _offsets(os.fstat(descriptor).st_size, request_nbytes, numbers)
        ]
        numbers.shuffle(places)
        rate = _Readers(places, request_nbytes, limit_s).run(in_flight)
    except OSError as error:
        if error.errno == errno.EINVAL and direct:
            rate = None
        else:
            raise StorageError(f"{chosen[0].parent}: cannot be read: {error.strerror or error}") from error
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return ReadRate(request_nbytes, in_flight, direct, rate)


def _open_cold(path: Path, *, direct: bool) -> int:
    descriptor = os.open(path, _FLAGS | (os.O_DIRECT if direct else 0))
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead beyond a request
    return descriptor


def _offsets(file_nbytes: int, request_nbytes: int, numbers: random.Random) -> list[int]:
    """Where requests may begin that do not touch; a few of them where there are many."""
    return [
        place * request_nbytes
        for place in numbers.sample(
            range(file_nbytes // request_nbytes), min(1024, file_nbytes // request_nbytes)
        )
    ]


class _Readers:
    """Threads that take place after place, one each at least, until the time is up."""

    def __init__(self, places: list[tuple[int, int]], request_nbytes: int, limit_s: float) -> None:
        self._places = places
        self._request_nbytes = request_nbytes
        self._limit_s = limit_s
        self._num_read = 0
        self._error: OSError | None = None
        self._lock = threading.Lock()

    def run(self, num_threads: int) -> float:
        """GB/s."""
        threads = [threading.Thread(target=self._work, daemon=True) for _ in range(num_threads)]
        started = time.perf_counter()
        self._until = started + self._limit_s
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error
        return self._num_read * self._request_nbytes / (time.perf_counter() - started) / 1e9

    def _work(self) -> None:
        try:
            with mmap.mmap(-1, self._request_nbytes) as buffer:
                while True:
                    try:
                        descriptor, offset = self._places.pop()
                    except IndexError:
                        return
                    if os.preadv(descriptor, [buffer], offset) != self._request_nbytes:
                        raise OSError(f"a read of {self._request_nbytes} bytes at {offset} came back short")
                    with self._lock:
                        self._num_read += 1
                    if time.perf_counter() > self._until:
                        return
        except OSError as error:
            self._error = error

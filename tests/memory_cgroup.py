"""A memory cgroup of a chosen size, below our own, for processes that must do with so much."""

from __future__ import annotations

import os
import subprocess
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class NoCgroupError(Exception):
    """No memory cgroup can be made here; the message says why."""


@dataclass(frozen=True, slots=True)
class MemoryCgroup:
    """A folder of the kernel's, of either version of cgroups."""

    folder: Path
    peak_file: str

    def run(self, command: Sequence[str], *, timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Run a program whose memory and page cache count here from its first instruction on."""
        enter = f'echo $$ > "{self.folder / "cgroup.procs"}" && exec "$@"'
        return subprocess.run(
            ["sh", "-c", enter, "sh", *command],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def peak_nbytes(self) -> int:
        """The most that was charged at once: memory and page cache."""
        return int((self.folder / self.peak_file).read_text(encoding="ascii"))

    def num_killed(self) -> int:
        """How many processes the kernel has ended here for want of memory."""
        for name in ("memory.oom_control", "memory.events"):
            path = self.folder / name
            if path.exists():
                facts = dict(line.split() for line in path.read_text(encoding="ascii").splitlines())
                return int(facts.get("oom_kill", 0))
        return 0


@contextmanager
def memory_cgroup(limit_nbytes: int) -> Iterator[MemoryCgroup]:
    """Make one for the length of the block; raises NoCgroupError where that cannot be."""
    parent, version = _own_cgroup()
    folder = parent / f"lmpack-{os.getpid()}-{os.urandom(4).hex()}"
    try:
        folder.mkdir()
    except OSError as error:
        raise NoCgroupError(f"{folder}: {error.strerror}") from None
    try:
        if version == 1:
            made = MemoryCgroup(folder, "memory.max_usage_in_bytes")
            limits = {"memory.limit_in_bytes": limit_nbytes, "memory.swappiness": 0}
        else:
            made = MemoryCgroup(folder, "memory.peak")
            limits = {"memory.max": limit_nbytes, "memory.swap.max": 0}
        for name, value in limits.items():
            try:
                (folder / name).write_text(str(value), encoding="ascii")
            except OSError as error:  # v2: the parent does not hand the controller on
                raise NoCgroupError(f"{folder / name}: {error.strerror}") from None
        if not (folder / made.peak_file).exists():
            raise NoCgroupError(f"{folder / made.peak_file}: this kernel does not keep it")
        yield made
    finally:
        folder.rmdir()


def _own_cgroup() -> tuple[Path, int]:
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return Path("/sys/fs/cgroup/memory") / path.strip("/"), 1
        if controllers == "" and Path("/sys/fs/cgroup/cgroup.controllers").exists():
            return Path("/sys/fs/cgroup") / path.strip("/"), 2
    raise NoCgroupError("this process is in no memory cgroup")

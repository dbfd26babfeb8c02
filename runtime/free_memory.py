"""How much memory this process may have: what is free on the machine, or in its cgroups when that is less."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class _CgroupFiles:
    """Where a version of cgroups keeps its figures; what the reclaimable keys count can be dropped at any time."""

    limits: tuple[str, ...]
    usage: str
    reclaimable: tuple[str, ...]


_V1 = _CgroupFiles(
    ("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
)
_V2 = _CgroupFiles(("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file"))


def free_memory_nbytes(root: Path = Path("/")) -> int:
    """Bytes that this process can have without swapping: what it has resident now, and what is free.

    Clean page cache counts as free, as in the kernel's MemAvailable; cgroup limits of either version and of every
    level above the process count. `root` is where proc and sys lie.
    """
    own = resident_nbytes(root)
    # Pages that other processes share may be charged to another cgroup than ours.
    cgroups = (min(limit, left + own) for limit, left in _cgroups_nbytes(root))
    return min([_machine_nbytes(root) + own, *cgroups])


def resident_nbytes(root: Path = Path("/")) -> int:
    """What this process has resident now."""
    return _figures(root / "proc/self/status")["VmRSS:"] * 1024


def peak_resident_nbytes() -> int:
    """The most that this process has had resident; getrusage(2) counts what its parent had before it, too."""
    return _figures(Path("/proc/self/status"))["VmHWM:"] * 1024


def _machine_nbytes(root: Path) -> int:
    return _figures(root / "proc/meminfo")["MemAvailable:"] * 1024


def _cgroups_nbytes(root: Path) -> Iterator[tuple[int, int]]:
    """The limit of each memory cgroup above this process, and what it leaves."""
    for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _levels_nbytes(root / "sys/fs/cgroup", path, _V2)
        elif "memory" in controllers.split(","):
            yield from _levels_nbytes(root / "sys/fs/cgroup/memory", path, _V1)


def _levels_nbytes(mount: Path, path: str, files: _CgroupFiles) -> Iterator[tuple[int, int]]:
    # In a container the path may be the host's, with no such folder here; the mount itself is then its cgroup.
    own = mount / path.strip("/")
    for folder in (own, *own.parents):
        used = _number(folder / files.usage)
        limits = [limit for name in files.limits if (limit := _number(folder / name)) is not None]
        if used is not None and limits:
            stat = _figures(folder / "memory.stat")
            reclaimable = sum(stat.get(key, 0) for key in files.reclaimable)
            yield min(limits), max(0, min(limits) - used + reclaimable)
        if folder == mount:
            return


def _number(path: Path) -> int | None:
    """A file's number; None where there is no such file, or it says "max"."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    return int(text) if text.isdigit() else None


def _figures(path: Path) -> dict[str, int]:
    """The lines of a file that are a word and a number, as proc and cgroups write them."""
    pairs = (line.split() for line in path.read_text(encoding="utf-8", errors="replace").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) >= 2 and pair[1].isdigit()}

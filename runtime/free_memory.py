"""How much memory this process may still take: the machine's, or its cgroup's when that is less."""

from __future__ import annotations

from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def free_memory_nbytes() -> int:
    """Bytes that can be allocated now without swapping."""
    return min(_machine_nbytes(), *_cgroup_nbytes())


def _machine_nbytes() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("/proc/meminfo has no MemAvailable; Linux has it since 3.14")


def _cgroup_nbytes() -> list[int]:
    """What each memory cgroup above this process leaves; clean page cache counts as free."""
    free = [1 << 62]
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            free += _limits(_CGROUPS, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            free += _limits(
                _CGROUPS / "memory",
                path,
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )
    return free


def _limits(root: Path, path: str, limit: str, usage: str, reclaimable: str) -> list[int]:
    free = []
    folder = root / path.strip("/")
    while True:
        most, used = _number(folder / limit), _number(folder / usage)
        if most is not None and used is not None:
            free.append(max(0, most - used + _stat(folder / "memory.stat", reclaimable)))
        if folder == root or root not in folder.parents:
            return free
        folder = folder.parent


def _number(path: Path) -> int | None:
    """A file's number; None when it is not there, cannot be read, or says "max"."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _stat(path: Path, key: str) -> int:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{key} ")), 0)

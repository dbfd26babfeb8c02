"""What was measured of each drive, kept between runs.

It lies in `$XDG_CACHE_HOME/lmpack/drives.json` (`~/.cache/lmpack` where that is not set): GB/s by machine, device
and size of an expert, by store, by reads in flight. Deleting the file has everything measured anew.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmpack.cache_folder import cache_folder
from lmpack.errors import StorageError
from lmpack.strict_json import JsonError, parse_json
from lmpack.whole_file import whole_file

Rates = Mapping[str, Mapping[int, float]]  # store -> reads in flight -> GB/s


def drive_memory_file() -> Path:
    """Where this user's figures are; StorageError for a user without a home."""
    return cache_folder() / "drives.json"


def recall_rates(path: Path, expert_nbytes: int) -> Rates | None:
    """What was measured for the drive that `path` is on; None when nothing was, or nothing that can be read."""
    found = _read().get(drive_id(path, expert_nbytes), {})
    with contextlib.suppress(AttributeError, ValueError, TypeError):  # not what remember_rates wrote
        rates = {
            str(store): {int(depth): float(rate) for depth, rate in by_depth.items()}
            for store, by_depth in found.items()
        }
        if rates.keys() == {"direct", "mmap"} and all(rates.values()):
            return rates
    return None


def remember_rates(path: Path, expert_nbytes: int, rates: Rates) -> str:
    """Keep what was measured for the drive that `path` is on; the reason, when that cannot be."""
    drives = {**_read(), drive_id(path, expert_nbytes): rates}
    try:
        memory = drive_memory_file()
        with whole_file(memory) as file:
            file.write(json.dumps(drives, indent=1).encode())
    except StorageError as error:
        return str(error)
    return ""


def drive_id(path: Path, expert_nbytes: int) -> str:
    """One name for this machine, this device and experts of about this size (to the next power of two)."""
    return f"{_machine()} {device_name(path)} {1 << (expert_nbytes - 1).bit_length()}"


def device_name(path: Path) -> str:
    """A drive's kernel name with what tells it from others.

    Device numbers may change at a restart, model and size stay; a network's file system has only its number.
    """
    number = os.stat(path).st_dev
    block = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    facts = [block.resolve().name]
    for fact in ("device/model", "device/serial", "serial", "wwid", "size"):
        with contextlib.suppress(OSError):
            facts.append((block / fact).read_text(encoding="utf-8", errors="replace").strip())
    return ":".join(facts)


def _machine() -> str:
    with contextlib.suppress(OSError):
        return Path("/etc/machine-id").read_text(encoding="ascii").strip()
    return platform.node()


def _read() -> dict[str, Any]:
    try:
        drives = parse_json(drive_memory_file().read_bytes())
    except (OSError, JsonError):
        return {}
    return drives if isinstance(drives, dict) else {}

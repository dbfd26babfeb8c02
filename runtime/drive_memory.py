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
from lmpack.drive import storage_errors
from lmpack.errors import StorageError
from lmpack.strict_json import JsonError, check_float, check_int, check_object, parse_json, shown
from lmpack.whole_file import whole_file

Rates = Mapping[str, Mapping[int, float]]  # store -> reads in flight -> GB/s
_STORES = frozenset({"direct", "mmap"})


def drive_memory_file() -> Path:
    """Where this user's figures are; StorageError for a user without a home."""
    return cache_folder() / "drives.json"


def recall_rates(path: Path, expert_nbytes: int) -> Rates | None:
    """What was measured for the drive that `path` is on, or None; StorageError where the file is damaged."""
    return _read(drive_memory_file()).get(drive_id(path, expert_nbytes))


def remember_rates(path: Path, expert_nbytes: int, rates: Rates) -> str:
    """Keep what was measured for the drive that `path` is on; the reason, when that cannot be."""
    try:
        memory = drive_memory_file()
        drives: dict[str, Rates] = {}
        with contextlib.suppress(StorageError):  # which recall_rates() tells: a damaged file is written anew
            drives = _read(memory)
        with whole_file(memory) as file:
            file.write(json.dumps({**drives, drive_id(path, expert_nbytes): rates}, indent=1).encode())
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


def _read(memory: Path) -> dict[str, Rates]:
    with storage_errors(memory):
        try:
            raw = memory.read_bytes()
        except FileNotFoundError:
            return {}
    try:
        return _parse(raw)
    except ValueError as error:
        raise StorageError(f"{memory} was damaged: {error}") from None


def _parse(raw: bytes) -> dict[str, Rates]:
    """Check all that remember_rates() has written; ValueError when it has not."""
    drives: dict[str, Rates] = {}
    for drive, stores in _object(parse_json(raw)).items():
        drives[drive] = {
            store: {
                check_int(int(depth), store, least=1): check_float(rate, store)
                for depth, rate in _object(by_depth).items()
            }
            for store, by_depth in check_object(stores, _STORES, "a drive").items()
        }
    return drives


def _object(value: object) -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        raise JsonError(f"expected an object that is not empty, got {shown(value)}")
    return value

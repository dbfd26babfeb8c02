"""The repositories of the local hub: branches, files, and how the hub lists them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

LFS_FROM_NBYTES = 1024


@dataclass(frozen=True, slots=True)
class Branch:
    """What a branch holds, and the commit that stands for it."""

    files: dict[str, bytes]
    commit: str

    @classmethod
    def of(cls, files: dict[str, bytes]) -> Branch:
        listing = sorted((name, hashlib.sha256(raw).hexdigest()) for name, raw in files.items())
        return cls(dict(files), hashlib.sha1(repr(listing).encode()).hexdigest())


@dataclass(slots=True)
class Repo:
    """A repository."""

    branches: dict[str, Branch]
    license: str | None = None
    private: bool = False
    gated: bool = False
    messages: list[str] = field(default_factory=list)  # of the commits that came


def tree_entry(name: str, raw: bytes) -> dict[str, Any]:
    """How the hub lists a file."""
    sha256 = hashlib.sha256(raw).hexdigest()
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {len(raw)}\n".encode()
    is_large = len(raw) >= LFS_FROM_NBYTES
    content = pointer if is_large else raw
    oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    entry: dict[str, Any] = {"type": "file", "path": name, "oid": oid, "size": len(raw)}
    if is_large:
        entry["lfs"] = {"oid": sha256, "size": len(raw), "pointerSize": len(pointer)}
    return entry


def upload_mode(file: dict[str, Any], files: dict[str, bytes]) -> dict[str, Any]:
    """How the hub wants a file to come, and which version of it it has."""
    raw = files.get(file["path"])
    mode = "lfs" if file["size"] >= LFS_FROM_NBYTES or file["path"].endswith(".bin") else "regular"
    oid = None
    if raw is not None:
        entry = tree_entry(file["path"], raw)
        oid = entry["lfs"]["oid"] if "lfs" in entry else entry["oid"]
    return {"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid}

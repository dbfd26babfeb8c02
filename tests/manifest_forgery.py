"""Manifests changed and given the pack id that fits the change, as a forger would."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from lmpack.manifest import Manifest, pack_id_of

if TYPE_CHECKING:
    from collections.abc import Callable

PREFIX = b'{"format": "lmpack", "version": 1, "pack_id": "'
PREFIX_2 = PREFIX.replace(b"1", b"2")


def seal(raw: bytes) -> bytes:
    """Give changed bytes the pack_id that fits them; bytes that do not begin as a manifest stay as they are."""
    if not raw.startswith((PREFIX, PREFIX_2)):
        return raw
    return raw[: len(PREFIX)] + pack_id_of(raw).encode() + raw[len(PREFIX) + 64 :]


def forge(manifest: Manifest, change: Callable[[dict[str, Any]], object]) -> bytes:
    """Change the document and seal it again."""
    document = json.loads(manifest.to_bytes())
    change(document)
    rest = json.dumps(
        {key: value for key, value in document.items() if key not in ("format", "version", "pack_id")}
    )
    return seal(PREFIX + b"0" * 64 + b'", ' + rest[1:].encode())


def put(*path: Any) -> Callable[[dict[str, Any]], object]:
    """Make a change that sets document[path[0]][path[1]]... to the last argument."""

    def change(document: dict[str, Any]) -> None:
        place: Any = document
        for step in path[:-2]:
            place = place[step]
        place[path[-2]] = path[-1]

    return change


def drop(*path: Any) -> Callable[[dict[str, Any]], object]:
    """Make a change that deletes document[path[0]][path[1]]..."""

    def change(document: dict[str, Any]) -> None:
        place: Any = document
        for step in path[:-1]:
            place = place[step]
        del place[path[-1]]

    return change

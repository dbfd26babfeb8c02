"""A JSON file of a Hugging Face folder, from untrusted bytes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from converters.checkpoint import CheckpointFile, wrong_magic
from lmpack.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

MAX_JSON_NBYTES = 100_000_000  # the index of a large model takes 10 MB


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; raises CheckpointError for whatever else is there."""
    file = CheckpointFile.of(path, path.name)
    if file.nbytes > MAX_JSON_NBYTES:
        raise CheckpointError(f"{path}: is larger than {MAX_JSON_NBYTES} bytes; not a file of a checkpoint")
    file.check_fetched()
    raw = path.read_bytes()
    if not raw.strip():
        raise wrong_magic(path, b"", "JSON")
    try:
        found = json.loads(raw)
    except json.JSONDecodeError as error:
        at = f"line {error.lineno} column {error.colno}"
        raise CheckpointError(
            f"{path}: is not JSON at {at}, damaged or cut short; download it again"
        ) from error
    # not UTF-8, a number of thousands of digits, nested too deeply
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not JSON that can be read; download it again") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: is not a JSON object; download it again")
    return found

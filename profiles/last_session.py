"""Last session: which experts a run of a pack ended with, so that the next one can start with them.

Kept in the user's cache folder, for a pack may be read-only: lmpack/sessions/PACK_ID.json in XDG_CACHE_HOME, or in
~/.cache. It holds {"version": 1, "experts": [[layer, expert], ...]}, the one to keep longest first, and may be deleted
at any time.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from lmpack.cache_folder import cache_folder
from lmpack.drive import storage_errors
from lmpack.errors import ProfileError, StorageError
from lmpack.expert_key import ExpertKey
from lmpack.strict_json import JsonError, check_int, check_list, check_object, parse_json
from lmpack.whole_file import whole_file

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmpack.manifest import Manifest

_VERSION = 1
_MAX_NBYTES = 64 << 20
"""A million experts take 16 MB."""


class LastSession:
    """The file of one pack."""

    def __init__(self, manifest: Manifest) -> None:
        self._num_experts = {entry.layer: entry.num_experts for entry in manifest.layers}
        self.path = cache_folder() / "sessions" / f"{manifest.pack_id}.json"

    def load(self) -> list[ExpertKey]:
        """The experts to start with, the best first; none when there was no session.

        Raises ProfileError when the file is not what save() wrote, StorageError when it cannot be read.
        """
        with storage_errors(self.path):
            try:
                with open(self.path, "rb") as file:
                    raw = file.read(_MAX_NBYTES + 1)
            except FileNotFoundError:
                return []
        try:
            return self._parse(raw)
        except JsonError as error:
            raise ProfileError(
                f"{self.path}: {error}; delete the file, it is only a memory of the last run"
            ) from None

    def save(self, keys: Sequence[ExpertKey]) -> None:
        """Remember the experts, the best first; raises StorageError."""
        try:
            with whole_file(self.path) as file:
                file.write(json.dumps({"version": _VERSION, "experts": keys}).encode())
        except StorageError as error:
            raise StorageError(f"the session cannot be kept for the next --warm last: {error}") from error

    def _parse(self, raw: bytes) -> list[ExpertKey]:
        if len(raw) > _MAX_NBYTES:
            raise JsonError(f"expected at most {_MAX_NBYTES} bytes")
        document = check_object(parse_json(raw), frozenset({"version", "experts"}), "the document")
        check_int(document["version"], "version", least=_VERSION, most=_VERSION)
        keys = []
        for pair in check_list(document["experts"], "experts", longest=sum(self._num_experts.values())):
            layer, expert = check_list(pair, "experts[]", shortest=2, longest=2)
            num_experts = self._num_experts.get(check_int(layer, "experts[]"), 0)
            keys.append(ExpertKey(layer, check_int(expert, "experts[]", most=num_experts - 1)))
        if len(set(keys)) < len(keys):
            raise JsonError("experts: one stands twice")
        return keys

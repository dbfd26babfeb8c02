"""A store whose first read of each expert is compared with the manifest."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from lmpack.errors import StorageError

if TYPE_CHECKING:
    from lmpack.expert_key import ExpertKey
    from lmpack.pack import Pack
    from runtime.expert_bank import ExpertBank
    from runtime.expert_store import ExpertStore


class VerifiedStore:
    """Hashes what another store has read, once per file, in the thread that read it."""

    def __init__(self, store: ExpertStore, pack: Pack) -> None:
        """Take over the store, to close it with this one."""
        self._store = store
        self._pack = pack
        self._verified: set[str] = set()  # files; several threads add to it, none takes away

    @property
    def name(self) -> str:
        """The other store's, and that it is verified."""
        return f"{self._store.name}, verified"

    def bank(self, layer: int) -> ExpertBank:
        return self._store.bank(layer)

    def num_slots(self, layer: int) -> int:
        return self._store.num_slots(layer)

    def acquire(self, key: ExpertKey) -> int | None:
        return self._store.acquire(key)

    def read(self, key: ExpertKey, slot: int) -> int:
        drive_nbytes = self._store.read(key, slot)
        expert = self._pack.manifest.layer(key.layer).experts[key.expert]
        if expert.file in self._verified:
            return drive_nbytes
        bank = self._store.bank(key.layer)
        found = hashlib.sha256(bank.storage[slot * bank.stride : (slot + 1) * bank.stride].cpu().numpy().data)
        if found.hexdigest() != expert.sha256:
            raise StorageError(
                f"expert {key}: {self._pack.expert_path(key)}: sha256 is {found.hexdigest()[:12]}..., the manifest "
                f"says {expert.sha256[:12]}...; run: lmpack validate {self._pack.path}"
            )
        self._verified.add(expert.file)
        return drive_nbytes

    def release(self, key: ExpertKey, slot: int) -> None:
        self._store.release(key, slot)

    def close(self) -> None:
        self._store.close()

"""A store whose first read of each expert is compared with the manifest."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from lmpack.errors import StorageError
from lmpack.padded_digest import PaddedDigest

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
        name = expert.file if self._pack.reference is None else key.file  # a reference pack has no doubles
        if name in self._verified:
            return drive_nbytes
        found = self._sha256(key, slot)
        if found != expert.sha256:
            raise StorageError(
                f"expert {key}: {self._pack.expert_path(key)}: sha256 is {found[:12]}..., the manifest "
                f"says {expert.sha256[:12]}...; run: lmpack validate {self._pack.path}"
            )
        self._verified.add(name)
        return drive_nbytes

    def _sha256(self, key: ExpertKey, slot: int) -> str:
        """Hash a slot as the manifest lays an expert out, wherever its parts are in this bank."""
        bank, layer = self._store.bank(key.layer), self._pack.manifest.layer(key.layer)
        storage = bank.storage[slot * bank.stride : (slot + 1) * bank.stride].cpu().numpy()
        if bank.parts == layer.parts:
            return hashlib.sha256(storage.data).hexdigest()
        digest = PaddedDigest()
        for part, placed in zip(layer.parts, bank.parts, strict=True):
            digest.add(part.offset, storage[placed.offset : placed.offset + placed.nbytes].data)
        return digest.finish(layer.stride)

    def release(self, key: ExpertKey, slot: int) -> None:
        self._store.release(key, slot)

    def close(self) -> None:
        self._store.close()

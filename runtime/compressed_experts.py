"""Compressed experts: from where their files were read to into a slot."""

from __future__ import annotations

from threading import local
from typing import TYPE_CHECKING

from lmpack.decompression import Decompressor
from lmpack.errors import PackError, StorageError

if TYPE_CHECKING:
    from lmpack.expert_key import ExpertKey
    from lmpack.pack import Pack


class CompressedExperts:
    """Restores experts, in any thread."""

    def __init__(self, pack: Pack) -> None:
        self._pack = pack
        self._threads = local()

    def restore(self, key: ExpertKey, file: memoryview, target: memoryview) -> None:
        """Fill a slot from a file's bytes; StorageError names the expert when they are damaged."""
        layer = self._pack.manifest.layer(key.layer)
        stored = layer.experts[key.expert].stored
        assert stored is not None
        if not hasattr(self._threads, "decompressor"):
            self._threads.decompressor = Decompressor()
        try:
            self._threads.decompressor.restore_expert(file, stored, layer.parts, target)
        except PackError as error:
            path = self._pack.expert_path(key)
            raise StorageError(
                f"expert {key}: {path}: {error}; run: lmpack validate {self._pack.path}"
            ) from None

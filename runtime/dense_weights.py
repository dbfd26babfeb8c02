"""The tensors every token uses, read from a pack's shared.bin, or the source, into memory of our own."""

from __future__ import annotations

import hashlib
import math
import os
from typing import TYPE_CHECKING

import torch

from lmpack.drive import storage_errors
from lmpack.errors import PackError, StorageError, UnsupportedError
from runtime.kernels.weight import Weight

if TYPE_CHECKING:
    from collections.abc import Callable

    from lmpack.manifest import Manifest, TensorInfo
    from lmpack.pack import Pack

_READ_NBYTES = 16 << 20
_ROUTER = ".ffn_gate_inp"  # and the gate of a shared expert


def dense_nbytes(manifest: Manifest) -> int:
    """What the tensors of a pack take once they are read: routers and vectors become float32."""
    return sum(
        max(info.nbytes, 4 * math.prod(info.shape))
        if len(info.shape) == 1 or _ROUTER in info.name
        else info.nbytes
        for info in manifest.shared
    )


class DenseWeights:
    """Reads tensors by canonical name, anew at each call, into memory that no expert read can evict."""

    def __init__(
        self,
        pack: Pack,
        device: torch.device,
        *,
        verify: bool = False,
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        """With `verify`, what is read is compared with the manifest; `progress` is told of bytes read."""
        self._progress = progress
        self._verify = verify
        self.pack = pack
        self.device = device

    def __contains__(self, name: str) -> bool:
        return self.pack.manifest.has_tensor(name)

    def matrix(self, name: str) -> Weight:
        """A tensor in its stored blocks as [out_features, in_features]; a vector becomes one row."""
        info = self._info(name)
        return Weight(self._read(info).to(self.device), info.dtype, _matrix_shape(info))

    def router(self, name: str) -> Weight:
        """A matrix widened to float32: a router's near-ties must not hang on how a product rounds its input."""
        info = self._info(name)
        floats = Weight(self._read(info), info.dtype, _matrix_shape(info)).float32().contiguous()
        return Weight(floats.view(torch.uint8).flatten().to(self.device), "F32", _matrix_shape(info))

    def vector(self, name: str) -> torch.Tensor:
        """A one-dimensional tensor (norm, bias) as float32."""
        info = self._info(name)
        return Weight(self._read(info), info.dtype, _matrix_shape(info)).float32().flatten().to(self.device)

    def optional_vector(self, name: str) -> torch.Tensor | None:
        return self.vector(name) if name in self else None

    def _info(self, name: str) -> TensorInfo:
        if name not in self:
            raise PackError(f"{self.pack.path}: tensor {name} is missing; this architecture needs it")
        return self.pack.manifest.tensor(name)

    def _read(self, info: TensorInfo) -> torch.Tensor:
        """The tensor's bytes, compared with the manifest where that was asked for."""
        storage = self._read_bytes(info)
        self._progress(info.nbytes)
        if self._verify and hashlib.sha256(storage.numpy().data).hexdigest() != info.sha256:
            raise StorageError(
                f"{self.pack.tensor_extent(info).path}: {info.name} is not what the manifest says; "
                f"run: lmpack validate {self.pack.path}"
            )
        return storage

    def _read_bytes(self, info: TensorInfo) -> torch.Tensor:
        """The tensor's bytes, past the page cache where the system lets us drop them again."""
        if info.stored is not None:
            return torch.from_numpy(self.pack.read_tensor(info.name))
        storage = torch.empty(info.nbytes, dtype=torch.uint8)
        target = storage.numpy().data
        if not info.nbytes:
            return storage
        extent = self.pack.tensor_extent(info)
        path = extent.path
        with storage_errors(path), path.open("rb", buffering=0) as file:
            file.seek(extent.offset)
            done = 0
            while done < info.nbytes:
                got = file.readinto(target[done : done + _READ_NBYTES])
                if not got:
                    raise StorageError(
                        f"{path}: {info.name} ends at byte {done} of {info.nbytes}; run: lmpack validate"
                    )
                done += got
            os.posix_fadvise(file.fileno(), extent.offset, info.nbytes, os.POSIX_FADV_DONTNEED)
        return storage


def _matrix_shape(info: TensorInfo) -> tuple[int, int]:
    if len(info.shape) == 1:
        return 1, info.shape[0]
    if len(info.shape) == 2:
        return info.shape[0], info.shape[1]
    raise UnsupportedError(f"{info.name}: shape {list(info.shape)} is neither a vector nor a matrix")

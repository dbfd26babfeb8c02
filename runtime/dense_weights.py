"""The tensors every token uses, read from a pack's shared.bin into memory of our own."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import gguf
import numpy as np
import torch

from lmpack.errors import PackError, StorageError, UnsupportedError
from runtime.kernels.weight import Weight

if TYPE_CHECKING:
    from lmpack.manifest import TensorInfo
    from lmpack.pack import Pack

_READ_NBYTES = 16 << 20


class DenseWeights:
    """Looks tensors up by canonical name and owns their bytes, which no expert read can evict."""

    def __init__(self, pack: Pack, device: torch.device) -> None:
        self.pack = pack
        self.device = device
        self.nbytes = 0
        self._infos = {info.name: info for info in pack.manifest.shared}
        self._weights: dict[str, Weight] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._infos

    def matrix(self, name: str) -> Weight:
        """A tensor in its stored blocks as [out_features, in_features]; a vector becomes one row."""
        if name not in self._weights:
            info = self._info(name)
            if len(info.shape) not in (1, 2):
                raise UnsupportedError(f"{name}: shape {list(info.shape)} is no matrix")
            rows, columns = info.shape if len(info.shape) == 2 else (1, info.shape[0])
            self._weights[name] = Weight(self._read(info).to(self.device), info.dtype, (rows, columns))
        return self._weights[name]

    def optional_matrix(self, name: str) -> Weight | None:
        return self.matrix(name) if name in self else None

    def vector(self, name: str) -> torch.Tensor:
        """A one-dimensional tensor (norm, bias) as float32."""
        info = self._info(name)
        blocks = self._read(info).numpy()
        kind = gguf.GGMLQuantizationType[info.dtype]
        floats = (
            gguf.quants.dequantize(blocks, kind)
            if kind.name not in _PLAIN
            else blocks.view(_PLAIN[kind.name])
        )
        return torch.from_numpy(np.array(floats, dtype=np.float32)).to(self.device)

    def optional_vector(self, name: str) -> torch.Tensor | None:
        return self.vector(name) if name in self else None

    def _info(self, name: str) -> TensorInfo:
        if name not in self._infos:
            raise PackError(f"{self.pack.path}: tensor {name} is missing; this architecture needs it")
        return self._infos[name]

    def _read(self, info: TensorInfo) -> torch.Tensor:
        """The tensor's bytes, past the page cache where the system lets us drop them again."""
        storage = torch.empty(info.nbytes, dtype=torch.uint8)
        target = memoryview(storage.numpy())
        path = self.pack.path / "shared.bin"
        with path.open("rb", buffering=0) as file:
            file.seek(info.offset)
            done = 0
            while done < info.nbytes:
                got = file.readinto(target[done : done + _READ_NBYTES])
                if not got:
                    raise StorageError(
                        f"{path}: {info.name} ends at byte {done} of {info.nbytes}; run: lmpack validate"
                    )
                done += got
            os.posix_fadvise(file.fileno(), info.offset, info.nbytes, os.POSIX_FADV_DONTNEED)
        self.nbytes += info.nbytes
        return storage


_PLAIN = {"F32": np.float32, "F16": np.float16}

"""Where the arithmetic runs, and which memory it works in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lmpack.errors import UnsupportedError, UsageError
from runtime.free_memory import free_memory_nbytes
from runtime.memory_budget import RAM, Memory

if TYPE_CHECKING:
    from runtime.copy_stream import CopyStream

_TWIN = "twin"  # for tests, named in no help text


@dataclass(frozen=True, slots=True)
class ComputeDevice:
    """The processor, a GPU, or a twin: the processor again, with memory apart from the rest as a GPU's is."""

    name: str  # cpu, cuda:0, twin
    torch_device: torch.device

    @classmethod
    def find(cls, name: str) -> ComputeDevice:
        """The device called cpu, cuda or cuda:N; UnsupportedError when this machine or this torch has none."""
        if name in ("cpu", _TWIN):
            return cls(name, torch.device("cpu"))
        kind, _, index = name.partition(":")
        if kind != "cuda" or not (index.isdecimal() or name == "cuda"):
            raise UsageError(f"no device is called {name[:40]!r}; expected cpu, cuda or cuda:N")
        num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        number = int(index or 0)
        if number >= num_devices:
            raise UnsupportedError(
                f"device {name}: torch {torch.__version__} finds {num_devices} GPUs here; use --device cpu"
            )
        return cls(f"cuda:{number}", torch.device("cuda", number))

    @property
    def is_apart(self) -> bool:
        """Whether what it works on has to be copied to it."""
        return self.name != "cpu"

    @property
    def memory(self) -> Memory:
        """The memory it works in."""
        return Memory("device memory", "--vram", lambda: 0, self._free_nbytes) if self.is_apart else RAM

    def open_copies(self) -> CopyStream:
        """The way to its memory, where that is apart."""
        assert self.is_apart
        if self.name == _TWIN:
            from runtime.twin_copies import TwinCopies

            return TwinCopies()
        from runtime.cuda_copies import CudaCopies

        return CudaCopies(self.torch_device)

    def _free_nbytes(self) -> int:
        if self.name == _TWIN:
            return free_memory_nbytes()
        return torch.cuda.mem_get_info(self.torch_device)[0]

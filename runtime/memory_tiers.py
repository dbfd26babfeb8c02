"""How much a run keeps in which memory: one budget where the processor computes, two where a device does."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmpack.errors import UsageError
from runtime.activations import activation_nbytes
from runtime.dense_weights import dense_nbytes
from runtime.kv_cache import kv_nbytes
from runtime.memory_budget import MemoryBudget
from runtime.reading_room import reading_nbytes

if TYPE_CHECKING:
    import torch

    from lmpack.manifest import Manifest
    from runtime.compute_device import ComputeDevice
    from runtime.model_config import ModelConfig

_DEQUANTISING_COPIES = 3
"""Of a matrix as float32, that gguf's codecs keep alive at once: measured, 2.0 to 2.8."""


@dataclass(frozen=True, slots=True)
class MemoryTiers:
    """`compute` is what the arithmetic works in; `ram` what lies between that and the drive, where they are apart."""

    device: str
    compute: MemoryBudget
    ram: MemoryBudget | None

    @classmethod
    def plan(
        cls,
        manifest: Manifest,
        config: ModelConfig,
        device: ComputeDevice,
        *,
        ram_nbytes: int | None,
        vram_nbytes: int | None,
        context_length: int,
        kv_dtype: torch.dtype,
        chunk: int,
        guessing_nbytes: int,
    ) -> MemoryTiers:
        """Give the device's memory to dense weights, KV cache and experts, and RAM to the other experts.

        Raises BudgetError naming the smallest budget that works, UsageError for `vram_nbytes` without a device.
        """
        if vram_nbytes is not None and not device.is_apart:
            raise UsageError("--vram is the memory of a GPU; add --device cuda, or use --ram")
        buffers_nbytes = activation_nbytes(manifest, config, context_length, chunk)
        if device.is_apart:
            buffers_nbytes += _float32_nbytes(manifest)
        else:
            buffers_nbytes += reading_nbytes(manifest) + guessing_nbytes
        compute = MemoryBudget.plan(
            manifest,
            ram_nbytes=vram_nbytes if device.is_apart else ram_nbytes,
            dense_nbytes=dense_nbytes(manifest),
            kv_nbytes=kv_nbytes(config, context_length, kv_dtype),
            buffers_nbytes=buffers_nbytes,
            top_k=config.num_experts_per_tok,
            memory=device.memory,
        )
        if not device.is_apart:
            return cls(device.name, compute, None)
        ram = MemoryBudget.plan(
            manifest,
            ram_nbytes=ram_nbytes,
            dense_nbytes=0,
            kv_nbytes=0,
            buffers_nbytes=reading_nbytes(manifest)
            + guessing_nbytes
            + _DEQUANTISING_COPIES * _float32_nbytes(manifest),
            top_k=config.num_experts_per_tok,
            elsewhere=compute.slots,
        )
        return cls(device.name, compute, ram)

    def describe(self) -> str:
        """One line for people."""
        if self.ram is None:
            return self.compute.describe()
        return f"{self.device} {self.compute.describe()}; RAM {self.ram.describe()}"


def _float32_nbytes(manifest: Manifest) -> int:
    """The largest matrix as the torch kernels dequantise it."""
    shapes = [info.shape for info in manifest.shared]
    shapes += [part.shape for entry in manifest.layers for part in entry.parts]
    return max((4 * math.prod(shape) for shape in shapes), default=0)

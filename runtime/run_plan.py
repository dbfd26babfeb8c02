"""What a run of a pack will use, decided before anything is allocated or read."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lmpack.errors import UsageError
from lmpack.pack import Pack
from profiles.policy_choice import DEFAULT_POLICY, PolicyChoice
from profiles.warm_start import WarmStart
from runtime.compute_device import ComputeDevice
from runtime.families.registry import find_family
from runtime.kv_cache import KV_DTYPES
from runtime.memory_tiers import MemoryTiers
from runtime.model_config import ModelConfig
from runtime.prefetch_choice import DEFAULT_PREFETCH, PrefetchChoice

if TYPE_CHECKING:
    from runtime.families.family import Family

PREFILL_CHUNK = 512  # tokens; the same whatever the budget, so that the budget cannot change a bit
DEFAULT_CONTEXT = 4096  # tokens


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What was asked for, checked against the pack and this machine, with a choice for all that was not."""

    pack: Pack
    family: Family
    config: ModelConfig
    policy: PolicyChoice
    start: WarmStart
    guessing: PrefetchChoice
    num_threads: int
    context_length: int
    kv_dtype: str
    device: ComputeDevice
    tiers: MemoryTiers

    @classmethod
    def make(
        cls,
        path: str | Path,
        *,
        ram: int | None = None,
        vram: int | None = None,
        device: str = "cpu",
        num_threads: int | None = None,
        context_length: int | None = None,
        kv_dtype: str = "f16",
        policy: str = DEFAULT_POLICY.name,
        warm: str | Path | None = None,
        prefetch: str = DEFAULT_PREFETCH,
    ) -> RunPlan:
        """Open the pack and decide; the words and errors are those of Engine.load."""
        choice = PolicyChoice.parse(policy)
        if choice.pinned and warm is None:
            raise UsageError(
                f"policy {policy} pins the experts of a warm start; give one, such as --warm last"
            )
        pack = Pack.open(Path(path))
        # Before all else: an unknown architecture is the clearest reason why a pack cannot run.
        family = find_family(pack.manifest.architecture)
        config = ModelConfig.parse(pack.manifest.config)
        context_length = _context_length(context_length, config)
        start = WarmStart.read(warm, pack.manifest)
        guessing = PrefetchChoice.parse(prefetch, pack.manifest)
        compute_device = ComputeDevice.find(device)
        tiers = MemoryTiers.plan(
            pack.manifest,
            config,
            compute_device,
            ram_nbytes=ram,
            vram_nbytes=vram,
            context_length=context_length,
            kv_dtype=KV_DTYPES[kv_dtype],
            chunk=PREFILL_CHUNK,
            guessing_nbytes=guessing.nbytes,
        )
        return cls(
            pack,
            family,
            config,
            choice,
            start,
            guessing,
            num_threads or len(os.sched_getaffinity(0)),
            context_length,
            kv_dtype,
            compute_device,
            tiers,
        )


def _context_length(asked: int | None, config: ModelConfig) -> int:
    longest = config.max_position_embeddings
    if asked is None:
        return min(longest, DEFAULT_CONTEXT)
    if not 1 <= asked <= longest:
        raise UsageError(f"a context of {asked} tokens: this model allows 1 to {longest}; ask for less")
    return asked

"""What a run of a pack will use, decided before anything is allocated or read."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

from lmpack.errors import UsageError
from profiles.policy_choice import DEFAULT_POLICY, PolicyChoice
from profiles.warm_start import WarmStart
from runtime.compute_device import ComputeDevice
from runtime.families.registry import find_family
from runtime.kv_cache import KV_DTYPES
from runtime.memory_tiers import MemoryTiers
from runtime.model_config import ModelConfig
from runtime.prefetch_choice import DEFAULT_PREFETCH, PrefetchChoice

if TYPE_CHECKING:
    from pathlib import Path

    from lmpack.pack import Pack
    from runtime.families.family import Family

PREFILL_CHUNK = 512  # tokens; the same whatever the budget, so that the budget cannot change a bit
DEFAULT_CONTEXT = 4096  # tokens


class RunOptions(TypedDict, total=False):
    """What can be asked of a run; None, or nothing, leaves the choice to RunPlan.make."""

    ram: int | None  # hard limit in bytes on all that the process keeps
    vram: int | None  # and on what is kept on a GPU, CUDA's own context aside
    device: str  # that computes: cpu, cuda or cuda:N
    num_threads: int | None
    context_length: int | None  # tokens
    kv_dtype: str  # what keys and values are kept in: f16, bf16 or f32
    policy: str | None  # which expert goes for another: PolicyChoice reads it
    warm: (
        str | Path | None
    )  # what is read in at once: a profile's most used experts, or "last", the last session's
    prefetch: str | None  # what guesses the experts of the next layer: PrefetchChoice reads it


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
        pack: Pack,
        *,
        ram: int | None = None,  # what is free now, less headroom
        vram: int | None = None,
        device: str = "cpu",
        num_threads: int | None = None,  # one for each processor that this process may use
        context_length: int | None = None,  # the model's, at most DEFAULT_CONTEXT
        kv_dtype: str = "f16",
        policy: str | None = None,
        warm: str | Path | None = None,
        prefetch: str | None = None,
    ) -> RunPlan:
        """Decide about RunOptions; raises UsageError, and what Engine.load does."""
        # Before all else: an unknown architecture is the clearest reason why a pack cannot run.
        family = find_family(pack.manifest.architecture)
        config = ModelConfig.parse(pack.manifest.config)
        context_length = _context_length(context_length, config)
        guessing = PrefetchChoice.parse(DEFAULT_PREFETCH if prefetch is None else prefetch, pack.manifest)
        compute_device = ComputeDevice.find(device)
        return cls(
            pack=pack,
            family=family,
            config=config,
            policy=_policy(policy, warm),
            start=WarmStart.read(warm, pack.manifest),
            guessing=guessing,
            num_threads=num_threads or len(os.sched_getaffinity(0)),
            context_length=context_length,
            kv_dtype=kv_dtype,
            device=compute_device,
            tiers=MemoryTiers.plan(
                pack.manifest,
                config,
                compute_device,
                ram_nbytes=ram,
                vram_nbytes=vram,
                context_length=context_length,
                kv_dtype=KV_DTYPES[kv_dtype],
                chunk=PREFILL_CHUNK,
                guessing_nbytes=guessing.nbytes,
            ),
        )


def _policy(asked: str | None, warm: str | Path | None) -> PolicyChoice:
    if asked is None:
        return DEFAULT_POLICY
    choice = PolicyChoice.parse(asked)
    if choice.pinned and warm is None:
        raise UsageError(f"policy {asked} pins the experts of a warm start; give one, such as --warm last")
    return choice


def _context_length(asked: int | None, config: ModelConfig) -> int:
    longest = config.max_position_embeddings
    if asked is None:
        return min(longest, DEFAULT_CONTEXT)
    if not 1 <= asked <= longest:
        raise UsageError(f"a context of {asked} tokens: this model allows 1 to {longest}; ask for less")
    return asked

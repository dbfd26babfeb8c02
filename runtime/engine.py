"""A pack, ready to turn tokens into tokens."""

from __future__ import annotations

import resource
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self, Unpack

import torch

from lmpack.errors import UsageError
from lmpack.pack import Pack
from runtime.compute_thread import ComputeThread
from runtime.dense_weights import DenseWeights
from runtime.device_store import DeviceStore
from runtime.expert_cache import ExpertCache
from runtime.expert_store import open_store
from runtime.free_memory import peak_resident_nbytes
from runtime.generated_token import GeneratedToken
from runtime.io_choice import IoChoice, choose_io, device_io
from runtime.kernels.kernels import load_kernels
from runtime.kv_cache import KV_DTYPES, KVCache, check_fit
from runtime.model import Model
from runtime.prefetcher import GuessCounts, Prefetcher
from runtime.run_plan import PREFILL_CHUNK, RunPlan
from runtime.run_stats import RunStats
from runtime.sampler import Sampler, SamplingParams
from runtime.timings import Timings
from runtime.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType

    from torch import Tensor

    from profiles.last_session import LastSession
    from profiles.routing_recorder import RoutingRecorder
    from runtime.expert_store import ExpertStore
    from runtime.kernels.kernels import Kernels
    from runtime.memory_budget import MemoryBudget
    from runtime.run_plan import RunOptions
    from runtime.tokenizer import Tokenizer


@dataclass(slots=True)
class Engine:
    """Generates from a pack within a memory budget; made by `Engine.load`, freed by `close`."""

    plan: RunPlan
    io_choice: IoChoice
    tokenizer: Tokenizer
    cache: ExpertCache
    kernels: Kernels
    model: Model
    thread: ComputeThread
    guesses: GuessCounts
    timings: Timings
    major_faults_before: int  # of this process, when it was loaded
    session: LastSession | None  # which close() keeps, once

    @classmethod
    def load(
        cls,
        pack: Pack | Path | str,
        *,
        io: str = "auto",
        kernels: str = "auto",
        verify_reads: bool = False,
        recorder: RoutingRecorder | None = None,
        progress: Callable[[int], None] = lambda _: None,
        **options: Unpack[RunOptions],
    ) -> Engine:
        """Open a pack for generation.

        `io` is the store that reads experts: auto, mmap or direct; `kernels` what multiplies: auto, ggml or torch.
        `verify_reads` compares everything with the manifest's checksums when it is first read; otherwise bytes are
        trusted. `progress` is told of bytes: memory provided for experts, dense weights and warm experts read. Raises
        PackError, UnsupportedError for architectures that cannot run, BudgetError naming the smallest
        budget, ProfileError.
        """
        pack = pack if isinstance(pack, Pack) else Pack.open(Path(pack))
        plan = RunPlan.make(pack, **options)
        tiers = plan.tiers
        io_choice = choose_io(io, pack, tiers.compute) if tiers.ram is None else device_io(io)
        weights = DenseWeights(pack, plan.device.torch_device, verify=verify_reads, progress=progress)
        with ExitStack() as undo:
            loaded_kernels = load_kernels(kernels, num_threads=plan.num_threads, device=plan.device.name)
            undo.callback(loaded_kernels.close)
            store = _open_store(plan, io_choice, verify=verify_reads, progress=progress)
            undo.callback(store.close)
            make_policy = partial(plan.policy.make, most_used=plan.start.keys)
            cache = ExpertCache(store, tiers.compute, make_policy, num_readers=io_choice.num_readers)
            undo.callback(cache.close)
            cache.warm(plan.start.keys, progress)
            thread = ComputeThread()
            undo.callback(thread.close)
            model = Model(plan, weights, cache, loaded_kernels, recorder, thread.check)
            guesses = _prefetch(plan, model, cache)
            tokenizer = load_tokenizer(pack)
            undo.pop_all()
        return cls(
            plan=plan,
            io_choice=io_choice,
            tokenizer=tokenizer,
            cache=cache,
            kernels=loaded_kernels,
            model=model,
            thread=thread,
            guesses=guesses,
            timings=Timings(),
            major_faults_before=_major_faults(),
            session=plan.start.session,
        )

    @property
    def budget(self) -> MemoryBudget:
        """Of the memory that the arithmetic works in."""
        return self.plan.tiers.compute

    def new_kv(self) -> KVCache:
        """An empty KV cache of this engine's context length."""
        plan = self.plan
        return KVCache(plan.config, plan.context_length, KV_DTYPES[plan.kv_dtype], self.model.device)

    def forward(self, token_ids: Sequence[int], kv: KVCache, *, all_logits: bool = False) -> Tensor:
        """Logits float32 [1, vocab], in RAM, after the last of `token_ids`, or [n, vocab] after each; kv moves on."""

        def compute() -> Tensor:
            hidden = self._hidden(token_ids, kv)
            return self._logits(hidden if all_logits else hidden[-1:]).cpu()

        return self.thread.run(compute)

    def hidden(self, token_ids: Sequence[int], kv: KVCache) -> Tensor:
        """Final hidden states float32 [n, hidden] of `token_ids`, which follow the cache's; kv moves on."""
        return self.thread.run(partial(self._hidden, token_ids, kv))

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits float32 [n, vocab] of final hidden states [n, hidden]."""
        return self.thread.run(partial(self._logits, hidden))

    def check_prompt(self, prompt_ids: Sequence[int]) -> None:
        """UsageError when a prompt is empty or does not fit."""
        if not prompt_ids:
            raise UsageError("the prompt has no tokens; this model has no start token, so give it some text")
        check_fit(len(prompt_ids), self.plan.context_length, self.plan.config.max_position_embeddings)

    def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, kv: KVCache | None = None
    ) -> Iterator[GeneratedToken]:
        """Yield tokens until an end-of-generation token, `max_tokens`, or a full context.

        The end token itself is not yielded. A `kv` from an earlier turn saves the prefix it shares with
        `prompt_ids`. Raises what check_prompt() raises.
        """
        self.check_prompt(prompt_ids)
        kv = kv if kv is not None else self.thread.run(self.new_kv)
        known = self.thread.run(partial(kv.keep_prefix, prompt_ids[:-1]))
        sampler = Sampler(params)
        past = list(prompt_ids)
        pending: Sequence[int] = prompt_ids[known:]
        for _ in range(params.max_tokens):
            if kv.num_tokens + len(pending) > kv.context_length and len(past) > len(prompt_ids):
                return
            logits = self.forward(pending, kv)[0]
            token_id = sampler.sample(logits, past)
            if token_id in self.tokenizer.eog_ids and not params.ignore_eos:
                return
            yield GeneratedToken.of(token_id, logits, params.logprobs)
            past.append(token_id)
            pending = [token_id]

    def stats(self) -> RunStats:
        """What this engine used and did since it was loaded."""
        plan, tiers, store = self.plan, self.plan.tiers, self.cache.store
        return RunStats(
            architecture=plan.pack.manifest.architecture,
            kernels=self.kernels.name,
            store=store.name,
            policy=self.cache.policy_name,
            num_threads=plan.num_threads,
            context_length=plan.context_length,
            device=tiers.device,
            ram_nbytes=(tiers.ram or tiers.compute).total_nbytes,
            vram_nbytes=tiers.compute.total_nbytes if tiers.ram is not None else None,
            expert_slots_nbytes=self.budget.experts_nbytes,
            ram_tier_nbytes=tiers.ram.experts_nbytes if tiers.ram is not None else 0,
            io_reason=self.io_choice.reason,
            num_readers=self.io_choice.num_readers,
            **asdict(self.timings),
            hits=self.cache.hits,
            misses=self.cache.misses,
            ram_hits=store.ram.hits if isinstance(store, DeviceStore) else 0,
            evictions=self.cache.evictions,
            experts_warmed=self.cache.warmed,
            bytes_read=self.cache.bytes_read,
            read_s=self.cache.read_s,
            drive_s=self.cache.drive_s,
            prefetch=plan.guessing.name,
            guessed=self.guesses.guessed,
            guesses_needed=self.guesses.needed,
            guesses_right=self.guesses.right,
            useful_guesses=self.cache.useful_guesses,
            wasted_guesses=self.cache.wasted_guesses,
            major_faults=_major_faults() - self.major_faults_before,
            peak_rss_nbytes=peak_resident_nbytes(),
        )

    def close(self) -> None:
        """Free the experts' memory and join all threads; the engine is of no use afterwards.

        Raises StorageError when it was to keep the session for the next start and cannot. Does nothing in a fork of
        the process that loaded it.
        """
        if not self.thread.is_here:
            return
        self.thread.close()  # an interrupt of it leaves the memory that it works in as it is
        try:
            if self.session is not None:
                session, self.session = self.session, None
                session.save(self.cache.retire())
        finally:
            self.cache.close()
            self.kernels.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.session = None  # whatever is wrong, it is not what the next start should be like
        self.close()

    def _hidden(self, token_ids: Sequence[int], kv: KVCache) -> Tensor:
        self._check_ids(token_ids)
        kv.require(len(token_ids))
        timed = self.timings.timed(len(token_ids), self.cache, follows=kv.num_tokens > 0)
        with timed, torch.inference_mode():
            chunks = [
                self.model.forward(token_ids[first : first + PREFILL_CHUNK], kv)
                for first in range(0, len(token_ids), PREFILL_CHUNK)
            ]
        return torch.cat(chunks)

    def _logits(self, hidden: Tensor) -> Tensor:
        with torch.inference_mode():
            return self.model.logits(hidden)

    def _check_ids(self, token_ids: Sequence[int]) -> None:
        vocab_size = self.plan.config.vocab_size
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise UsageError(f"token id {token_id} is outside of the vocabulary of {vocab_size}")


def _open_store(
    plan: RunPlan, io_choice: IoChoice, *, verify: bool, progress: Callable[[int], None]
) -> ExpertStore:
    pack, tiers = plan.pack, plan.tiers
    if tiers.ram is None:
        return open_store(io_choice.store, pack, tiers.compute, verify=verify, progress=progress)
    copies, make_policy = plan.device.open_copies(), plan.policy.make
    return DeviceStore.open(
        pack, tiers.compute, tiers.ram, make_policy, copies, verify=verify, progress=progress
    )


def _prefetch(plan: RunPlan, model: Model, cache: ExpertCache) -> GuessCounts:
    """Let the model guess as planned; the counts of what it will guess."""
    if plan.guessing.name == "off":
        return GuessCounts()
    prefetcher = Prefetcher(cache, plan.pack.manifest.layers, plan.guessing.transitions)
    model.prefetch_with(prefetcher)
    return prefetcher.counts


def _major_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt

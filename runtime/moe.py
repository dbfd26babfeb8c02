"""The feed-forward half of a layer: routed experts through the cache, shared experts, or a dense SwiGLU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from profiles.prefill_order import prefill_order
from runtime.kernels.kernels import ExpertRows

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from profiles.routing_recorder import RoutingRecorder
    from runtime.expert_cache import ExpertCache
    from runtime.kernels.kernels import Kernels
    from runtime.kernels.operations import Operations, T
    from runtime.kernels.weight import Weight
    from runtime.prefetcher import Prefetcher
    from runtime.router import Router


class FeedForward(Protocol):
    """[n, hidden] -> [n, hidden] of n normalised inputs."""

    def __call__(self, ops: Operations[T], x: T, num_tokens: int) -> T: ...


@dataclass(frozen=True, slots=True)
class SwiGLU:
    """down(silu(gate(x)) * up(x)) (Shazeer 2020, eq. 6), for dense layers and shared experts."""

    gate: Weight  # [intermediate, hidden]
    up: Weight
    down: Weight  # [hidden, intermediate]

    def __call__(self, ops: Operations[T], x: T, num_tokens: int) -> T:
        return ops.linear(ops.swiglu(ops.linear(x, self.gate), ops.linear(x, self.up)), self.down)


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An expert that every token uses, scaled by a sigmoid gate where the family has one."""

    swiglu: SwiGLU
    gate_inp: Weight | None  # [1, hidden]

    def __call__(self, ops: Operations[T], x: T, num_tokens: int) -> T:
        result = self.swiglu(ops, x, num_tokens)
        return result if self.gate_inp is None else ops.gated(result, ops.linear(x, self.gate_inp))


class MoE:
    """Routed experts of one layer, fetched through the ExpertCache, in waves when they do not fit at once."""

    def __init__(
        self,
        layer: int,
        gate_inp: Weight,  # [num_experts, hidden]
        router: Router,
        shared_expert: SharedExpert | None,
        cache: ExpertCache,
        kernels: Kernels,
        recorder: RoutingRecorder | None,
        check: Callable[[], None],  # raises when the computation is to end
    ) -> None:
        self.layer = layer
        self.gate_inp = gate_inp
        self.router = router
        self.shared_expert = shared_expert
        self.cache = cache
        self.kernels = kernels
        self.recorder = recorder
        self.check = check
        self.prefetcher: Prefetcher | None = None
        self.following: MoE | None = None  # whose router is asked about this block's input, for a guess
        self.hits_first = True  # False computes when all have arrived: benchmarks/overlap.py tells the gain

    def __call__(self, ops: Operations[T], x: T, num_tokens: int) -> T:
        topk_ids, topk_weights = ops.route(ops.linear(x, self.gate_inp), self.router)
        shape = (num_tokens, self.router.top_k, self.gate_inp.shape[1])
        inputs: tuple[T, ...] = (x, topk_ids, topk_weights)
        if self.following is not None and num_tokens == 1:
            guess, _ = ops.route(ops.linear(x, self.following.gate_inp), self.following.router)
            inputs = (*inputs, guess)
        outputs = ops.host(self.routed, inputs, shape)
        mixed = ops.mix(outputs, topk_weights)
        if self.shared_expert is not None:
            mixed = ops.add(mixed, self.shared_expert(ops, x, num_tokens))
        return mixed

    def routed(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, guess: Tensor | None = None
    ) -> Tensor:
        """The chosen experts' outputs: [n, hidden] and [n, top_k] -> [n, top_k, hidden].

        `guess` [1, top_k] are the experts that the following block may choose for one token, the likeliest first.
        """
        self.check()
        if self.recorder is not None:
            self.recorder.on_select(self.layer, topk_ids.cpu().numpy(), topk_weights.cpu().numpy())
        if len(topk_ids) == 1:
            return self._decode(x, topk_ids[0].tolist(), None if guess is None else guess[0].tolist())[None]
        return self._prefill(x, topk_ids)

    def _decode(self, x: Tensor, experts: list[int], guess: list[int] | None) -> Tensor:
        """One token's: [1, hidden] -> [top_k, hidden]; those that are resident first, the others as they are read."""
        bank = self.cache.bank(self.layer)
        # Here, because torch gives the interpreter away while it allocates: readers that were just started take it.
        outputs = x.new_empty(len(experts), x.shape[1])
        if self.prefetcher is not None:
            fetch = self.prefetcher.begin(self.layer, experts, guess)
        else:
            fetch = self.cache.begin(self.layer, experts)
        if not self.hits_first:
            fetch.wait()
        if not fetch.missing:
            return self.kernels.expert_ffn(x, [fetch.slots], bank)[0]
        for arrived in fetch.arrivals():
            slots = [fetch.slots[position] for position in arrived]
            outputs[arrived] = self.kernels.expert_ffn(x, [slots], bank)[0]
        return outputs

    def _prefill(self, x: Tensor, topk_ids: Tensor) -> Tensor:
        """Each expert fetched once, in waves of what fits: [n, hidden] -> [n, top_k, hidden].

        Few tokens whose experts are all resident are computed at once, others expert by expert.
        """
        cache, bank, top_k = self.cache, self.cache.bank(self.layer), topk_ids.shape[1]
        needed = prefill_order(topk_ids.cpu().numpy())
        capacity = cache.capacity(self.layer)
        at_once = len(needed) <= capacity and self.kernels.computes_at_once(topk_ids.numel(), bank)
        chosen = topk_ids.flatten()
        ends = torch.bincount(chosen).cumsum(0).cpu()
        places = chosen.argsort(stable=True).tensor_split(ends[:-1])  # of each expert, in [n * top_k]
        outputs = x.new_empty(len(chosen), x.shape[1])
        for first in range(0, len(needed), capacity):
            experts = needed[first : first + capacity]
            fetch = cache.begin(self.layer, experts)
            if at_once and not fetch.missing:
                slots = dict(zip(experts, fetch.slots, strict=True))
                return self.kernels.expert_ffn(
                    x, [[slots[e] for e in row] for row in topk_ids.tolist()], bank
                )
            if not self.hits_first:
                fetch.wait()
            work = (
                ExpertRows(fetch.slots[position], places[expert] // top_k, places[expert])
                for arrived in fetch.arrivals()
                for position in arrived
                for expert in [experts[position]]
            )
            self.kernels.expert_ffns(x, work, bank, outputs)
        return outputs.view(-1, top_k, x.shape[1])

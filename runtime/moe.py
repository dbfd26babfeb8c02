"""The feed-forward half of a layer: routed experts through the cache, shared experts, or a dense SwiGLU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from runtime.kernels.kernels import ExpertRows
from runtime.kernels.operations import T

if TYPE_CHECKING:
    from torch import Tensor

    from profiles.routing_recorder import RoutingRecorder
    from runtime.expert_cache import ExpertCache
    from runtime.kernels.kernels import Kernels
    from runtime.kernels.operations import Operations
    from runtime.kernels.rms_norm import RMSNorm
    from runtime.kernels.weight import Weight
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
    ) -> None:
        self.layer = layer
        self.gate_inp = gate_inp
        self.router = router
        self.shared_expert = shared_expert
        self.cache = cache
        self.kernels = kernels
        self.recorder = recorder

    def __call__(self, ops: Operations[T], x: T, num_tokens: int) -> T:
        topk_ids, topk_weights = ops.route(ops.linear(x, self.gate_inp), self.router)
        shape = (num_tokens, self.router.top_k, self.gate_inp.shape[1])
        outputs = ops.host(self.routed, (x, topk_ids, topk_weights), shape)
        mixed = ops.mix(outputs, topk_weights)
        if self.shared_expert is not None:
            mixed = ops.add(mixed, self.shared_expert(ops, x, num_tokens))
        return mixed

    def routed(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """The chosen experts' outputs: [n, hidden] and [n, top_k] -> [n, top_k, hidden]."""
        if self.recorder is not None:
            self.recorder.on_select(self.layer, topk_ids.cpu().numpy(), topk_weights.cpu().numpy())
        if len(topk_ids) == 1:
            slots = self.cache.fetch(self.layer, topk_ids[0].tolist())
            return self.kernels.expert_ffn(x, slots, self.cache.bank(self.layer))[None]
        return self._prefill(x, topk_ids)

    def _prefill(self, x: Tensor, topk_ids: Tensor) -> Tensor:
        """Expert by expert, each fetched once, in waves of what fits."""
        cache, bank, top_k = self.cache, self.cache.bank(self.layer), topk_ids.shape[1]
        places = topk_ids.flatten().argsort(stable=True)  # in [n * top_k], expert by expert
        needed, counts = topk_ids.unique(return_counts=True)
        places_of = dict(zip(needed.tolist(), places.split(counts.tolist()), strict=True))
        outputs = x.new_empty(len(places), x.shape[1])
        for wave in needed.split(cache.capacity(self.layer)):
            experts = wave.tolist()
            work = [
                ExpertRows(slot, places_of[expert] // top_k, places_of[expert])
                for expert, slot in zip(experts, cache.fetch(self.layer, experts), strict=True)
            ]
            self.kernels.expert_ffns(x, work, bank, outputs)
        return outputs.view(-1, top_k, x.shape[1])

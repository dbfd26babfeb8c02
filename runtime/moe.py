"""The feed-forward half of a layer: routed experts through the cache, shared experts, or a dense SwiGLU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

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
        router_logits = ops.linear(x, self.gate_inp)
        mixed = ops.host(self.routed, (x, router_logits), (num_tokens, self.gate_inp.shape[1]))
        if self.shared_expert is not None:
            mixed = ops.add(mixed, self.shared_expert(ops, x, num_tokens))
        return mixed

    def routed(self, x: Tensor, router_logits: Tensor) -> Tensor:
        """The chosen experts' outputs, weighted and summed: [n, hidden] and [n, num_experts] -> [n, hidden]."""
        topk_ids, topk_weights = self.router(router_logits)
        if self.recorder is not None:
            self.recorder.on_select(
                self.layer, topk_ids.to(torch.int32).cpu().numpy(), topk_weights.cpu().numpy()
            )
        outputs = self._outputs(x, topk_ids)
        return torch.bmm(topk_weights.unsqueeze(1), outputs).squeeze(1)

    def _outputs(self, x: Tensor, topk_ids: Tensor) -> Tensor:
        """Each chosen expert's output: [n, top_k, hidden]."""
        cache, bank = self.cache, self.cache.bank(self.layer)
        if len(topk_ids) == 1:
            slots = cache.fetch(self.layer, topk_ids[0].tolist())
            return self.kernels.expert_ffn(x, slots, bank).transpose(0, 1)
        top_k = topk_ids.shape[1]
        places = topk_ids.flatten().argsort(stable=True)  # of each expert's tokens in [n * top_k], expert by expert
        needed, counts = topk_ids.unique(return_counts=True)
        places_of = dict(zip(needed.tolist(), places.split(counts.tolist()), strict=True))
        outputs = x.new_empty(len(places), x.shape[1])
        for wave in needed.split(cache.capacity(self.layer)):
            experts = wave.tolist()
            for expert, slot in zip(experts, cache.fetch(self.layer, experts), strict=True):
                chosen = places_of[expert]
                outputs[chosen] = self.kernels.expert_ffn(x[chosen // top_k], [slot], bank)[0]
        return outputs.view(-1, top_k, x.shape[1])

"""The feed-forward half of a layer: routed experts through the cache, shared experts, or a dense SwiGLU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from profiles.routing_recorder import RoutingRecorder
    from runtime.expert_cache import ExpertCache
    from runtime.kernels.kernels import Kernels
    from runtime.kernels.rms_norm import RMSNorm
    from runtime.kernels.weight import Weight
    from runtime.router import Router


class FeedForward(Protocol):
    """[n, hidden] -> [n, hidden]."""

    def __call__(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class SwiGLU:
    """down(silu(gate(x)) * up(x)) of the normalised input (Shazeer 2020), for dense layers and shared experts."""

    norm: RMSNorm
    gate: Weight  # [intermediate, hidden]
    up: Weight
    down: Weight  # [hidden, intermediate]
    kernels: Kernels

    def __call__(self, x: Tensor) -> Tensor:
        return self.kernels.feed_forward(x, self.gate, self.up, self.down, self.norm)


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An expert that every token uses, scaled by a sigmoid gate where the family has one."""

    swiglu: SwiGLU
    gate_inp: Weight | None  # [1, hidden]

    def __call__(self, x: Tensor) -> Tensor:
        if self.gate_inp is None:
            return self.swiglu(x)
        (logit,) = self.swiglu.kernels.linear(x, (self.gate_inp,), self.swiglu.norm)
        scale = logit.sigmoid()
        return self.swiglu(x) * scale


class MoE:
    """Routed experts of one layer, fetched through the ExpertCache, in waves when they do not fit at once."""

    def __init__(
        self,
        layer: int,
        norm: RMSNorm,
        gate_inp: Weight,  # [num_experts, hidden]
        router: Router,
        shared_expert: SharedExpert | None,
        cache: ExpertCache,
        kernels: Kernels,
        recorder: RoutingRecorder | None,
    ) -> None:
        self.layer = layer
        self.norm = norm
        self.gate_inp = gate_inp
        self.router = router
        self.shared_expert = shared_expert
        self.cache = cache
        self.kernels = kernels
        self.recorder = recorder

    def __call__(self, x: Tensor) -> Tensor:
        (router_logits,) = self.kernels.linear(x, (self.gate_inp,), self.norm)
        topk_ids, topk_weights = self.router(router_logits)
        if self.recorder is not None:
            self.recorder.on_select(
                self.layer, topk_ids.to(torch.int32).cpu().numpy(), topk_weights.cpu().numpy()
            )
        expert_outputs = self._routed(x, topk_ids)
        mixed = torch.bmm(topk_weights.unsqueeze(1), expert_outputs).squeeze(1)
        if self.shared_expert is not None:
            mixed = mixed + self.shared_expert(x)
        return mixed

    def _routed(self, x: Tensor, topk_ids: Tensor) -> Tensor:
        """Each chosen expert's output: [n, top_k, hidden]."""
        cache, bank = self.cache, self.cache.bank(self.layer)
        if len(topk_ids) == 1:
            slots = torch.tensor([cache.fetch(self.layer, topk_ids[0].tolist())], dtype=torch.int32)
            return self.kernels.expert_ffn(x, slots, bank, self.norm)
        needed = torch.unique(topk_ids)
        wave_length = cache.capacity(self.layer)
        if len(needed) <= wave_length:
            return self.kernels.expert_ffn(x, self._slots(needed, topk_ids), bank, self.norm)
        outputs = x.new_empty(*topk_ids.shape, x.shape[1])
        for wave in torch.split(needed, wave_length):
            tokens, ranks = torch.isin(topk_ids, wave).nonzero(as_tuple=True)
            slots = self._slots(wave, topk_ids[tokens, ranks, None])
            outputs[tokens, ranks] = self.kernels.expert_ffn(x[tokens], slots, bank, self.norm).squeeze(1)
        return outputs

    def _slots(self, needed: Tensor, topk_ids: Tensor) -> Tensor:
        """Fetch the needed experts (sorted) and translate ids into their slots, int32 of topk_ids' shape."""
        slots = torch.tensor(self.cache.fetch(self.layer, needed.tolist()), dtype=torch.int32)
        return slots.to(topk_ids.device)[torch.searchsorted(needed, topk_ids)]

"""A decoder-only transformer, built from a pack's tensors and its family's declaration."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

import torch

from runtime.attention import Attention
from runtime.kernels.rms_norm import RMSNorm
from runtime.moe import MoE, SharedExpert, SwiGLU
from runtime.rope import Rope
from runtime.router import Router
from runtime.step import Step

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from profiles.routing_recorder import RoutingRecorder
    from runtime.dense_weights import DenseWeights
    from runtime.expert_cache import ExpertCache
    from runtime.kernels.kernels import Kernels
    from runtime.kernels.operations import Operations, T
    from runtime.kernels.weight import Weight
    from runtime.kv_cache import KVCache
    from runtime.moe import FeedForward
    from runtime.prefetcher import Prefetcher
    from runtime.run_plan import RunPlan


@dataclass(frozen=True, slots=True)
class Layer:
    """x + attention(x), then x + feed_forward(norm(x)); attention normalises its input itself."""

    attention: Attention
    norm: RMSNorm
    feed_forward: FeedForward

    def __call__(self, ops: Operations[T], x: T, rope: Rope, step: Step) -> T:
        x = ops.add(x, self.attention(ops, x, rope, step))
        return ops.add(x, self.feed_forward(ops, ops.norm(x, self.norm), step.num_tokens))


class Model:
    """Token ids -> logits; the experts come through the cache it was built with."""

    def __init__(
        self,
        plan: RunPlan,
        weights: DenseWeights,
        cache: ExpertCache,
        kernels: Kernels,
        recorder: RoutingRecorder | None,
        check: Callable[[], None],
    ) -> None:
        config = self.config = plan.config
        self.check = check
        self.kernels = kernels
        self.embedding = weights.matrix("token_embd.weight")
        self.device = weights.device
        self.output_norm = RMSNorm(weights.vector("output_norm.weight"), config.rms_norm_eps)
        self.output = (
            kernels.prepare(weights.matrix("output.weight")) if "output.weight" in weights else self.embedding
        )
        self.rope = Rope(
            config,
            plan.context_length,
            weights.optional_vector("rope_freqs.weight"),
            weights.device,
        )
        build = _LayerBuilder(plan, weights, cache, kernels, recorder, check)
        self.layers = [build.layer(layer) for layer in range(config.num_hidden_layers)]

    @property
    def moes(self) -> list[MoE]:
        """The MoE blocks in the order they run."""
        blocks = (layer.feed_forward for layer in self.layers)
        return [block for block in blocks if isinstance(block, MoE)]

    def prefetch_with(self, prefetcher: Prefetcher) -> None:
        """Let single tokens fetch their experts through a prefetcher; before the first forward()."""
        for moe, following in zip_longest(self.moes, self.moes[1:]):
            moe.prefetcher = prefetcher
            moe.following = None if prefetcher.transitions is not None else following

    def forward(self, token_ids: Sequence[int], kv: KVCache) -> Tensor:
        """Final hidden states float32 [n, hidden] of the n tokens that follow the cache's; kv moves on."""
        self.check()
        step = Step(kv, len(token_ids), self.config.sliding_window)
        ids = torch.tensor(token_ids, dtype=torch.int32, device=self.device)
        hidden = self.kernels.run(self.body, ids, step=step).clone()
        kv.advance(token_ids)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits float32 [n, vocab] of final hidden states [n, hidden]."""
        return self.kernels.run(self.head, hidden).clone()

    def body(self, ops: Operations[T], inputs: tuple[T, ...], step: Step | None) -> T:
        """Token ids -> final hidden states."""
        assert step is not None
        (token_ids,) = inputs
        x = ops.embed(self.embedding, token_ids)
        for layer in self.layers:
            x = layer(ops, x, self.rope, step)
        return x

    def head(self, ops: Operations[T], inputs: tuple[T, ...], step: Step | None) -> T:
        """Final hidden states -> logits."""
        (hidden,) = inputs
        return ops.linear(ops.norm(hidden, self.output_norm), self.output)


@dataclass(frozen=True, slots=True)
class _LayerBuilder:
    """Finds a layer's tensors by their canonical names, in the order that the blocks expect."""

    plan: RunPlan
    weights: DenseWeights
    cache: ExpertCache
    kernels: Kernels
    recorder: RoutingRecorder | None
    check: Callable[[], None]

    def layer(self, layer: int) -> Layer:
        name = f"blk.{layer}"
        moe = any(entry.layer == layer for entry in self.plan.pack.manifest.layers)
        return Layer(
            attention=self._attention(layer, name),
            norm=self._norm(f"{name}.ffn_norm.weight"),
            feed_forward=self._moe(layer, name) if moe else self._swiglu(name, ""),
        )

    def _attention(self, layer: int, name: str) -> Attention:
        weights = self.weights
        config = self.plan.config
        return Attention(
            layer,
            config.head_dim,
            norm=self._norm(f"{name}.attn_norm.weight"),
            q=self._rotated(f"{name}.attn_q.weight", config.num_attention_heads),
            k=self._rotated(f"{name}.attn_k.weight", config.num_key_value_heads),
            v=self._matrix(f"{name}.attn_v.weight"),
            output=self._matrix(f"{name}.attn_output.weight"),
            q_bias=weights.optional_vector(f"{name}.attn_q.bias"),
            k_bias=weights.optional_vector(f"{name}.attn_k.bias"),
            v_bias=weights.optional_vector(f"{name}.attn_v.bias"),
            output_bias=weights.optional_vector(f"{name}.attn_output.bias"),
            q_norm=self._optional_norm(f"{name}.attn_q_norm.weight"),
            k_norm=self._optional_norm(f"{name}.attn_k_norm.weight"),
        )

    def _rotated(self, name: str, num_heads: int) -> Weight:
        weight = self.weights.matrix(name)
        if self.plan.family.gguf_permutes_qk and self.plan.pack.manifest.source.kind == "gguf":
            weight = weight.unpaired(num_heads)
        return self.kernels.prepare(weight)

    def _matrix(self, name: str) -> Weight:
        return self.kernels.prepare(self.weights.matrix(name))

    def _moe(self, layer: int, name: str) -> MoE:
        shared_expert = None
        if f"{name}.ffn_gate_shexp.weight" in self.weights:
            gate_inp = f"{name}.ffn_gate_inp_shexp.weight"
            shared_expert = SharedExpert(
                self._swiglu(name, "_shexp"),
                self.weights.router(gate_inp) if gate_inp in self.weights else None,
            )
        return MoE(
            layer,
            self.weights.router(f"{name}.ffn_gate_inp.weight"),
            Router(self.plan.config.num_experts_per_tok, self.plan.config.norm_topk_prob),
            shared_expert,
            self.cache,
            self.kernels,
            self.recorder,
            self.check,
        )

    def _swiglu(self, name: str, suffix: str) -> SwiGLU:
        gate, up, down = (
            self._matrix(f"{name}.ffn_{projection}{suffix}.weight") for projection in ("gate", "up", "down")
        )
        return SwiGLU(gate, up, down)

    def _norm(self, name: str) -> RMSNorm:
        return RMSNorm(self.weights.vector(name), self.plan.config.rms_norm_eps)

    def _optional_norm(self, name: str) -> RMSNorm | None:
        return self._norm(name) if name in self.weights else None

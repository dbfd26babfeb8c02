"""A decoder-only transformer, built from a pack's tensors and its family's declaration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from runtime.attention import Attention, AttentionWeights
from runtime.kernels.rms_norm import RMSNorm
from runtime.moe import MoE, SharedExpert, SwiGLU
from runtime.rope import Rope
from runtime.router import Router

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from lmpack.manifest import Manifest
    from profiles.routing_recorder import RoutingRecorder
    from runtime.dense_weights import DenseWeights
    from runtime.expert_cache import ExpertCache
    from runtime.families.family import Family
    from runtime.kernels.kernels import Kernels
    from runtime.kernels.weight import Weight
    from runtime.kv_cache import KVCache
    from runtime.model_config import ModelConfig
    from runtime.moe import FeedForward


@dataclass(frozen=True, slots=True)
class Layer:
    """x + attention(x), then x + feed_forward(x); both normalise their input first."""

    attention: Attention
    feed_forward: FeedForward


class Model:
    """Token ids -> logits; the experts come through the cache it was built with."""

    def __init__(
        self,
        manifest: Manifest,
        family: Family,
        config: ModelConfig,
        weights: DenseWeights,
        cache: ExpertCache,
        kernels: Kernels,
        recorder: RoutingRecorder | None,
        context_length: int,
    ) -> None:
        self.config = config
        self.kernels = kernels
        self.embedding = weights.matrix("token_embd.weight")
        self.device = weights.device
        self.output_norm = RMSNorm(weights.vector("output_norm.weight"), config.rms_norm_eps)
        self.output = weights.optional_matrix("output.weight") or self.embedding
        self.rope = Rope(
            config,
            context_length,
            weights.optional_vector("rope_freqs.weight"),
            weights.device,
        )
        build = _LayerBuilder(manifest, family, config, weights, cache, kernels, recorder)
        self.layers = [build.layer(layer) for layer in range(config.num_hidden_layers)]

    def forward(self, token_ids: Sequence[int], kv: KVCache) -> Tensor:
        """Final hidden states float32 [n, hidden] of the n tokens that follow the cache's; kv moves on."""
        x = self.kernels.embed(self.embedding, torch.tensor(token_ids, device=self.device)).clone()
        for layer in self.layers:
            x = x + layer.attention(x, kv, self.rope)
            x = x + layer.feed_forward(x)
        kv.advance(token_ids)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits float32 [n, vocab] of final hidden states [n, hidden]."""
        (logits,) = self.kernels.linear(hidden, (self.output,), self.output_norm)
        return logits.clone()


class _LayerBuilder:
    """Finds a layer's tensors by their canonical names, in the order that the blocks expect."""

    def __init__(
        self,
        manifest: Manifest,
        family: Family,
        config: ModelConfig,
        weights: DenseWeights,
        cache: ExpertCache,
        kernels: Kernels,
        recorder: RoutingRecorder | None,
    ) -> None:
        self.permuted_qk = family.gguf_permutes_qk and manifest.source.kind == "gguf"
        self.moe_layers = {entry.layer for entry in manifest.layers}
        self.config = config
        self.weights = weights
        self.cache = cache
        self.kernels = kernels
        self.recorder = recorder

    def layer(self, layer: int) -> Layer:
        name = f"blk.{layer}"
        norm = self._norm(f"{name}.ffn_norm.weight")
        moe = layer in self.moe_layers
        return Layer(
            attention=self._attention(layer, name),
            feed_forward=self._moe(layer, name, norm) if moe else self._swiglu(name, "", norm),
        )

    def _attention(self, layer: int, name: str) -> Attention:
        weights = self.weights
        return Attention(
            layer,
            self.config,
            AttentionWeights(
                norm=self._norm(f"{name}.attn_norm.weight"),
                q=self._rotated(f"{name}.attn_q.weight", self.config.num_attention_heads),
                k=self._rotated(f"{name}.attn_k.weight", self.config.num_key_value_heads),
                v=weights.matrix(f"{name}.attn_v.weight"),
                output=weights.matrix(f"{name}.attn_output.weight"),
                q_bias=weights.optional_vector(f"{name}.attn_q.bias"),
                k_bias=weights.optional_vector(f"{name}.attn_k.bias"),
                v_bias=weights.optional_vector(f"{name}.attn_v.bias"),
                output_bias=weights.optional_vector(f"{name}.attn_output.bias"),
                q_norm=weights.optional_vector(f"{name}.attn_q_norm.weight"),
                k_norm=weights.optional_vector(f"{name}.attn_k_norm.weight"),
            ),
            self.kernels,
        )

    def _rotated(self, name: str, num_heads: int) -> Weight:
        weight = self.weights.matrix(name)
        return weight.unpaired(num_heads) if self.permuted_qk else weight

    def _moe(self, layer: int, name: str, norm: RMSNorm) -> MoE:
        shared_expert = None
        if f"{name}.ffn_gate_shexp.weight" in self.weights:
            gate_inp = f"{name}.ffn_gate_inp_shexp.weight"
            shared_expert = SharedExpert(
                self._swiglu(name, "_shexp", norm),
                self.weights.router(gate_inp) if gate_inp in self.weights else None,
            )
        return MoE(
            layer,
            norm,
            self.weights.router(f"{name}.ffn_gate_inp.weight"),
            Router(self.config.num_experts_per_tok, self.config.norm_topk_prob),
            shared_expert,
            self.cache,
            self.kernels,
            self.recorder,
        )

    def _swiglu(self, name: str, suffix: str, norm: RMSNorm) -> SwiGLU:
        gate, up, down = (
            self.weights.matrix(f"{name}.ffn_{projection}{suffix}.weight")
            for projection in ("gate", "up", "down")
        )
        return SwiGLU(norm, gate, up, down, self.kernels)

    def _norm(self, name: str) -> RMSNorm:
        return RMSNorm(self.weights.vector(name), self.config.rms_norm_eps)

"""What the runtime must know of a model: the manifest's `config`, checked once and typed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmpack.errors import ManifestError

if TYPE_CHECKING:
    from collections.abc import Mapping

_REQUIRED = object()


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched; factors and lengths as in HF's `rope_scaling`."""

    kind: str  # "linear" | "llama3" | "yarn" | ...
    factor: float
    original_max_position_embeddings: int
    low_freq_factor: float
    high_freq_factor: float


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and switches of a decoder, in HF's words; lengths in elements, context in tokens."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_dim: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    rms_norm_eps: float
    vocab_size: int
    max_position_embeddings: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    sliding_window: int | None

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Type and check a manifest's `config`; raises ManifestError naming the key."""
        number = _Reader(config)
        heads = number.integer("num_attention_heads")
        hidden = number.integer("hidden_size")
        head_dim = number.integer("head_dim", hidden // heads)
        return cls(
            num_hidden_layers=number.integer("num_hidden_layers"),
            hidden_size=hidden,
            num_attention_heads=heads,
            num_key_value_heads=number.integer("num_key_value_heads", heads),
            head_dim=head_dim,
            rope_dim=number.integer("rope_dim", head_dim),
            rope_theta=number.real("rope_theta", 10000.0),
            rope_scaling=_rope_scaling(number),
            rms_norm_eps=number.real("rms_norm_eps"),
            vocab_size=number.integer("vocab_size"),
            max_position_embeddings=number.integer("max_position_embeddings"),
            num_experts_per_tok=number.integer("num_experts_per_tok", 0),
            norm_topk_prob=bool(config.get("norm_topk_prob", False)),
            sliding_window=number.integer("sliding_window", 0) or None,
        )


class _Reader:
    """Typed look-ups in a manifest's config."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    def integer(self, key: str, default: object = _REQUIRED) -> int:
        found = self._get(key, default)
        if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found < 1 << 40:
            raise ManifestError(f"config.{key}: {found!r} is not a count; convert the checkpoint again")
        return found

    def real(self, key: str, default: object = _REQUIRED) -> float:
        found = self._get(key, default)
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise ManifestError(f"config.{key}: {found!r} is not a number; convert the checkpoint again")
        return float(found)

    def _get(self, key: str, default: object) -> object:
        found = self.config.get(key, default)
        if found is _REQUIRED:
            raise ManifestError(f"config.{key} is missing; the source checkpoint does not say it")
        return found


def _rope_scaling(number: _Reader) -> RopeScaling | None:
    kind = number.config.get("rope_scaling_type")
    if kind in (None, "none", "default"):
        return None
    return RopeScaling(
        kind=str(kind),
        factor=number.real("rope_scaling_factor", 1.0),
        original_max_position_embeddings=number.integer("rope_scaling_original_max_position_embeddings", 0),
        low_freq_factor=number.real("rope_scaling_low_freq_factor", 1.0),
        high_freq_factor=number.real("rope_scaling_high_freq_factor", 4.0),
    )

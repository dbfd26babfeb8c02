"""Rotary positions against transformers' own functions."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from lmpack.errors import UnsupportedError
from runtime.model_config import ModelConfig
from runtime.rope import Rope

HEADS, HEAD_DIM = 4, 32


def model_config(**extra: object) -> ModelConfig:
    return ModelConfig.parse(
        {
            "num_hidden_layers": 1,
            "hidden_size": HEADS * HEAD_DIM,
            "num_attention_heads": HEADS,
            "rms_norm_eps": 1e-6,
            "vocab_size": 16,
            "max_position_embeddings": 256,
            "rope_theta": 10000.0,
            **extra,
        }
    )


def rotate(config: ModelConfig, heads: torch.Tensor, start: int, **extra: object) -> torch.Tensor:
    options = {"frequency_factors": None, **extra}
    return Rope(config, num_positions=256, device=torch.device("cpu"), **options)(heads, start)  # type: ignore[arg-type]


def heads_of(n: int) -> torch.Tensor:
    return torch.randn(n, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(0))


def transformers_rotate(heads: torch.Tensor, start: int, rope: dict[str, object]) -> torch.Tensor:
    config = LlamaConfig(
        hidden_size=HEADS * HEAD_DIM,
        num_attention_heads=HEADS,
        max_position_embeddings=256,
        rope_parameters={"rope_theta": 10000.0, **rope},
    )
    positions = torch.arange(start, start + len(heads))[None]
    cos, sin = LlamaRotaryEmbedding(config)(heads, positions)
    batch = heads.transpose(0, 1)[None]
    rotated, _ = apply_rotary_pos_emb(batch, batch, cos, sin)
    return torch.as_tensor(rotated[0].transpose(0, 1))


@pytest.mark.parametrize("start", [0, 100])
def test_rotation_in_halves_is_transformers_rotation(start: int) -> None:
    heads = heads_of(20)
    expected = transformers_rotate(heads, start, {"rope_type": "default"})
    torch.testing.assert_close(rotate(model_config(), heads, start), expected, atol=2e-6, rtol=0)


def test_llama3_and_linear_scaling_are_transformers() -> None:
    heads = heads_of(200)
    for kind in ("linear", "llama3"):
        parameters: dict[str, object] = {"factor": 8.0}
        if kind == "llama3":
            parameters |= {
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        flat = {f"rope_scaling_{name}": value for name, value in parameters.items()}
        config = model_config(rope_scaling_type=kind, **flat)
        expected = transformers_rotate(heads, 0, {"rope_type": kind, **parameters})
        torch.testing.assert_close(rotate(config, heads, 0), expected, atol=2e-5, rtol=0)


def test_only_rope_dim_elements_are_rotated() -> None:
    heads = heads_of(10)
    rotated = rotate(model_config(rope_dim=16), heads, 3)
    assert torch.equal(rotated[..., 16:], heads[..., 16:])
    assert not torch.allclose(rotated[..., :16], heads[..., :16])


def test_frequency_factors_divide_the_frequencies() -> None:
    heads = heads_of(10)
    doubled = rotate(model_config(), heads, 0, frequency_factors=torch.full((HEAD_DIM // 2,), 2.0))
    linear = rotate(model_config(rope_scaling_type="linear", rope_scaling_factor=2.0), heads, 0)
    torch.testing.assert_close(doubled, linear)


def test_an_unknown_scaling_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="longrope"):
        rotate(model_config(rope_scaling_type="longrope"), heads_of(1), 0)

"""Model configs: both containers of one model say the same, in Hugging Face's words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from converters.checkpoint import open_checkpoint
from converters.gguf_header import read_gguf_header
from converters.model_config import config_from_gguf, config_from_hf, hf_architecture
from converters.tensor_role import SharedTensor
from lmpack.errors import CheckpointError
from tests.gguf_fixtures import METADATA, gguf_bytes

if TYPE_CHECKING:
    from pathlib import Path

RUNTIME_FAMILIES = {
    "qwen3_moe": "qwen3moe",
    "qwen2_moe": "qwen2moe",
    "mixtral": "llama",
    "olmoe": "olmoe",
    "llama": "llama",
    "qwen3": "qwen3",
}
DENSE_FAMILIES = {"llama", "qwen3"}
NEEDED_KEYS = {
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rms_norm_eps",
    "rope_theta",
    "rope_dim",
    "max_position_embeddings",
    "tie_word_embeddings",
}
NEEDED_MOE_KEYS = {"num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"}


@pytest.mark.parametrize("family", RUNTIME_FAMILIES)
def test_both_containers_say_the_same(models_dir: Path, family: str) -> None:
    folder = models_dir / "families" / family
    gguf = open_checkpoint(folder / f"{family}-bf16.gguf").describe()
    hf = open_checkpoint(folder / "hf").describe()
    assert gguf.architecture == hf.architecture == RUNTIME_FAMILIES[family]
    both = gguf.config.keys() & hf.config.keys()
    assert {key: gguf.config[key] for key in both} == {key: hf.config[key] for key in both}
    assert both >= (NEEDED_KEYS if family in DENSE_FAMILIES else NEEDED_KEYS | NEEDED_MOE_KEYS)


@pytest.mark.parametrize("family", RUNTIME_FAMILIES)
def test_both_containers_name_the_same_shared_tensors(models_dir: Path, family: str) -> None:
    folder = models_dir / "families" / family
    gguf, hf = (
        {role.name for role in open_checkpoint(path).roles() if isinstance(role, SharedTensor)}
        for path in (folder / f"{family}-bf16.gguf", folder / "hf")
    )
    assert gguf - {"rope_freqs.weight"} == hf  # llama.cpp's converter computes rope_freqs


def gguf_config(metadata: dict[str, Any], shapes: dict[str, tuple[int, ...]] | None = None) -> dict[str, Any]:
    header = read_gguf_header(gguf_bytes(metadata=metadata))
    return dict(config_from_gguf(header, shapes or {}, where="m.gguf").config)


def test_what_gguf_leaves_out_follows_from_the_rest() -> None:
    shapes = {"token_embd.weight": (99, 32), "blk.0.ffn_down_exps.weight": (4, 32, 24)}
    config = gguf_config(METADATA, shapes)
    assert config["rms_norm_eps"] == 1e-6  # not 9.999999974752427e-07
    assert config["head_dim"] == config["rope_dim"] == 8
    assert config["num_key_value_heads"] == 4
    assert config["rope_theta"] == 10_000.0
    assert config["vocab_size"] == 99
    assert config["moe_intermediate_size"] == 24
    assert config["tie_word_embeddings"] is True
    assert "norm_topk_prob" not in config  # an unknown architecture: nobody knows
    assert gguf_config(METADATA, shapes | {"output.weight": (99, 32)})["tie_word_embeddings"] is False


def test_a_number_for_each_layer_is_one_number_when_all_are_equal() -> None:
    heads = {"tinymoe.attention.head_count_kv": np.array([2, 2], np.uint32)}
    assert gguf_config(METADATA | heads)["num_key_value_heads"] == 2
    heads = {"tinymoe.attention.head_count_kv": np.array([0, 2], np.uint32)}
    assert gguf_config(METADATA | heads)["num_key_value_heads"] == [0, 2]


def test_big_endian_files_are_marked() -> None:
    header = read_gguf_header(gguf_bytes(metadata=METADATA, endian="big"))
    assert config_from_gguf(header, {}, where="m.gguf").config["byte_order"] == "big"


def test_a_gguf_without_an_architecture_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"no general\.architecture"):
        gguf_config({"general.name": "x"})


BASE = {"model_type": "qwen3_moe", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"rope_theta": 5e5}, {"rope_theta": 5e5, "rope_dim": 16}),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, {"rope_theta": 1e6}),
        ({"rope_parameters": {"full_attention": {"rope_theta": 2e6}}}, {"rope_theta": 2e6}),
        ({"partial_rotary_factor": 0.5, "head_dim": 32}, {"rope_dim": 16}),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
         {"rope_scaling_type": "yarn", "rope_scaling_factor": 4.0,
          "rope_scaling_original_max_position_embeddings": 32}),
        ({"sliding_window": 4096, "use_sliding_window": True}, {"sliding_window": 4096}),
        ({"num_experts": 8}, {"norm_topk_prob": False}),
        ({"num_experts": 8, "norm_topk_prob": True}, {"norm_topk_prob": True}),
        ({"model_type": "mixtral", "num_local_experts": 8, "intermediate_size": 96},
         {"num_experts": 8, "norm_topk_prob": True, "moe_intermediate_size": 96}),
        ({"tie_word_embeddings": True}, {"tie_word_embeddings": True}),
        ({"text_config": {"hidden_size": 128}}, {"hidden_size": 128, "head_dim": 32}),
    ],
)  # fmt: skip
def test_config_json_is_translated(changes: dict[str, Any], wanted: dict[str, Any]) -> None:
    shapes = {"output.weight": (10, 64), "token_embd.weight": (10, 64)}
    config = config_from_hf(BASE | changes, shapes).config
    assert {key: config.get(key) for key in wanted} == wanted


@pytest.mark.parametrize(
    "changes",
    [{"sliding_window": None}, {"sliding_window": 0}, {"sliding_window": 4096, "use_sliding_window": False}],
)
def test_a_window_that_is_off_is_left_out(changes: dict[str, Any]) -> None:
    assert "sliding_window" not in config_from_hf(BASE | changes, {}).config


def test_embeddings_are_tied_when_there_is_no_head() -> None:
    assert config_from_hf(BASE, {"token_embd.weight": (10, 64)}).config["tie_word_embeddings"] is True
    assert config_from_hf(BASE, {"lm_head.weight": (10, 64)}).config["tie_word_embeddings"] is False


def test_an_infinite_number_counts_as_not_said() -> None:
    assert config_from_hf(BASE | {"rope_theta": float("inf")}, {}).config["rope_theta"] == 10_000.0


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [
        ("mixtral", "llama"),
        ("qwen2_moe", "qwen2moe"),
        ("glm4_moe", "glm4moe"),
        ("gpt_oss", "gpt-oss"),
        ("qwen3_next", "qwen3next"),
        ("llama4_text", "llama4"),
        ("never_heard_of_text", "never_heard_of"),
        ("", "unknown"),
    ],
)
def test_model_types_get_ggufs_name_where_it_has_one(model_type: str, architecture: str) -> None:
    assert hf_architecture(model_type) == architecture


def test_a_config_json_that_leaves_out_what_a_head_is_made_of_says_nothing_of_heads() -> None:
    config = config_from_hf({"num_attention_heads": 4, "rope_scaling": {"rope_type": "yarn"}}, {}).config
    assert "head_dim" not in config
    assert config["num_key_value_heads"] == 4


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), -1.0, 1e308])
def test_a_rotary_factor_that_is_no_fraction_is_refused(factor: float) -> None:
    source = {"head_dim": 64, "partial_rotary_factor": factor}
    with pytest.raises(CheckpointError, match=r"partial_rotary_factor .* expected 0 to 1"):
        config_from_hf(source, {})

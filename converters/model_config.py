"""ModelDescription: a model's architecture (GGUF's name) and config (Hugging Face's words), from either container.

Keys that a checkpoint does not say are left out; the runtime knows the defaults of its families. Where the two
containers of one model both say a thing, they say the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from lmpack.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from converters.gguf_header import GGUFHeader

ConfigScalar: TypeAlias = bool | int | float | str
ConfigValue: TypeAlias = ConfigScalar | list[ConfigScalar]
Shapes: TypeAlias = "Mapping[str, tuple[int, ...]]"


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What the manifest says of a model: architecture as in GGUF ("qwen3moe"), config with HF's keys."""

    architecture: str
    config: Mapping[str, ConfigValue]


# our key -> GGUF's, below the architecture's prefix
_GGUF_KEYS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "v_head_dim": "attention.value_length",
    "vocab_size": "vocab_size",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "rope_theta": "rope.freq_base",
    "rope_dim": "rope.dimension_count",
    "max_position_embeddings": "context_length",
    "rope_scaling_type": "rope.scaling.type",
    "rope_scaling_factor": "rope.scaling.factor",
    "rope_scaling_original_max_position_embeddings": "rope.scaling.original_context_length",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "num_shared_experts": "expert_shared_count",
    "num_dense_layers": "leading_dense_block_count",
    "num_nextn_predict_layers": "nextn_predict_layers",
    "norm_topk_prob": "expert_weights_norm",
    "expert_weights_scale": "expert_weights_scale",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "sliding_window": "attention.sliding_window",
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
}
_GGUF_GATING = {1: "softmax", 2: "sigmoid", 3: "softmax_weight"}

# our key -> the names it has in config.json of one model type or another, first hit wins
_HF_KEYS: dict[str, tuple[str, ...]] = {
    "num_hidden_layers": ("num_hidden_layers", "n_layers", "n_layer", "num_layers"),
    "hidden_size": ("hidden_size", "d_model", "n_embd"),
    "intermediate_size": ("intermediate_size", "ffn_dim", "n_inner"),
    "num_attention_heads": ("num_attention_heads", "n_heads", "n_head"),
    "num_key_value_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "vocab_size": ("vocab_size",),
    "rms_norm_eps": ("rms_norm_eps", "norm_eps", "layer_norm_epsilon"),
    "layer_norm_eps": ("layer_norm_eps",),
    "rope_theta": ("rope_theta",),
    "max_position_embeddings": ("max_position_embeddings", "max_seq_len", "n_positions"),
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k"),
    "moe_intermediate_size": ("moe_intermediate_size",),
    "shared_expert_intermediate_size": ("shared_expert_intermediate_size",),
    "num_shared_experts": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    "num_dense_layers": ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"),
    "num_nextn_predict_layers": ("num_nextn_predict_layers", "mtp_num_hidden_layers"),
    "norm_topk_prob": ("norm_topk_prob", "route_norm", "moe_renormalize"),
    "expert_weights_scale": ("routed_scaling_factor", "route_scale", "moe_router_topk_scaling_factor"),
    "scoring_func": ("scoring_func", "score_func", "moe_router_activation_func"),
    "n_group": ("n_group",),
    "topk_group": ("topk_group",),
    "q_lora_rank": ("q_lora_rank",),
    "kv_lora_rank": ("kv_lora_rank",),
    "tie_word_embeddings": ("tie_word_embeddings",),
    "hidden_act": ("hidden_act",),
}
# rope_scaling (or, from transformers 5 on, rope_parameters) of config.json, flattened
_HF_ROPE_KEYS = {
    "rope_scaling_factor": "factor",
    "rope_scaling_original_max_position_embeddings": "original_max_position_embeddings",
    "rope_scaling_low_freq_factor": "low_freq_factor",
    "rope_scaling_high_freq_factor": "high_freq_factor",
    "rope_scaling_beta_fast": "beta_fast",
    "rope_scaling_beta_slow": "beta_slow",
    "rope_scaling_attention_factor": "attention_factor",
    "rope_scaling_mscale": "mscale",
    "rope_scaling_mscale_all_dim": "mscale_all_dim",
}

_ARCHITECTURES = {
    "qwen3_moe": "qwen3moe",
    "qwen2_moe": "qwen2moe",
    "mixtral": "llama",
    "olmoe": "olmoe",
    "llama": "llama",
    "qwen3": "qwen3",
    "qwen2": "qwen2",
}
# what the engines do when the file is silent: llama.cpp's build functions, transformers' config classes
_GGUF_NORM_TOPK_PROB = {"qwen3moe": True, "llama": True, "qwen2moe": False, "olmoe": False}
_HF_NORM_TOPK_PROB = {"mixtral": True, "qwen3_moe": False, "qwen2_moe": False, "olmoe": False}
_HF_TIES_BY_DEFAULT = frozenset({"gemma", "gemma2", "gemma3", "gemma3_text", "cohere", "cohere2"})
_DEFAULT_ROPE_THETA = 10_000.0
_MAX_HEAD_DIM = 1 << 20  # elements; the widest heads have 576


def config_from_gguf(header: GGUFHeader, shapes: Shapes, *, where: str) -> ModelDescription:
    """Read architecture and config from a GGUF's metadata; tensor shapes (numpy order) fill what it leaves out.

    Raises CheckpointError when the file does not name its architecture.
    """
    metadata = header.metadata
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        raise CheckpointError(f"{where}: metadata has no general.architecture; is it a model?")
    config: dict[str, ConfigValue] = {}
    for key, name in _GGUF_KEYS.items():
        full_name = f"{architecture}.{name}"
        if full_name in metadata:
            _put(config, key, metadata[full_name], is_float32=full_name in header.float32_keys)
    gating = metadata.get(f"{architecture}.expert_gating_func")
    if gating in _GGUF_GATING:
        config["scoring_func"] = _GGUF_GATING[gating]
    if header.endian == "big":
        config["byte_order"] = "big"
    _complete(config, shapes)
    if "num_experts" in config and architecture in _GGUF_NORM_TOPK_PROB:
        config.setdefault("norm_topk_prob", _GGUF_NORM_TOPK_PROB[architecture])
    config["tie_word_embeddings"] = "token_embd.weight" in shapes and "output.weight" not in shapes
    return ModelDescription(architecture, dict(sorted(config.items())))


def config_from_hf(config_json: Mapping[str, Any], shapes: Shapes) -> ModelDescription:
    """Translate config.json (of a multimodal model: its text part); shapes have canonical names, in numpy order."""
    text = config_json.get("text_config")
    source = {**config_json, **text} if isinstance(text, dict) else dict(config_json)
    model_type = str(source.get("model_type", ""))
    config: dict[str, ConfigValue] = {}
    for key, names in _HF_KEYS.items():
        found = next((source[name] for name in names if source.get(name) is not None), None)
        _put(config, key, found)
    # a window of 0, or one that is switched off, is none
    if source.get("use_sliding_window", True) and source.get("sliding_window"):
        _put(config, "sliding_window", source["sliding_window"])
    _put_rope(config, source)
    _complete(config, shapes)
    if "num_experts" in config and model_type in _HF_NORM_TOPK_PROB:
        config.setdefault("norm_topk_prob", _HF_NORM_TOPK_PROB[model_type])
    ties = config.pop("tie_word_embeddings", model_type in _HF_TIES_BY_DEFAULT)
    has_output = "output.weight" in shapes or any(name.endswith("lm_head.weight") for name in shapes)
    config["tie_word_embeddings"] = bool(ties) or not has_output
    return ModelDescription(hf_architecture(model_type), dict(sorted(config.items())))


def hf_architecture(model_type: str) -> str:
    """Return GGUF's name for an HF model type: ours, the gguf package's when it is the same word, else HF's."""
    if model_type in _ARCHITECTURES:
        return _ARCHITECTURES[model_type]
    from gguf import MODEL_ARCH_NAMES

    names = set(MODEL_ARCH_NAMES.values())
    base = model_type.removesuffix("_text")
    for candidate in (base, base.replace("_", "-"), base.replace("_", ""), base.replace("_moe", "-moe")):
        if candidate in names:
            return candidate
    return base or "unknown"


def _complete(config: dict[str, ConfigValue], shapes: Shapes) -> None:
    """Add what follows from other keys or from the shapes of tensors."""
    if (head_dim := _head_dim(config)) is not None:
        config.setdefault("head_dim", head_dim)
    if isinstance(heads := config.get("num_attention_heads"), int):
        config.setdefault("num_key_value_heads", heads)
    if "head_dim" in config:
        config.setdefault("rope_dim", config["head_dim"])
    config.setdefault("rope_theta", _DEFAULT_ROPE_THETA)
    if shapes.get("token_embd.weight"):
        config.setdefault("vocab_size", shapes["token_embd.weight"][0])
    if not config.get("num_experts"):
        for key in ("num_experts", "num_experts_per_tok", "norm_topk_prob"):
            config.pop(key, None)
        return
    if width := _first_width(shapes, "ffn_down_exps.weight"):
        config.setdefault("moe_intermediate_size", width)
    elif "intermediate_size" in config:
        config.setdefault("moe_intermediate_size", config["intermediate_size"])
    if width := _first_width(shapes, "ffn_down_shexp.weight"):
        config.setdefault("shared_expert_intermediate_size", width)


def _first_width(shapes: Shapes, ending: str) -> int | None:
    """Return the input width of the first down projection with this name."""
    return next((shape[-1] for name, shape in shapes.items() if name.endswith(ending) and shape), None)


def _put_rope(config: dict[str, ConfigValue], source: Mapping[str, Any]) -> None:
    rope = source.get("rope_parameters") or source.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        return
    # models with two kinds of attention have one entry for each; the full one is the model's
    rope = rope["full_attention"] if isinstance(rope.get("full_attention"), dict) else rope
    if rope.get("rope_theta") is not None:
        _put(config, "rope_theta", rope["rope_theta"])
    partial = rope.get("partial_rotary_factor", source.get("partial_rotary_factor"))
    head_dim = _head_dim(config)
    if source.get("qk_rope_head_dim"):
        _put(config, "rope_dim", source["qk_rope_head_dim"])
    elif isinstance(partial, int | float) and head_dim is not None:
        if not 0 <= partial <= 1 or head_dim > _MAX_HEAD_DIM:
            raise CheckpointError(
                f"config.json: partial_rotary_factor {partial!r:.40} of a head of {head_dim!r:.40} elements, "
                f"expected 0 to 1 of at most {_MAX_HEAD_DIM}"
            )
        config["rope_dim"] = int(head_dim * partial)
    kind = rope.get("rope_type", rope.get("type"))
    if kind in (None, "default"):
        return
    _put(config, "rope_scaling_type", kind)
    for key, name in _HF_ROPE_KEYS.items():
        _put(config, key, rope.get(name))


def _head_dim(config: Mapping[str, ConfigValue]) -> int | None:
    """Return the width of an attention head, said or computed; None when the config does not tell."""
    said, heads, hidden = (config.get(key) for key in ("head_dim", "num_attention_heads", "hidden_size"))
    if said is not None:
        return said if isinstance(said, int) else None
    return hidden // heads if isinstance(heads, int) and isinstance(hidden, int) and heads > 0 else None


def _put(config: dict[str, ConfigValue], key: str, value: Any, *, is_float32: bool = False) -> None:
    """Store a number, bool, string or list of them; everything else, None included, is left out."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, float) and is_float32:
        value = float(str(np.float32(value)))  # 1e-06, as the model's author wrote it
    if isinstance(value, list):
        value = _list(value)
    if isinstance(value, list) or _is_scalar(value):
        config[key] = value


def _is_scalar(value: Any) -> bool:
    """Tell whether a manifest can hold it: JSON has no infinity, though 2e308 in a config.json becomes one."""
    return isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))


def _list(values: Iterable[Any]) -> Any:
    """Return a list of scalars, or their one value when all are equal (a number for each layer, say)."""
    found = list(values)
    if not found or not all(map(_is_scalar, found)):
        return None
    return found[0] if all(value == found[0] for value in found) else found

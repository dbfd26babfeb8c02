"""The trained tiny model as BF16 and Q8_0 GGUF, which exists only as safetensors and as Q4_K_M.

Written with gguf-py alone, by the rules of llama.cpp's converter and quantizer: metadata and tokenizer from the
Q4_K_M file, experts stacked, norms and routers F32, every other matrix in the asked type.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import quantize
from safetensors import safe_open

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

_FILE_TYPES = {"BF16": LlamaFileType.MOSTLY_BF16, "Q8_0": LlamaFileType.MOSTLY_Q8_0}
_WRITTEN_BY_THE_WRITER = {"general.architecture", "general.file_type"}
_HF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_HF_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
}


def write_tiny_gguf(tiny: Path, dtype: str, path: Path) -> Path:
    """Write the model of the folder `tiny` to `path`, its matrices as `dtype` ("BF16" or "Q8_0")."""
    template = GGUFReader(tiny / "tiny-Q4_K_M.gguf")
    weights = _open_weights(tiny / "hf")
    writer = GGUFWriter(path, template.fields["general.architecture"].contents())
    writer.add_file_type(_FILE_TYPES[dtype])
    _copy_metadata(template, writer)
    for tensor in template.tensors:
        values = _gather(tensor.name, len(tensor.shape), weights)
        stored = "F32" if values.ndim == 1 or "ffn_gate_inp" in tensor.name else dtype
        qtype = GGMLQuantizationType[stored]
        writer.add_tensor(tensor.name, quantize(values, qtype), raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _copy_metadata(template: GGUFReader, writer: GGUFWriter) -> None:
    for name, field in template.fields.items():
        if name.startswith("GGUF.") or name in _WRITTEN_BY_THE_WRITER:
            continue
        element = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], element)


def _open_weights(folder: Path) -> dict[str, Any]:
    opened: list[Any] = [safe_open(path, framework="pt") for path in sorted(folder.glob("*.safetensors"))]
    return {name: shard for shard in opened for name in shard.keys()}  # noqa: SIM118 (no mapping)


def _gather(name: str, num_dims: int, weights: dict[str, Any]) -> NDArray[np.float32]:
    """A GGUF tensor's values, put together from the checkpoint's."""
    stem = name.removesuffix(".weight")
    if not stem.startswith("blk."):
        return _read(f"{_HF_NAMES[stem]}.weight", weights)
    _, layer, kind = stem.split(".")
    prefix = f"model.layers.{layer}."
    if num_dims < 3:
        return _read(f"{prefix}{_HF_LAYER_NAMES[kind]}.weight", weights)
    projection = kind.removeprefix("ffn_").removesuffix("_exps")
    experts = f"{prefix}mlp.experts."
    found: list[NDArray[np.float32]] = []
    while (expert := f"{experts}{len(found)}.{projection}_proj.weight") in weights:
        found.append(_read(expert, weights))
    return np.stack(found)


def _read(name: str, weights: dict[str, Any]) -> NDArray[np.float32]:
    values: NDArray[np.float32] = weights[name].get_tensor(name).to(torch.float32).numpy()
    return values

"""Safetensors files and Hugging Face folders made byte by byte."""

from __future__ import annotations

import json
import random
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmpack.dtype import dtype_nbytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor to write; data random by name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    declared: str = ""  # the dtype in the header, instead of the true one

    @property
    def nbytes(self) -> int:
        return dtype_nbytes(self.dtype, self.shape)

    @property
    def raw(self) -> bytes:
        return random.Random(self.name).randbytes(self.nbytes)


def safetensors_bytes(tensors: Sequence[Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """Lay out a whole safetensors file, the header padded to 8 bytes."""
    return with_header(safetensors_header(tensors, metadata), b"".join(tensor.raw for tensor in tensors))


def safetensors_header(
    tensors: Sequence[Tensor], metadata: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the header as a dict, for tests that want to change it."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": tensor.declared or tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    return header


def with_header(header: Any, data: bytes) -> bytes:
    """Put the length and the JSON of a header, or raw header bytes, before the data."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw + data


CONFIG: dict[str, Any] = {
    "model_type": "tinymoe",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-6,
}
SMALL_FILES = {
    "tokenizer.json": b'{"version": "1.0"}',
    "merges.txt": "ü e\n".encode(),
    "README.md": b"# A model\n",
    "chat_template.jinja": b"{{ messages }}",
}


def moe_tensors(
    *, num_layers: int = 2, num_experts: int = 4, hidden: int = 32, width: int = 64
) -> list[Tensor]:
    """List the tensors of a small MoE model, one tensor for each projection of each expert."""
    tensors = [
        Tensor("model.embed_tokens.weight", "BF16", (4, hidden)),
        Tensor("model.norm.weight", "BF16", (hidden,)),
    ]
    for layer in range(num_layers):
        at = f"model.layers.{layer}."
        tensors.append(Tensor(at + "input_layernorm.weight", "BF16", (hidden,)))
        tensors.append(Tensor(at + "mlp.gate.weight", "BF16", (num_experts, hidden)))
        for expert in range(num_experts):
            tensors.append(Tensor(f"{at}mlp.experts.{expert}.down_proj.weight", "BF16", (hidden, width)))
            tensors.append(Tensor(f"{at}mlp.experts.{expert}.gate_proj.weight", "BF16", (width, hidden)))
            tensors.append(Tensor(f"{at}mlp.experts.{expert}.up_proj.weight", "BF16", (width, hidden)))
    return tensors


def write_hf_folder(
    folder: Path,
    shards: Sequence[Sequence[Tensor]],
    *,
    config: Mapping[str, Any] | None = None,
    index: Mapping[str, str] | bool = True,
    small_files: Mapping[str, bytes] | None = None,
) -> Path:
    """Write config.json, the shards, an index (true, false, or this weight map) and small files; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    own_config = CONFIG if config is None else config
    if own_config:
        (folder / "config.json").write_text(json.dumps(own_config))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards):
        name = (
            f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
            if len(shards) > 1
            else "model.safetensors"
        )
        (folder / name).write_bytes(safetensors_bytes(shard, {"format": "pt"}))
        weight_map |= {tensor.name: name for tensor in shard}
    if index:
        found = weight_map if index is True else dict(index)
        text = json.dumps({"metadata": {}, "weight_map": found})
        (folder / "model.safetensors.index.json").write_text(text)
    for name, raw in (SMALL_FILES if small_files is None else small_files).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(raw)
    return folder

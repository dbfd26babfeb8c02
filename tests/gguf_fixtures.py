"""GGUF files made byte by byte, so that every rule of the format can be bent one at a time."""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from lmpack.dtype import GGML_DTYPES, WITHDRAWN_GGML_DTYPES, dtype_nbytes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

Endian = Literal["little", "big"]
GGML_TYPE_OF = {dtype: number for number, dtype in {**GGML_DTYPES, **WITHDRAWN_GGML_DTYPES}.items()}
VALUE_TYPE_OF = {
    "u1": 0,
    "i1": 1,
    "u2": 2,
    "i2": 3,
    "u4": 4,
    "i4": 5,
    "f4": 6,
    "b1": 7,
    "u8": 10,
    "i8": 11,
    "f8": 12,
}
STRING, ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class Raw:
    """A metadata value given as its type number and its bytes."""

    value_type: int
    raw: bytes


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor to write; shape in numpy order, data random by name unless given."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes | None = None
    ggml_type: int | None = None  # in the header, instead of the dtype's
    offset: int | None = None  # in the header, instead of where the data is

    @property
    def nbytes(self) -> int:
        return dtype_nbytes(self.dtype, self.shape)

    @property
    def raw(self) -> bytes:
        return random.Random(self.name).randbytes(self.nbytes) if self.data is None else self.data


def gguf_bytes(
    tensors: Sequence[Tensor] = (),
    metadata: Mapping[str, Any] | Sequence[tuple[str, Any]] = (),
    *,
    version: int = 3,
    endian: Endian = "little",
    alignment: int = 32,
    num_tensors: int | None = None,
    num_keys: int | None = None,
    gap: int = 0,
    trailing: bytes = b"",
) -> bytes:
    """Lay out a whole GGUF file; `gap` adds alignment units before each tensor, counts may lie."""
    order: Literal["<", ">"] = "<" if endian == "little" else ">"
    pairs = list(metadata.items() if isinstance(metadata, Mapping) else metadata)
    if alignment != 32:
        pairs.append(("general.alignment", alignment))
    out = bytearray(b"GGUF" + struct.pack(order + "I", version))
    out += struct.pack(
        order + "QQ",
        len(tensors) if num_tensors is None else num_tensors,
        len(pairs) if num_keys is None else num_keys,
    )
    for key, value in pairs:
        out += string(key, order) + typed_value(value, order)
    data = bytearray()
    for tensor in tensors:
        data += bytes(gap * alignment + -len(data) % alignment)
        out += string(tensor.name, order) + struct.pack(order + "I", len(tensor.shape))
        out += struct.pack(f"{order}{len(tensor.shape)}Q", *reversed(tensor.shape))
        ggml_type = GGML_TYPE_OF[tensor.dtype] if tensor.ggml_type is None else tensor.ggml_type
        out += struct.pack(order + "IQ", ggml_type, len(data) if tensor.offset is None else tensor.offset)
        data += tensor.raw
    if tensors:
        out += bytes(-len(out) % alignment) + data
        out += bytes(-len(out) % alignment)
    return bytes(out) + trailing


def string(text: str | bytes, order: str = "<") -> bytes:
    raw = text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")
    return struct.pack(order + "Q", len(raw)) + raw


def typed_value(value: Any, order: Literal["<", ">"] = "<") -> bytes:
    """Write a value with its type: int as u32, float as f32, str, bool, list of str, or a numpy array or scalar."""
    if isinstance(value, Raw):
        return struct.pack(order + "I", value.value_type) + value.raw
    if isinstance(value, str):
        return struct.pack(order + "I", STRING) + string(value, order)
    if isinstance(value, list):
        body = b"".join(string(text, order) for text in value)
        return struct.pack(order + "IIQ", ARRAY, STRING, len(value)) + body
    plain = {bool: np.bool_, int: np.uint32, float: np.float32}.get(type(value))
    numbers = np.asarray(plain(value) if plain else value)
    value_type = VALUE_TYPE_OF[numbers.dtype.str[1:]]
    body = numbers.astype(numbers.dtype.newbyteorder(order)).tobytes()
    if isinstance(value, np.ndarray):
        return struct.pack(order + "IIQ", ARRAY, value_type, len(numbers)) + body
    return struct.pack(order + "I", value_type) + body


METADATA: dict[str, Any] = {
    "general.architecture": "tinymoe",
    "general.name": "a test",
    "tinymoe.block_count": 2,
    "tinymoe.embedding_length": 32,
    "tinymoe.attention.head_count": 4,
    "tinymoe.attention.layer_norm_rms_epsilon": 1e-6,
    "tinymoe.context_length": 128,
    "tinymoe.expert_count": 4,
    "tinymoe.expert_used_count": 2,
    "tokenizer.ggml.tokens": ["a", "b", "ü", ""],
}


def moe_tensors(
    *,
    num_layers: int = 2,
    num_experts: int = 4,
    hidden: int = 32,
    width: int = 64,
    dtype: str = "F16",
    layout: Literal["stacked", "fused", "single"] = "stacked",
    extras: Sequence[Literal["bias", "scale", "probs", "shexp", "dense", "mtp"]] = (),
) -> list[Tensor]:
    """List the tensors of a small MoE model in one of GGUF's layouts."""
    tensors = [
        Tensor("token_embd.weight", "F32", (4, hidden)),
        Tensor("output_norm.weight", "F32", (hidden,)),
    ]
    for layer in range(num_layers):
        at = f"blk.{layer}."
        tensors.append(Tensor(at + "ffn_norm.weight", "F32", (hidden,)))
        if "dense" in extras and layer == 0:
            tensors.append(Tensor(at + "ffn_up.weight", dtype, (width, hidden)))
            continue
        tensors.append(Tensor(at + "ffn_gate_inp.weight", "F32", (num_experts, hidden)))
        roles = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
        if layout == "fused":
            roles = {"gate_up": (2 * width, hidden), "down": (hidden, width)}
        for role, shape in roles.items():
            if layout == "single":
                tensors += [
                    Tensor(f"{at}ffn_{role}.{expert}.weight", dtype, shape) for expert in range(num_experts)
                ]
            else:
                tensors.append(Tensor(f"{at}ffn_{role}_exps.weight", dtype, (num_experts, *shape)))
            if "bias" in extras and layout == "single":
                tensors += [
                    Tensor(f"{at}ffn_{role}.{expert}.bias", "F32", (shape[0],))
                    for expert in range(num_experts)
                ]
            elif "bias" in extras:
                tensors.append(Tensor(f"{at}ffn_{role}_exps.bias", "F32", (num_experts, shape[0])))
            if "scale" in extras:
                tensors.append(Tensor(f"{at}ffn_{role}_exps.scale", "F32", (num_experts,)))
        if "probs" in extras:
            tensors.append(Tensor(at + "exp_probs_b.bias", "F32", (num_experts,)))
        if "shexp" in extras:
            tensors.append(Tensor(at + "ffn_up_shexp.weight", dtype, (width, hidden)))
            tensors.append(Tensor(at + "ffn_gate_inp_shexp.weight", "F32", (hidden,)))
    if "mtp" in extras:
        at = f"blk.{num_layers}."
        tensors.append(Tensor(at + "nextn.eh_proj.weight", dtype, (hidden, 2 * hidden)))
        for role, shape in {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}.items():
            tensors.append(Tensor(f"{at}ffn_{role}_exps.weight", dtype, (num_experts, *shape)))
    return tensors


def write_shards(
    folder: Path,
    shards: Sequence[Sequence[Tensor]],
    *,
    stem: str = "model",
    metadata: Mapping[str, Any] | None = None,
    **options: Any,
) -> list[Path]:
    """Write a split set as llama-gguf-split does: metadata in the first file, split.* keys in each."""
    total = sum(len(shard) for shard in shards)
    paths = []
    for number, shard in enumerate(shards):
        split = {
            "split.no": np.uint16(number),
            "split.count": np.uint16(len(shards)),
            "split.tensors.count": np.int32(total),
        }
        own = METADATA if metadata is None else metadata
        path = folder / f"{stem}-{number + 1:05}-of-{len(shards):05}.gguf"
        path.write_bytes(gguf_bytes(shard, {**(own if number == 0 else {}), **split}, **options))
        paths.append(path)
    return paths

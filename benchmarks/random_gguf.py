"""Write a large qwen3moe GGUF with random weights, a working tokenizer and a skewed router, at the drive's speed.

    python benchmarks/random_gguf.py OUT --layers 24 --experts 128 --top-k 8 --hidden 2048 --expert-width 768 \\
        --quant Q4_K --vocab-from demo/tiny-Q4_K_M.gguf

The blocks of each type are made once and written again and again from other starting points, so no two experts are
alike. Weights have a standard deviation of 1/sqrt(fan-in): activations stay finite. Router rows have a different
length for each expert, so that a few experts get most tokens, as in trained models.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import gguf
import numpy as np

from lmpack.dtype import block_of, dtype_nbytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

POOL_NUM_BLOCKS = {256: 230_003, 32: 500_009, 1: 8_000_009}  # primes: a slab never meets itself in step
CONTEXT_LENGTH = 32_768
ROUTER_LOGIT_STD = 3.0  # of the favourite expert


def main() -> None:
    """Parse the flags, write the file, print its size and time."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--expert-width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--quant", choices=("Q4_K", "Q4_K_M", "Q6_K", "Q8_0", "BF16"), default="Q4_K_M")
    parser.add_argument(
        "--skew", type=float, default=0.35, help="0: all experts alike; 0.35: like a trained model"
    )
    parser.add_argument("--vocab-from", type=Path, required=True, help="a GGUF whose tokenizer is copied")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    started = time.perf_counter()
    nbytes = write_random_gguf(arguments)
    seconds = time.perf_counter() - started
    print(f"{arguments.out}: {nbytes / 1e9:.2f} GB in {seconds:.1f} s, {nbytes / 1e6 / seconds:.0f} MB/s")


def write_random_gguf(arguments: argparse.Namespace) -> int:
    """Write the file; returns its size in bytes."""
    writer = gguf.GGUFWriter(arguments.out, "qwen3moe")
    vocab_size = copy_tokenizer(arguments.vocab_from, writer)
    add_shape(writer, arguments)
    tensors = list(plan_tensors(arguments, vocab_size))
    for name, dtype, shape, _ in tensors:
        ggml_type = gguf.GGMLQuantizationType[dtype]
        writer.add_tensor_info(name, shape, np.dtype(np.float32), dtype_nbytes(dtype, shape), ggml_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.flush()
    file = writer.fout[0]
    pools = Pools(np.random.default_rng(arguments.seed))
    file.write(bytes(-file.tell() % gguf.GGUF_DEFAULT_ALIGNMENT))
    for name, dtype, shape, std in tensors:
        if name.endswith("ffn_gate_inp.weight"):
            file.write(pools.router(shape[0], shape[1], arguments.skew).tobytes())
        elif name.endswith("norm.weight"):
            file.write(np.ones(shape, np.float32).tobytes())
        else:
            pools.write(file, dtype, std, dtype_nbytes(dtype, shape))
        file.write(bytes(-file.tell() % gguf.GGUF_DEFAULT_ALIGNMENT))
    writer.close()
    return Path(arguments.out).stat().st_size


def copy_tokenizer(source: Path, writer: gguf.GGUFWriter) -> int:
    """Copy every tokenizer.* key; returns the number of tokens."""
    fields = gguf.GGUFReader(source).fields
    for key, field in fields.items():
        if key.startswith("tokenizer."):
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type=inner)
    return len(fields["tokenizer.ggml.tokens"].data)


def add_shape(writer: gguf.GGUFWriter, arguments: argparse.Namespace) -> None:
    """Add the metadata that llama.cpp needs for qwen3moe."""
    writer.add_name(f"random {arguments.layers}L {arguments.experts}E {arguments.quant}")
    writer.add_block_count(arguments.layers)
    writer.add_context_length(CONTEXT_LENGTH)
    writer.add_embedding_length(arguments.hidden)
    writer.add_feed_forward_length(arguments.expert_width * arguments.top_k)
    writer.add_head_count(arguments.heads)
    writer.add_head_count_kv(arguments.kv_heads)
    writer.add_key_length(arguments.head_dim)
    writer.add_value_length(arguments.head_dim)
    writer.add_rope_freq_base(1_000_000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_expert_count(arguments.experts)
    writer.add_expert_used_count(arguments.top_k)
    writer.add_expert_feed_forward_length(arguments.expert_width)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    file_types = {"Q4_K": 15, "Q4_K_M": 15, "Q6_K": 18, "Q8_0": 7, "BF16": 32}
    writer.add_file_type(file_types[arguments.quant])


def plan_tensors(
    arguments: argparse.Namespace, vocab_size: int
) -> Iterator[tuple[str, str, tuple[int, ...], float]]:
    """Yield (name, dtype, shape in numpy order, standard deviation), in llama.cpp's order."""
    hidden, width, experts = arguments.hidden, arguments.expert_width, arguments.experts
    q_width, kv_width = arguments.heads * arguments.head_dim, arguments.kv_heads * arguments.head_dim
    main_dtype = arguments.quant.removesuffix("_M")
    yield "output.weight", "Q6_K" if main_dtype == "Q4_K" else main_dtype, (vocab_size, hidden), hidden**-0.5
    yield "output_norm.weight", "F32", (hidden,), 0.0
    yield "token_embd.weight", main_dtype, (vocab_size, hidden), 1.0
    for layer in range(arguments.layers):
        more = (
            "Q6_K" if arguments.quant == "Q4_K_M" and takes_more_bits(layer, arguments.layers) else main_dtype
        )
        at = f"blk.{layer}."
        yield at + "attn_k.weight", main_dtype, (kv_width, hidden), hidden**-0.5
        yield at + "attn_k_norm.weight", "F32", (arguments.head_dim,), 0.0
        yield at + "attn_norm.weight", "F32", (hidden,), 0.0
        yield at + "attn_output.weight", main_dtype, (hidden, q_width), q_width**-0.5
        yield at + "attn_q.weight", main_dtype, (q_width, hidden), hidden**-0.5
        yield at + "attn_q_norm.weight", "F32", (arguments.head_dim,), 0.0
        yield at + "attn_v.weight", more, (kv_width, hidden), hidden**-0.5
        yield at + "ffn_down_exps.weight", more, (experts, hidden, width), width**-0.5
        yield at + "ffn_gate_exps.weight", main_dtype, (experts, width, hidden), hidden**-0.5
        yield at + "ffn_gate_inp.weight", "F32", (experts, hidden), 0.0
        yield at + "ffn_norm.weight", "F32", (hidden,), 0.0
        yield at + "ffn_up_exps.weight", main_dtype, (experts, width, hidden), hidden**-0.5


def takes_more_bits(layer: int, num_layers: int) -> bool:
    """Tell which layers llama-quantize gives Q6_K in Q4_K_M: the first and last eighth, every third between."""
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


class Pools:
    """Random blocks of each type and scale, made once."""

    def __init__(self, random: np.random.Generator) -> None:
        """Draw everything from one generator: the same seed gives the same file."""
        self.random = random
        self.pools: dict[tuple[str, float], memoryview] = {}

    def write(self, file: BinaryIO, dtype: str, std: float, nbytes: int) -> None:
        """Write a tensor's bytes: a walk through the pool from a random block on."""
        block_nbytes = block_of(dtype).nbytes
        if (dtype, std) not in self.pools:
            blocks = random_blocks(self.random, dtype, std, POOL_NUM_BLOCKS[block_of(dtype).num_elements])
            self.pools[dtype, std] = memoryview(blocks.tobytes())
        pool = self.pools[dtype, std]
        position = int(self.random.integers(len(pool) // block_nbytes)) * block_nbytes
        while nbytes:
            piece = pool[position : position + nbytes]
            file.write(piece)
            nbytes -= len(piece)
            position = 0

    def router(self, num_experts: int, hidden: int, skew: float) -> NDArray[np.float32]:
        """Return router rows whose lengths fall like rank ** -skew, the ranks shuffled anew for each layer."""
        lengths = ROUTER_LOGIT_STD / math.sqrt(hidden) * np.arange(1, num_experts + 1) ** -skew
        rows = self.random.standard_normal((num_experts, hidden))
        return np.asarray(rows * self.random.permutation(lengths)[:, None], np.float32)


def random_blocks(random: np.random.Generator, dtype: str, std: float, num_blocks: int) -> NDArray[np.uint8]:
    """Return [num_blocks, block bytes] of valid blocks with mean 0 and about this standard deviation.

    Layouts: block_q4_K, block_q6_K and block_q8_0 in ggml's ggml-common.h.
    """
    jitter = random.uniform(0.7, 1.3, num_blocks)
    blocks = random.integers(0, 256, (num_blocks, block_of(dtype).nbytes), dtype=np.uint8)
    if dtype == "Q4_K":  # w = d * 32 * q - dmin * 32, q uniform in 0..15: mean 7.5, std 4.61
        d = jitter * std / (32 * 4.61)
        blocks[:, 0:2] = as_bytes(d)
        blocks[:, 2:4] = as_bytes(7.5 * d)
        blocks[:, 4:12] = 32 | 2 << 6  # all eight 6-bit scales and minima are 32
        blocks[:, 12:16] = 0
    elif dtype == "Q6_K":  # w = d * scale * (q - 32), q uniform in 0..63: std 18.5
        blocks[:, 192:208] = 16
        blocks[:, 208:210] = as_bytes(jitter * std / (16 * 18.5))
    elif dtype == "Q8_0":  # w = d * q, q uniform in -128..127: std 73.9
        blocks[:, 0:2] = as_bytes(jitter * std / 73.9)
    elif dtype == "BF16":
        weights = random.standard_normal(num_blocks, dtype=np.float32) * np.float32(std)
        blocks = (weights.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(num_blocks, 2)
    else:
        raise ValueError(f"no random blocks of {dtype}")
    return blocks


def as_bytes(values: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Return [n, 2] bytes of the values as float16."""
    return values.astype(np.float16).view(np.uint8).reshape(-1, 2)


if __name__ == "__main__":
    main()

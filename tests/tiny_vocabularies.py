"""Small vocabularies with llama.cpp's answers: what tests/make_tokenizer_golden.py wrote to tests/data.

The byte-level one was trained without a pre-tokenizer, so that its merges cross every border a pre-tokenizer can
draw: a text cut at a wrong place gives other tokens. The SentencePiece one has runs of one character and many equal
scores, where the order of merges shows.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import GGUFWriter, TokenType

from runtime.byte_pair_encoder import BYTE_CHARACTERS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DATA = Path(__file__).parent / "data"
BPE_SPECIAL = (
    ("<|endoftext|>", TokenType.CONTROL),
    ("<|im_start|>", TokenType.CONTROL),
    ("<|im_end|>", TokenType.CONTROL),
    ("<|begin_of_text|>", TokenType.CONTROL),
    ("<|eot_id|>", TokenType.CONTROL),
    ("<tool_call>", TokenType.USER_DEFINED),
    ("  \n", TokenType.USER_DEFINED),
)
_WIDTH = 8  # of the one layer that llama.cpp wants around a vocabulary


@cache
def hard_strings() -> tuple[str, ...]:
    """The 400 strings, in the file's order."""
    kinds: dict[str, list[str]] = json.loads((DATA / "hard_strings.json").read_text())
    return tuple(text for texts in kinds.values() for text in texts)


@cache
def golden() -> dict[str, Any]:
    """merges, pieces and scores of the vocabularies, and llama.cpp's answers by vocabulary."""
    found: dict[str, Any] = json.loads((DATA / "tokenizer_golden.json").read_text())
    return found


def bpe_keys(merges: Sequence[str], pre: str, **others: Any) -> dict[str, Any]:
    """The metadata of a byte-level vocabulary, without the prefix tokenizer.ggml."""
    texts = [*sorted(BYTE_CHARACTERS), *dict.fromkeys(merge.replace(" ", "") for merge in merges)]
    types = [TokenType.NORMAL] * len(texts) + [kind for _, kind in BPE_SPECIAL]
    texts += [text for text, _ in BPE_SPECIAL]
    ids = {text: i for i, text in enumerate(texts)}
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": texts,
        "token_type": types,
        "merges": list(merges),
        "bos_token_id": ids["<|begin_of_text|>"],
        "eos_token_id": ids["<|im_end|>"],
    } | others


def sentencepiece_keys(pieces: Sequence[str], scores: Sequence[float], **others: Any) -> dict[str, Any]:
    """The metadata of a SentencePiece vocabulary with byte fallback."""
    start = [("<unk>", TokenType.UNKNOWN), ("<s>", TokenType.CONTROL), ("</s>", TokenType.CONTROL)]
    start += [(f"<0x{byte:02X}>", TokenType.BYTE) for byte in range(256)]
    end = [
        ("<|im_start|>", TokenType.CONTROL),
        ("<mask>", TokenType.USER_DEFINED),
        ("  ", TokenType.USER_DEFINED),
    ]
    return {
        "model": "llama",
        "tokens": [text for text, _ in start] + list(pieces) + [text for text, _ in end],
        "token_type": [kind for _, kind in start]
        + [TokenType.NORMAL] * len(pieces)
        + [kind for _, kind in end],
        "scores": [0.0] * len(start) + list(scores) + [0.0] * len(end),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    } | others


def write_gguf(path: Path, keys: Mapping[str, Any], *, with_weights: bool = False, name: str = "") -> Path:
    """Write a GGUF with tokenizer.ggml.* keys; llama.cpp loads it only with_weights, of one tiny layer of zeros."""
    writer = GGUFWriter(str(path), "llama")
    if name:
        writer.add_name(name)
    for key, value in keys.items():
        full = f"tokenizer.ggml.{key}"
        if isinstance(value, bool):
            writer.add_bool(full, value)
        elif isinstance(value, str):
            writer.add_string(full, value)
        elif isinstance(value, int):
            writer.add_uint32(full, value)
        else:
            writer.add_array(full, [int(item) if isinstance(item, TokenType) else item for item in value])
    if with_weights:
        _add_layer(writer, len(keys["tokens"]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_layer(writer: GGUFWriter, vocab_size: int) -> None:
    writer.add_context_length(64)
    writer.add_embedding_length(_WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(_WIDTH)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(_WIDTH)
    writer.add_tensor("token_embd.weight", np.zeros((vocab_size, _WIDTH), np.float32))
    for norm in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{norm}.weight", np.zeros(_WIDTH, np.float32))
    for matrix in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{matrix}.weight", np.zeros((_WIDTH, _WIDTH), np.float32))

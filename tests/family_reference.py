"""The stored answers of transformers and llama.cpp about one family's tiny model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import load_file

from tests.llamacpp_oracle import Candidates

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

RUNNABLE = ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "llama", "qwen3")


@dataclass(frozen=True, slots=True)
class HfAnswer:
    """transformers in float32 about one sequence."""

    token_ids: list[int]
    logits: NDArray[np.float32]  # [num_tokens, vocab]
    topk_ids: list[NDArray[np.int32]]  # per MoE layer [num_tokens, top_k]
    greedy: list[int]


def load_hf_answers(folder: Path) -> list[HfAnswer]:
    """Every sequence of `ref_hf.safetensors`."""
    stored = load_file(folder / "ref_hf.safetensors")
    answers: list[HfAnswer] = []
    while (name := f"seq{len(answers)}") + ".ids" in stored:
        layers = sorted(
            (key for key in stored if key.startswith(f"{name}.layer") and key.endswith(".experts")),
            key=lambda key: int(key.split(".")[1].removeprefix("layer")),
        )
        answers.append(
            HfAnswer(
                stored[f"{name}.ids"].tolist(),
                stored[f"{name}.logits"],
                [stored[layer] for layer in layers],
                stored[f"{name}.greedy24"].tolist(),
            )
        )
    return answers


@dataclass(frozen=True, slots=True)
class LlamaCppAnswer:
    """llama.cpp about what follows a sequence; only its twenty likeliest tokens."""

    token_ids: list[int]
    candidates: Candidates


def load_llamacpp_answers(folder: Path, dtype: str) -> list[LlamaCppAnswer]:
    """All of `ref_llamacpp.json` about the GGUF in `dtype` ("f32", "bf16", "q8_0" or "q4_k_m")."""
    stored: dict[str, Any] = json.loads((folder / "ref_llamacpp.json").read_bytes())[dtype]
    answers = [LlamaCppAnswer(sequence["ids"], _candidates(sequence["top20"])) for sequence in stored["seqs"]]
    longest = answers[3].token_ids
    prefixes = [
        LlamaCppAnswer(longest[: prefix["len"]], _candidates(prefix["top20"]))
        for prefix in stored["prefixes_of_seq3"]
    ]
    return answers + prefixes


def _candidates(top: list[tuple[int, float]]) -> Candidates:
    token_ids, logprobs = zip(*top, strict=True)
    return Candidates(np.array(token_ids, np.int64), np.array(logprobs, np.float64))

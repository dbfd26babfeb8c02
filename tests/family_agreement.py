"""A family's tiny model, run by us from both containers, against the stored answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lmpack.pack import Pack
from profiles.routing_origin import RoutingOrigin
from profiles.routing_recorder import RoutingRecorder
from profiles.routing_shape import RoutingShape
from runtime.engine import Engine
from tests.agreement import Agreement
from tests.engine_answers import continue_greedily, score_windows
from tests.family_reference import load_hf_answers, load_llamacpp_answers

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from tests.family_reference import HfAnswer

CONTEXT = 256  # tokens; the longest sequence and its continuation fit


@dataclass(frozen=True, slots=True)
class FamilyAgreement:
    """Ours against transformers in float32 about all positions of a family's sequences."""

    text: Agreement
    max_difference: float  # of two logits
    experts: float  # share of (token, layer) with the same set of experts; 1 for a dense model
    num_greedy: int
    num_greedy_identical: int


def compare_with_hf(folder: Path, pack: Path, *, kernels: str, num_threads: int = 1) -> FamilyAgreement:
    """Run the sequences of `folder`'s ref_hf.safetensors with a float32 KV cache."""
    answers = load_hf_answers(folder)
    recorder = _recorder(pack)
    with Engine.load(
        pack,
        context_length=CONTEXT,
        num_threads=num_threads,
        kernels=kernels,
        kv_dtype="f32",
        recorder=recorder,
    ) as engine:
        logits = []
        for answer in answers:
            logits.append(score_windows(engine, [answer.token_ids]))
            if recorder is not None:
                recorder.end_prompt(answer.token_ids, len(answer.token_ids))
        experts = 1.0 if recorder is None else _same_experts(recorder, answers)
        identical = [
            continue_greedily(engine, answer.token_ids, len(answer.greedy)) == answer.greedy
            for answer in answers
        ]
    expected, ours = np.concatenate([answer.logits for answer in answers]), np.concatenate(logits)
    return FamilyAgreement(
        Agreement.of_logits(expected, ours),
        float(np.abs(expected - ours).max()),
        experts,
        len(identical),
        sum(identical),
    )


def compare_with_stored_llamacpp(
    folder: Path, pack: Path, dtype: str, *, kernels: str = "auto", num_threads: int = 1
) -> Agreement:
    """Score what ref_llamacpp.json holds of the GGUF in `dtype`."""
    answers = load_llamacpp_answers(folder, dtype)
    with Engine.load(pack, context_length=CONTEXT, num_threads=num_threads, kernels=kernels) as engine:
        rows = [score_windows(engine, [answer.token_ids])[-1] for answer in answers]
    return Agreement.of_candidates([answer.candidates for answer in answers], np.stack(rows))


def _recorder(pack: Path) -> RoutingRecorder | None:
    manifest = Pack.open(pack).manifest
    return RoutingRecorder(RoutingShape.of_manifest(manifest), keep_trace=True) if manifest.layers else None


def _same_experts(recorder: RoutingRecorder, answers: list[HfAnswer]) -> float:
    chosen = recorder.trace(RoutingOrigin("any", (), (), ())).topk_ids  # [num_tokens, num_layers, top_k]
    expected = np.concatenate([np.stack(answer.topk_ids, axis=1) for answer in answers])
    same: NDArray[np.bool_] = (np.sort(chosen, -1) == np.sort(expected, -1)).all(-1)
    return float(same.mean())

"""Perplexity: what is scored, against log-probabilities taken one chunk at a time."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch

from lmpack.errors import UsageError
from runtime.engine import Engine
from runtime.perplexity import measure_perplexity

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CONTEXT = 64


@pytest.fixture(scope="module")
def engine(demo_pack: Path) -> Iterator[Engine]:
    with Engine.load(demo_pack, context_length=CONTEXT, num_threads=1) as engine:
        yield engine


def text_ids(engine: Engine, demo_gguf: Path) -> list[int]:
    text = demo_gguf.with_name("heldout.txt").read_text(encoding="utf-8")
    return engine.tokenizer.encode(text)[: 3 * CONTEXT + 5]


def test_the_second_half_of_each_whole_chunk_is_scored(engine: Engine, demo_gguf: Path) -> None:
    ids = text_ids(engine, demo_gguf)
    losses = []
    for start in range(0, 3 * CONTEXT, CONTEXT):
        chunk = ids[start : start + CONTEXT]
        logprobs = engine.forward(chunk, engine.new_kv(), all_logits=True).log_softmax(-1)
        losses += [-float(logprobs[i, chunk[i + 1]]) for i in range(CONTEXT // 2, CONTEXT - 1)]
    result = measure_perplexity(engine, ids, CONTEXT)
    assert result.num_chunks == 3
    assert result.num_tokens == len(losses) == 3 * (CONTEXT // 2 - 1)
    assert result.perplexity == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-5)
    spread = float(torch.tensor(losses).std()) / math.sqrt(len(losses) - 1)
    assert result.standard_error == pytest.approx(result.perplexity * spread, rel=1e-4)


def test_fewer_chunks_can_be_asked_for(engine: Engine, demo_gguf: Path) -> None:
    result = measure_perplexity(engine, text_ids(engine, demo_gguf), CONTEXT, num_chunks=1)
    assert result.num_tokens == CONTEXT // 2 - 1


def test_a_text_shorter_than_a_chunk_is_refused(engine: Engine) -> None:
    with pytest.raises(UsageError, match="less than one chunk of 64"):
        measure_perplexity(engine, list(range(10, 73)), CONTEXT)


@pytest.mark.parametrize("context_length", [1, 2])
def test_a_context_that_scores_nothing_is_refused(engine: Engine, context_length: int) -> None:
    with pytest.raises(UsageError, match="use 3 or more"):
        measure_perplexity(engine, list(range(10, 73)), context_length)

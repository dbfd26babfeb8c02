"""Measured phases: what is timed, and which look-ups belong to it."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import lmpack
from runtime.speed import measure_repetitions

if TYPE_CHECKING:
    from pathlib import Path


def test_a_prompt_is_all_of_its_tokens_and_an_answer_one_pass_per_token(demo_pack: Path) -> None:
    ticks = itertools.count()
    with lmpack.load(demo_pack, num_threads=1, context_length=8) as engine:
        token_ids = engine.tokenizer.encode("Once upon a time there was a small fox")
        lookups_of_a_token = len(engine.plan.pack.manifest.layers) * engine.plan.config.num_experts_per_tok
        repetitions = measure_repetitions(
            engine, token_ids, prompt_tokens=5, answer_tokens=3, clock=lambda: float(next(ticks))
        )
        for repetition in itertools.islice(repetitions, 3):
            prompt, answer = repetition.prompt, repetition.answer
            assert answer is not None
            assert (prompt.num_tokens, answer.num_tokens) == (5, 3)
            assert prompt.seconds == answer.seconds == 1
            assert answer.hits + answer.misses == 3 * lookups_of_a_token
            assert lookups_of_a_token <= prompt.hits + prompt.misses <= 5 * lookups_of_a_token
        stats = engine.stats()
        assert (stats.prefill_tokens, stats.decode_tokens) == (3 * 5, 3 * 3)


def test_without_an_answer_only_prompts_are_run(demo_pack: Path) -> None:
    with lmpack.load(demo_pack, num_threads=1, context_length=4) as engine:
        repetitions = measure_repetitions(engine, [1, 2, 3, 4, 5], prompt_tokens=4, answer_tokens=0)
        assert [repetition.answer for repetition in itertools.islice(repetitions, 2)] == [None, None]
        assert engine.stats().decode_tokens == 0


def test_a_prompt_of_one_token_is_a_prompt(demo_pack: Path) -> None:
    with lmpack.load(demo_pack, num_threads=1, context_length=4) as engine:
        next(measure_repetitions(engine, [1], prompt_tokens=1, answer_tokens=2))
        stats = engine.stats()
        assert (stats.prefill_tokens, stats.decode_tokens) == (1, 2)
        assert "prefill   1 token in" in stats.describe()

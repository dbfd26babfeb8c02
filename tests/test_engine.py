"""The engine on the trained demo model: budgets, stores, waves and prefixes change nothing but speed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from lmpack.errors import BudgetError, UnsupportedError, UsageError
from runtime.engine import Engine
from runtime.sampler import SamplingParams
from tests.greedy_logits import PROMPT, greedy_logits
from tests.smallest_budget import smallest_budget

if TYPE_CHECKING:
    from pathlib import Path

CONTEXT = 256


def load(pack: Path, **options: Any) -> Engine:
    return Engine.load(pack, context_length=CONTEXT, **options)


@pytest.fixture(scope="module")
def smallest_ram(demo_pack: Path) -> int:
    return smallest_budget(lambda: load(demo_pack, ram=1))


@pytest.fixture(scope="module")
def reference(demo_pack: Path) -> torch.Tensor:
    with load(demo_pack, io="direct") as engine:
        return greedy_logits(engine, 6)


@pytest.mark.parametrize("io", ["mmap", "direct"])
@pytest.mark.parametrize("extra_nbytes", [0, 1 << 20, 3 << 20, 9 << 20, 1 << 30])
def test_any_legal_budget_gives_the_same_bits(
    demo_pack: Path, smallest_ram: int, reference: torch.Tensor, io: str, extra_nbytes: int
) -> None:
    with load(demo_pack, ram=smallest_ram + extra_nbytes, io=io) as engine:
        assert torch.equal(greedy_logits(engine, 6), reference)
        assert (engine.cache.evictions > 0) == (extra_nbytes < 1 << 24)


@pytest.mark.parametrize("io", ["mmap", "direct"])
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_experts_that_are_there_already_change_no_bit_of_a_prompt(
    demo_pack: Path, reference: torch.Tensor, io: str, share: float
) -> None:
    with load(demo_pack, io=io) as engine:
        for entry in engine.plan.pack.manifest.layers:
            engine.cache.fetch(entry.layer, range(int(share * entry.num_experts)))
        assert torch.equal(greedy_logits(engine, 6), reference)


def test_a_budget_below_the_smallest_is_refused_and_names_it(demo_pack: Path, smallest_ram: int) -> None:
    with pytest.raises(BudgetError, match=str(smallest_ram)):
        load(demo_pack, ram=smallest_ram - 1)


def test_a_text_it_was_trained_on_is_continued_in_english(demo_pack: Path) -> None:
    with load(demo_pack) as engine:
        ids = engine.tokenizer.encode(
            "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
            parse_special=True,
        )
        tokens = [token.token_id for token in engine.generate(ids, SamplingParams(max_tokens=20))]
        assert engine.tokenizer.decode(tokens) == "The capital of France is Paris."


def test_prefill_in_chunks_continues_the_same_context(demo_pack: Path) -> None:
    with load(demo_pack, kernels="torch", kv_dtype="f32") as engine:
        ids = engine.tokenizer.encode(PROMPT)
        whole = engine.forward(ids, engine.new_kv(), all_logits=True)
        kv = engine.new_kv()
        parts = [engine.forward(part, kv, all_logits=True) for part in (ids[:5], ids[5:6], ids[6:])]
        torch.testing.assert_close(torch.cat(parts), whole, atol=1e-4, rtol=0)


def test_a_second_turn_reuses_the_prefix_it_shares(demo_pack: Path) -> None:
    with load(demo_pack) as engine:
        ids = engine.tokenizer.encode(PROMPT)
        kv = engine.new_kv()
        first = [token.token_id for token in engine.generate(ids, SamplingParams(max_tokens=4), kv)]
        seen = engine.timings.prefill_tokens
        longer = [*ids, *first, *engine.tokenizer.encode(" He was happy.")]
        reused = [token.token_id for token in engine.generate(longer, SamplingParams(max_tokens=4), kv)]
        assert engine.timings.prefill_tokens - seen == len(longer) - len(ids) - 3
        fresh = [token.token_id for token in engine.generate(longer, SamplingParams(max_tokens=4))]
        assert reused == fresh


def test_generation_stops_where_the_context_ends(demo_pack: Path) -> None:
    with Engine.load(demo_pack, context_length=16) as engine:
        ids = engine.tokenizer.encode(PROMPT)[:10]
        tokens = list(engine.generate(ids, SamplingParams(max_tokens=100, ignore_eos=True)))
        assert len(tokens) == 16 - 10 + 1  # the last token needs no room: nothing follows it


def test_a_prompt_that_does_not_fit_is_refused(demo_pack: Path) -> None:
    with Engine.load(demo_pack, context_length=8) as engine, pytest.raises(UsageError, match="context of 8"):
        next(engine.generate([1] * 9, SamplingParams()))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "the prompt has no tokens"),
        ([-1], "outside of the vocabulary"),
        ([4096], "outside of the vocabulary"),
    ],
)
def test_token_ids_that_are_none_are_refused(demo_pack: Path, ids: list[int], message: str) -> None:
    with load(demo_pack) as engine, pytest.raises(UsageError, match=message):
        next(engine.generate(ids, SamplingParams()))


def test_logprobs_are_sorted_and_hold_the_greedy_choice_first(demo_pack: Path) -> None:
    with load(demo_pack) as engine:
        ids = engine.tokenizer.encode(PROMPT)
        tokens = list(engine.generate(ids, SamplingParams(max_tokens=3, logprobs=4, ignore_eos=True)))
        assert len(tokens) == 3
        for token in tokens:
            assert token.top_logprobs[0] == (token.token_id, token.logprob)
            values = [logprob for _, logprob in token.top_logprobs]
            assert values == sorted(values, reverse=True)
            assert len(values) == 4


def test_an_unknown_architecture_is_refused_and_the_known_ones_listed() -> None:
    from runtime.families.registry import find_family

    with pytest.raises(UnsupportedError, match="qwen3moe"):
        find_family("mamba")

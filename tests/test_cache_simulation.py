"""A simulated cache does what the engine's cache does, and counts what a definition would count."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmpack.expert_key import ExpertKey
from lmpack.pack import Pack
from profiles.cache_simulation import CacheFigures, simulate, trace_demands
from profiles.policies.lru import LRU
from profiles.policy_choice import PolicyChoice
from profiles.policy_comparison import compare_policies
from profiles.routing_profile import RoutingProfile
from profiles.routing_recorder import RoutingRecorder
from profiles.routing_shape import RoutingShape
from profiles.slot_pool import SlotPool
from runtime.engine import Engine
from runtime.sampler import SamplingParams
from tests.smallest_budget import smallest_budget
from tests.tiny_routing import ORIGIN, SHAPE, record

if TYPE_CHECKING:
    from pathlib import Path

    from profiles.routing_trace import RoutingTrace

TEXT = "Once upon a time there was a little rabbit who lived in a hollow tree."


def run_engine(pack: Path, **options: Any) -> tuple[CacheFigures, RoutingTrace, list[SlotPool]]:
    """Prefill and decode; what the cache counted, what was chosen, and the slots there were."""
    recorder = RoutingRecorder(RoutingShape.of_manifest(Pack.open(pack).manifest), keep_trace=True)
    with Engine.load(pack, context_length=128, num_threads=1, recorder=recorder, **options) as engine:
        ids = engine.tokenizer.encode(TEXT)
        for _ in range(2):
            ran = ids + [token.token_id for token in engine.generate(ids, SamplingParams(max_tokens=12))]
            recorder.end_prompt(ran[: recorder.num_pending], len(ids))
        cache, budget = engine.cache, engine.budget
        pools = [
            SlotPool(num_slots, layout.layers)
            for layout, num_slots in zip(budget.layouts, budget.slots, strict=True)
        ]
        return (
            CacheFigures(cache.hits, cache.misses, cache.evictions),
            recorder.trace(replace(ORIGIN, architecture="qwen3moe")),
            pools,
        )


@pytest.fixture(scope="module")
def smallest_ram(demo_pack: Path) -> int:
    return smallest_budget(lambda: Engine.load(demo_pack, ram=1, context_length=128))


@pytest.mark.parametrize("extra_nbytes", [0, 6 << 20])
@pytest.mark.parametrize("policy", ["lru", "layer+lrfu", "s3fifo"])
def test_the_engines_hits_misses_and_evictions_are_the_simulated_ones(
    demo_pack: Path, smallest_ram: int, policy: str, extra_nbytes: int
) -> None:
    counted, trace, pools = run_engine(demo_pack, ram=smallest_ram + extra_nbytes, policy=policy)
    assert counted.evictions > 0
    bound, run = compare_policies(trace, pools, [PolicyChoice.parse(policy)])
    assert run.policy == policy
    assert run.total == counted
    assert bound.total.misses <= counted.misses


def test_they_are_so_after_a_warm_start_too(demo_pack: Path, smallest_ram: int, tmp_path: Path) -> None:
    _, trace, _ = run_engine(demo_pack)
    profile = RoutingProfile.from_trace(trace)
    profile.save(tmp_path / "p.safetensors")
    options = {"ram": smallest_ram + (6 << 20), "policy": "pin+layer+slru"}
    counted, trace, pools = run_engine(demo_pack, warm=tmp_path / "p.safetensors", **options)
    choices = [PolicyChoice.parse("pin+layer+slru")]
    most_used = profile.most_used()
    _, warm = compare_policies(trace, pools, choices, most_used, most_used)
    _, cold = compare_policies(trace, pools, choices, most_used)
    assert warm.total == counted
    assert warm.total.misses < cold.total.misses


@settings(max_examples=40)
@given(chunks=st.lists(st.integers(1, 5), min_size=1, max_size=12), seed=st.integers(0, 99))
def test_demands_are_each_chunks_distinct_experts_layer_by_layer(chunks: list[int], seed: int) -> None:
    trace = record([chunks], seed=seed).trace(ORIGIN)
    demands = list(trace_demands(trace, SlotPool(6, SHAPE.layers)))
    assert [demand.keys[0].layer for demand in demands] == list(SHAPE.layers) * len(chunks)
    first = 0
    for number, num_tokens in enumerate(chunks):
        ids = trace.topk_ids[first : first + num_tokens]
        for index, layer in enumerate(SHAPE.layers):
            demand = demands[number * len(SHAPE.layers) + index]
            assert set(demand.keys) == {ExpertKey(layer, int(expert)) for expert in ids[:, index].ravel()}
            assert len(set(demand.keys)) == len(demand.keys)
            assert demand.is_decode == (num_tokens == 1)
        first += num_tokens


def test_more_experts_than_slots_come_in_waves() -> None:
    trace = record([[40]]).trace(ORIGIN)  # forty tokens want all six, four and five experts
    demands = trace_demands(trace, SlotPool(4, SHAPE.layers))
    assert [(demand.keys[0].layer, len(demand.keys)) for demand in demands] == [
        (1, 4),
        (1, 2),
        (2, 4),
        (4, 4),
        (4, 1),
    ]


def test_a_pool_sees_the_demands_of_its_layers_only() -> None:
    trace = record([[3, 1]]).trace(ORIGIN)
    assert {key.layer for demand in trace_demands(trace, SlotPool(9, (1, 4))) for key in demand.keys} == {
        1,
        4,
    }


def test_with_room_for_all_every_expert_misses_once() -> None:
    trace = record([[3, *[1] * 50]]).trace(ORIGIN)
    pool = SlotPool(sum(SHAPE.num_experts), SHAPE.layers)
    result = simulate(trace_demands(trace, pool), pool, LRU())
    distinct = sum(len(np.unique(trace.topk_ids[:, index])) for index in range(len(SHAPE.layers)))
    assert result.total.misses == distinct
    assert result.total.evictions == 0
    assert result.prefill.hits == 0
    assert result.decode.hits + result.decode.misses == 50 * len(SHAPE.layers) * SHAPE.top_k


@settings(max_examples=40)
@given(seed=st.integers(0, 99), num_slots=st.integers(SHAPE.top_k, 15))
def test_no_policy_misses_less_than_the_bound_and_all_serve_the_same_look_ups(
    seed: int, num_slots: int
) -> None:
    trace = record([[4, 1, 1, 1], [2, 1, 1]], seed=seed).trace(ORIGIN)
    choices = [PolicyChoice(order) for order in ("lru", "lfu", "slru", "lrfu", "s3fifo")]
    bound, *runs = compare_policies(trace, [SlotPool(num_slots, SHAPE.layers)], choices)
    for run in runs:
        assert run.total.misses >= bound.total.misses
        assert run.total.hits + run.total.misses == bound.total.hits + bound.total.misses
        assert run.total.misses - run.total.evictions == bound.total.misses - bound.total.evictions


def test_a_warm_start_has_the_first_experts_there_and_lets_the_first_go_last() -> None:
    warm = [ExpertKey(layer, expert) for layer in SHAPE.layers for expert in range(2)]
    pool = SlotPool(4, SHAPE.layers)
    policy = LRU()
    result = simulate([], pool, policy, [ExpertKey(3, 0), *warm])  # no layer 3 here
    assert result.total == CacheFigures()
    assert [policy.victim(warm[5], set(warm[:place])) for place in range(3)] == [warm[3]] * 3


def test_a_run_that_starts_with_all_experts_misses_none() -> None:
    trace = record([[1, 1]]).trace(ORIGIN)
    everything = [
        ExpertKey(layer, expert)
        for layer, num_experts in zip(SHAPE.layers, SHAPE.num_experts, strict=True)
        for expert in range(num_experts)
    ]
    pool = SlotPool(len(everything), SHAPE.layers)
    cold, warm = (
        simulate(trace_demands(trace, pool), pool, LRU(), start).total for start in ((), everything)
    )
    assert cold.misses == sum(len(np.unique(trace.topk_ids[:, row])) for row in range(SHAPE.num_layers))
    assert warm == CacheFigures(2 * SHAPE.num_layers * SHAPE.top_k, 0, 0)


def test_no_look_ups_count_as_all_hits() -> None:
    assert CacheFigures().hit_rate == 1.0
    assert (CacheFigures(3, 1, 0) + CacheFigures(0, 4, 2)).hit_rate == 3 / 8

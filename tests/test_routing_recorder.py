"""The recorder counts exactly what the layers report, however the tokens are chunked."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from profiles.routing_recorder import RoutingRecorder
from tests.tiny_routing import ORIGIN, SHAPE, feed, random_choices, record


def test_counts_and_transitions_equal_a_count_token_by_token() -> None:
    ids, weights = random_choices(40, seed=3)
    recorder = RoutingRecorder(SHAPE)
    feed(recorder, ids, weights, [40])
    recorder.end_prompt(range(40), 40)
    profile = recorder.profile(ORIGIN)
    counts = np.zeros((3, 6), np.int64)
    transitions = np.zeros((2, 6, 6), np.int64)
    for token in ids:
        for layer in range(3):
            for expert in token[layer]:
                counts[layer, expert] += 1
                for following in token[layer + 1] if layer < 2 else ():
                    transitions[layer, expert, following] += 1
    assert np.array_equal(profile.counts, counts)
    assert np.array_equal(profile.transitions, transitions)


@pytest.mark.parametrize("chunks", [[30], [16, 14], [7] + [1] * 23, [1] * 30])
def test_chunks_do_not_change_the_counts(chunks: list[int]) -> None:
    ids, weights = random_choices(30, seed=5)
    whole, chunked = (RoutingRecorder(SHAPE, keep_trace=True) for _ in range(2))
    feed(whole, ids, weights, [30])
    feed(chunked, ids, weights, chunks)
    for recorder in (whole, chunked):
        recorder.end_prompt(range(30), 1)
    assert chunked.profile(ORIGIN) == whole.profile(ORIGIN)
    trace = chunked.trace(ORIGIN)
    assert np.array_equal(trace.topk_ids, ids)
    assert np.array_equal(trace.topk_weights, weights)
    assert np.array_equal(np.diff(trace.chunk_offsets), chunks)


def test_prompt_and_generated_tokens_are_both_counted_and_told_apart() -> None:
    profile = record([[5, 1, 1], [3, 1]]).profile(ORIGIN)
    assert profile.num_tokens == 11
    assert profile.num_prompt_tokens == 8
    assert profile.counts.sum() == 11 * 3 * 2


def test_a_prompt_longer_than_the_first_buffer_keeps_its_beginning() -> None:
    chunks = [400, 400, 1200]
    trace = record([chunks]).trace(ORIGIN)
    ids, weights = random_choices(2000, seed=0)
    assert np.array_equal(trace.topk_ids, ids)
    assert np.array_equal(trace.topk_weights, weights)


def test_an_open_prompt_is_not_counted() -> None:
    recorder = record([[4]])
    ids, weights = random_choices(3, seed=1)
    feed(recorder, ids, weights, [3])
    assert recorder.num_pending == 3
    recorder.on_select(1, ids[:1, 0], weights[:1, 0])
    assert recorder.num_pending == 3
    assert recorder.profile(ORIGIN).num_tokens == 4
    assert recorder.trace(ORIGIN).num_tokens == 4


def test_a_recorder_that_saw_nothing_gives_an_empty_profile_and_trace() -> None:
    recorder = RoutingRecorder(SHAPE, keep_trace=True)
    assert recorder.profile(ORIGIN).num_tokens == 0
    assert recorder.trace(ORIGIN).num_tokens == 0


def test_calls_out_of_order_are_refused() -> None:
    ids, weights = random_choices(2, seed=0)
    recorder = RoutingRecorder(SHAPE)
    with pytest.raises(ValueError, match="layer 2 reported its choices where layer 1 was due"):
        recorder.on_select(2, ids[:, 0], weights[:, 0])
    recorder.on_select(1, ids[:, 0], weights[:, 0])
    with pytest.raises(ValueError, match="1 tokens of a chunk of 2"):
        recorder.on_select(2, ids[:1, 1], weights[:1, 1])
    with pytest.raises(ValueError, match="before layer 2 reported"):
        recorder.end_prompt([], 0)


@pytest.mark.parametrize(
    ("token_ids", "num_prompt_tokens"), [([7], 1), ([7, 8, 9], 1), ([7, 8], 0), ([7, 8], 3)]
)
def test_token_ids_that_do_not_fit_the_recorded_tokens_are_refused(
    token_ids: list[int], num_prompt_tokens: int
) -> None:
    recorder = RoutingRecorder(SHAPE)
    feed(recorder, *random_choices(2, seed=0), [2])
    with pytest.raises(ValueError, match="2 tokens that passed"):
        recorder.end_prompt(token_ids, num_prompt_tokens)


@pytest.mark.parametrize("expert", [-1, 4, 40_000])
def test_an_expert_that_the_layer_does_not_have_is_refused(expert: int) -> None:
    ids, weights = random_choices(2, seed=0)
    ids[1, 1, 0] = expert
    recorder = RoutingRecorder(SHAPE)
    feed(recorder, ids, weights, [2])
    with pytest.raises(ValueError, match="outside of its layer"):
        recorder.end_prompt([0, 1], 2)


def test_a_trace_must_be_asked_for_beforehand() -> None:
    with pytest.raises(ValueError, match="keep_trace"):
        record([[2]], keep_trace=False).trace(ORIGIN)


def test_profiles_need_no_torch() -> None:
    script = "import sys, profiles.routing_recorder, profiles.prompt_file; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"

"""Sampling: what each filter keeps, and that a seed decides."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from lmpack.errors import UsageError
from runtime.sampler import Sampler, SamplingParams

LOGITS = torch.tensor([0.0, 2.0, 1.0, -1.0, 1.5])


def draws(params: SamplingParams, count: int = 400, past: tuple[int, ...] = ()) -> Counter[int]:
    sampler = Sampler(params)
    return Counter(sampler.sample(LOGITS, past) for _ in range(count))


def test_temperature_zero_takes_the_likeliest() -> None:
    assert draws(SamplingParams(), 5) == {1: 5}


def test_a_seed_decides_the_tokens() -> None:
    def sequence(seed: int) -> list[int]:
        sampler = Sampler(SamplingParams(temperature=1.0, seed=seed))
        return [sampler.sample(LOGITS, ()) for _ in range(50)]

    assert sequence(7) == sequence(7)
    assert sequence(7) != sequence(8)


def test_plain_sampling_follows_the_softmax() -> None:
    count = 4000
    seen = draws(SamplingParams(temperature=1.0), count)
    for token, probability in enumerate(LOGITS.softmax(-1).tolist()):
        assert seen[token] / count == pytest.approx(probability, abs=0.03)


def test_a_high_temperature_flattens() -> None:
    assert draws(SamplingParams(temperature=100.0))[3] > 50


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-6])
def test_the_lowest_temperatures_take_the_likeliest(temperature: float) -> None:
    assert draws(SamplingParams(temperature=temperature), 5) == {1: 5}


def test_top_k_keeps_the_k_likeliest() -> None:
    assert set(draws(SamplingParams(temperature=1.0, top_k=2))) == {1, 4}


def test_top_p_keeps_the_smallest_set_that_holds_the_mass() -> None:
    probabilities = LOGITS.softmax(-1)
    just_over_the_best = float(probabilities[1]) + 0.01
    assert set(draws(SamplingParams(temperature=1.0, top_p=just_over_the_best))) == {1, 4}
    assert set(draws(SamplingParams(temperature=1.0, top_p=float(probabilities[1]) - 0.01))) == {1}


def test_min_p_is_relative_to_the_likeliest() -> None:
    # exp(1.5 - 2) = 0.607, exp(1 - 2) = 0.368
    assert set(draws(SamplingParams(temperature=1.0, min_p=0.5))) == {1, 4}
    assert set(draws(SamplingParams(temperature=1.0, min_p=0.3))) == {1, 2, 4}


def test_the_repetition_penalty_spares_tokens_outside_of_its_window() -> None:
    greedy = SamplingParams(repetition_penalty=2.0, repetition_window=2)
    assert Sampler(greedy).sample(LOGITS, [1]) == 4
    assert Sampler(greedy).sample(LOGITS, [1, 3, 3]) == 1


def test_the_repetition_penalty_pushes_negative_logits_down() -> None:
    negative = torch.tensor([-1.0, -1.5])
    assert Sampler(SamplingParams(repetition_penalty=2.0)).sample(negative, [0]) == 1


def test_sampling_leaves_the_logits_alone() -> None:
    before = LOGITS.clone()
    Sampler(SamplingParams(temperature=0.5, repetition_penalty=3.0, top_k=3)).sample(LOGITS, [1, 2])
    assert torch.equal(before, LOGITS)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("seed", -1),
        ("max_tokens", -1),
        ("stop", ("",)),
    ],
)
def test_a_parameter_that_means_nothing_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(UsageError, match=name):
        SamplingParams(**{name: value})  # type: ignore[arg-type]

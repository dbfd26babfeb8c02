"""Guesses for the next layer on the trained demo model: they change what is read and when, and no bit of a result."""

from __future__ import annotations

import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from lmpack.errors import ProfileError, StorageError, UsageError
from lmpack.pack import Pack
from profiles.routing_profile import RoutingProfile
from profiles.routing_recorder import RoutingRecorder
from profiles.routing_shape import RoutingShape
from runtime.engine import Engine
from runtime.transition_predictor import TransitionPredictor
from tests.smallest_budget import smallest_budget
from tests.tiny_routing import ORIGIN, record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from profiles.routing_trace import RoutingTrace
    from runtime.expert_fetch import Fetch
    from runtime.prefetcher import Prefetcher

PROMPT = "Once upon a time there was a little rabbit who lived in a hollow tree."
NUM_TOKENS = 12


class WrongGuess:
    """A prefetcher that guesses, before what it is told of the layer after this one, an expert that nobody takes."""

    def __init__(self, prefetcher: Prefetcher, layer: int, spare: list[int]) -> None:
        self.prefetcher = prefetcher
        self.layer = layer
        self.spare = spare
        self.num_guesses = 0

    def begin(self, layer: int, experts: Sequence[int], guess: Sequence[int] | None) -> Fetch:
        assert layer == self.layer
        assert guess is not None
        self.num_guesses += 1
        return self.prefetcher.begin(layer, experts, [self.spare[self.num_guesses % len(self.spare)], *guess])


def kernel_read_nbytes() -> int:
    """What read(2) and its kin have given this process so far."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text("ascii").splitlines())
    return int(fields["rchar"])


def load(pack: Path, **options: Any) -> Engine:
    return Engine.load(pack, context_length=64, num_threads=1, **options)


def decode(engine: Engine) -> torch.Tensor:
    """Logits after a prompt and after each of the tokens that the model chooses."""
    kv = engine.new_kv()
    rows = [engine.forward(engine.tokenizer.encode(PROMPT), kv)]
    for _ in range(NUM_TOKENS):
        rows.append(engine.forward([int(rows[-1].argmax())], kv))
    return torch.cat(rows)


@pytest.fixture(scope="module")
def ram(demo_pack: Path) -> int:
    """Little more than the smallest legal budget in bytes."""
    return smallest_budget(lambda: load(demo_pack, ram=1)) + (1 << 20)


@pytest.fixture(scope="module")
def recorded(demo_pack: Path) -> tuple[torch.Tensor, RoutingTrace]:
    """Logits without a guess, and the experts that were taken."""
    shape = RoutingShape.of_manifest(Pack.open(demo_pack).manifest)
    recorder = RoutingRecorder(shape, keep_trace=True)
    with load(demo_pack, recorder=recorder) as engine:
        logits = decode(engine)
    num_prompt_tokens = recorder.num_pending - NUM_TOKENS
    recorder.end_prompt([1] * recorder.num_pending, num_prompt_tokens)
    return logits, recorder.trace(replace(ORIGIN, architecture="qwen3moe"))


@pytest.fixture(scope="module")
def profile(
    recorded: tuple[torch.Tensor, RoutingTrace], demo_pack: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    path = tmp_path_factory.mktemp("profile") / "demo.profile.safetensors"
    counted = RoutingProfile.from_trace(recorded[1])
    counted.save(path)
    return path


@pytest.fixture(params=["router", "profile"])
def prefetch(request: pytest.FixtureRequest, profile: Path) -> str:
    return "router" if request.param == "router" else f"profile:{profile}"


@pytest.mark.parametrize("io", ["mmap", "direct"])
def test_guesses_come_true_and_change_no_bit(
    demo_pack: Path, ram: int, prefetch: str, io: str, recorded: tuple[torch.Tensor, RoutingTrace]
) -> None:
    with load(demo_pack, ram=ram, io=io, prefetch=prefetch) as engine:
        assert torch.equal(decode(engine), recorded[0])
        stats = engine.stats()
    assert stats.prefetch == prefetch.split(":")[0]
    assert stats.useful_guesses > 0
    assert 0 < stats.guesses_right <= min(stats.guessed, stats.guesses_needed)
    assert f"guesses   by {stats.prefetch}: " in stats.describe()


def test_what_the_drive_gave_for_guesses_in_vain_is_counted_while_they_are_here(demo_pack: Path) -> None:
    with load(demo_pack, prefetch="router", io="direct") as engine:
        before = kernel_read_nbytes()
        decode(engine)
        engine.cache.close()  # no read is under way
        read_nbytes = kernel_read_nbytes() - before
        stats = engine.stats()
    assert stats.useful_guesses < stats.guessed
    assert read_nbytes - 4096 < stats.bytes_read <= read_nbytes  # reading the kernel's file counts as well


def test_hits_that_wait_for_the_misses_give_the_same_bits(
    demo_pack: Path, ram: int, recorded: tuple[torch.Tensor, RoutingTrace]
) -> None:
    with load(demo_pack, ram=ram) as engine:
        for moe in engine.model.moes:
            moe.hits_first = False
        assert torch.equal(decode(engine), recorded[0])


def test_nothing_is_guessed_when_every_expert_is_resident(demo_pack: Path, prefetch: str) -> None:
    experts = Pack.open(demo_pack).manifest.layers
    with load(demo_pack, prefetch=prefetch) as engine:
        for entry in experts:
            engine.cache.fetch(entry.layer, range(entry.num_experts))
        decode(engine)
        stats = engine.stats()
    assert (stats.guessed, stats.guess_precision, stats.guess_recall) == (0, None, None)
    assert "guesses" not in stats.describe()


def test_the_router_guesses_better_than_the_busiest_experts_would(
    demo_pack: Path, ram: int, recorded: tuple[torch.Tensor, RoutingTrace]
) -> None:
    trace = recorded[1]
    decoded = trace.topk_ids[-NUM_TOKENS:, 1:]
    counts = RoutingProfile.from_trace(trace).counts[1:]
    busiest = np.argsort(-counts, axis=1)[:, : trace.shape.top_k]
    by_popularity = np.mean(
        [np.isin(token, busiest[layer]) for layer in range(len(busiest)) for token in decoded[:, layer]]
    )
    with load(demo_pack, ram=ram, prefetch="router") as engine:
        decode(engine)
        precision = engine.stats().guess_precision
    assert precision is not None
    assert precision > by_popularity


def test_a_profile_guesses_those_that_followed_most_often() -> None:
    recorder = record([[40]], keep_trace=True)
    trace = recorder.trace(ORIGIN)
    predictor = TransitionPredictor(recorder.profile(ORIGIN))
    for index, layer in ((1, 2), (2, 4)):
        before, after = trace.topk_ids[:, index - 1], trace.topk_ids[:, index]
        for experts in ([0, 1], [3, 2]):
            shares = np.zeros(trace.shape.num_experts[index])
            for expert in experts:
                followers = after[(before == expert).any(1)]
                shares += np.bincount(followers.ravel(), minlength=len(shares)) / len(followers)
            guessed = predictor.predict(layer, experts)
            assert len(guessed) == 2
            np.testing.assert_allclose(shares[guessed], np.sort(shares)[::-1][:2], rtol=1e-6)


def test_a_guess_that_cannot_be_read_harms_nobody_until_it_is_needed(
    demo_pack: Path,
    ram: int,
    recorded: tuple[torch.Tensor, RoutingTrace],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pack = tmp_path / "m.lmpack"
    shutil.copytree(demo_pack, pack)
    logits, trace = recorded
    index = trace.shape.num_layers - 1
    layer = trace.shape.layers[index]
    taken = set(trace.topk_ids[:, index].ravel().tolist())
    spare = sorted(set(range(trace.shape.num_experts[index])) - taken)
    with load(pack, ram=ram, io="direct", prefetch="router") as engine:
        assert spare, "the text takes every expert: choose a shorter one"
        for expert in spare:
            os.truncate(pack / "experts" / f"L{layer:03d}" / f"E{expert:04d}.bin", 100)
        before = engine.model.moes[index - 1]
        assert before.prefetcher is not None
        wrong = WrongGuess(before.prefetcher, before.layer, spare)
        monkeypatch.setattr(before, "prefetcher", wrong)
        assert torch.equal(decode(engine), logits)
        assert wrong.num_guesses == NUM_TOKENS
        with pytest.raises(StorageError, match=rf"L{layer:03d}/E{spare[0]:04d}"):
            engine.cache.fetch(layer, [spare[0]])
        assert torch.equal(decode(engine), logits)


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # Python loses some in destructors
def test_an_interrupt_in_the_middle_of_a_token_harms_nothing(
    demo_pack: Path, ram: int, prefetch: str, recorded: tuple[torch.Tensor, RoutingTrace]
) -> None:
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with load(demo_pack, ram=ram, prefetch=prefetch) as engine:
            for number in range(1, 9):
                with pytest.raises(KeyboardInterrupt):
                    while True:
                        if signal.getitimer(signal.ITIMER_REAL)[0] == 0:  # one was lost
                            signal.setitimer(signal.ITIMER_REAL, 0.004 * number)
                        decode(engine)
            assert torch.equal(decode(engine), recorded[0])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_word_that_is_no_predictor_is_refused(demo_pack: Path) -> None:
    for word in ("oracle", "profile", "profile:", ""):
        with pytest.raises(UsageError, match="expected off, router or profile:FILE"):
            load(demo_pack, prefetch=word)


def test_another_models_profile_is_refused(demo_pack: Path, tmp_path: Path) -> None:
    record([[4]]).profile(ORIGIN).save(tmp_path / "p.safetensors")
    with pytest.raises(ProfileError, match=r"p\.safetensors is the profile of another model: architecture"):
        load(demo_pack, prefetch=f"profile:{tmp_path / 'p.safetensors'}")

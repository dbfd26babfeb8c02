"""Speed: how fast an engine runs prompts and answers, and what its expert cache did meanwhile."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runtime.sampler import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from runtime.engine import Engine


@dataclass(frozen=True, slots=True)
class Phase:
    """A prompt or an answer: what it took, and the look-ups and reads of its experts."""

    num_tokens: int
    seconds: float
    hits: int
    misses: int
    bytes_read: int
    read_s: float  # spent waiting for experts


@dataclass(frozen=True, slots=True)
class Repetition:
    """One prompt, and the answer to it; None where no answer was asked for."""

    prompt: Phase
    answer: Phase | None


def measure_repetitions(
    engine: Engine,
    token_ids: Sequence[int],
    *,
    prompt_tokens: int,
    answer_tokens: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Repetition]:
    """Yield one repetition after the other, without end; each prompt goes on in `token_ids` where the last one ended.

    An answer's first token comes out of the prompt, so that the time of an answer is that of `answer_tokens` forward
    passes of one token, as in llama.cpp's llama-bench.
    """
    text = itertools.cycle(token_ids)
    params = SamplingParams(max_tokens=answer_tokens + 1, ignore_eos=True)
    while True:
        prompt_ids = list(itertools.islice(text, prompt_tokens))
        watch = _Watch(engine, clock)
        tokens = engine.generate(prompt_ids, params)
        next(tokens)
        prompt = watch.phase(prompt_tokens)
        num_answered = sum(1 for _ in tokens)
        yield Repetition(prompt, watch.phase(num_answered) if num_answered else None)


class _Watch:
    """Tells phases apart: what was spent since it was made or last asked."""

    def __init__(self, engine: Engine, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._clock = clock
        self._before = engine.stats()
        self._started = clock()

    def phase(self, num_tokens: int) -> Phase:
        ended, after, before = self._clock(), self._engine.stats(), self._before
        spent = Phase(
            num_tokens,
            ended - self._started,
            after.hits - before.hits,
            after.misses - before.misses,
            after.bytes_read - before.bytes_read,
            after.read_s - before.read_s,
        )
        self._before, self._started = after, self._clock()
        return spent

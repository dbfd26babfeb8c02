"""One GGUF, run by llama.cpp from the file and by us from its pack; or by llama.cpp twice, to see its own noise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from runtime.engine import Engine
from tests.agreement import Agreement, Parting, find_parting
from tests.engine_answers import continue_greedily, score_windows
from tests.llamacpp_oracle import LlamaCppOracle

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tests.llamacpp_oracle import Candidates

NUM_CANDIDATES = 512  # of 4,096; the rest holds a thousandth of the probability
NUM_STEP_CANDIDATES = 64  # of a greedy step; another engine's choice is among them, unless it is wrong


@dataclass(frozen=True, slots=True)
class Task:
    """What every engine is asked, in token ids: windows to score, prompts to continue."""

    windows: Sequence[Sequence[int]]
    prompts: Sequence[Sequence[int]]
    num_tokens: int  # of a continuation
    num_candidates: int = NUM_CANDIDATES

    @property
    def context_length(self) -> int:
        """Tokens of the longest window, or prompt and continuation."""
        return max([*map(len, self.windows), *(len(prompt) + self.num_tokens for prompt in self.prompts)])


@dataclass(frozen=True, slots=True)
class LlamaCppAnswers:
    """llama.cpp's distributions: one per position of the windows, and the steps of each continuation."""

    scored: list[Candidates]
    continued: list[list[Candidates]]
    vocab_size: int

    def as_logits(self) -> NDArray[np.float32]:
        """[num_positions, vocab]; what the candidates leave is spread evenly over the other tokens."""
        rows = np.empty((len(self.scored), self.vocab_size), np.float32)
        for row, candidates in zip(rows, self.scored, strict=True):
            rest = max(1 - float(np.exp(candidates.logprobs).sum()), 1e-6)
            row[:] = math.log(rest / max(self.vocab_size - len(candidates.token_ids), 1))
            row[candidates.token_ids] = candidates.logprobs
        return rows

    def token_ids(self) -> list[list[int]]:
        """The continuations."""
        return [[int(step.token_ids[0]) for step in steps] for steps in self.continued]


@dataclass(frozen=True, slots=True)
class GgufAgreement:
    """How an engine compares with llama.cpp over a teacher-forced text and over greedy continuations."""

    text: Agreement
    num_prompts: int
    partings: tuple[Parting, ...]

    @classmethod
    def of(
        cls,
        reference: LlamaCppAnswers,
        logits: NDArray[np.float32],
        continuations: Sequence[Sequence[int]],
    ) -> GgufAgreement:
        """Logits [num_positions, vocab] and continuations of another engine against the reference's."""
        partings = [
            find_parting(number, steps, token_ids)
            for number, (steps, token_ids) in enumerate(zip(reference.continued, continuations, strict=True))
        ]
        return cls(
            Agreement.of_candidates(reference.scored, logits),
            len(partings),
            tuple(parting for parting in partings if parting is not None),
        )

    @property
    def num_identical(self) -> int:
        """Continuations equal to the last token."""
        return self.num_prompts - len(self.partings)

    @property
    def num_near_ties(self) -> int:
        """Continuations that part where rounding may have decided."""
        return sum(parting.is_near_tie for parting in self.partings)


def ask_llamacpp(
    gguf: Path, task: Task, *, kv_dtype: str, num_threads: int = 1, flash_attention: bool = False
) -> LlamaCppAnswers:
    """Load the file, do the task, free it."""
    with LlamaCppOracle(
        gguf,
        context_length=task.context_length,
        num_threads=num_threads,
        kv_dtype=kv_dtype,
        flash_attention=flash_attention,
    ) as oracle:
        scored = [
            candidates
            for window in task.windows
            for candidates in oracle.teacher_forced(window, task.num_candidates)
        ]
        continued = [oracle.greedy(prompt, task.num_tokens, NUM_STEP_CANDIDATES) for prompt in task.prompts]
        return LlamaCppAnswers(scored, continued, oracle.vocab_size)


def compare_with_llamacpp(
    reference: LlamaCppAnswers,
    pack: Path,
    task: Task,
    *,
    kv_dtype: str,
    num_threads: int = 1,
    kernels: str = "auto",
) -> GgufAgreement:
    """Do the task with our engine and compare."""
    with Engine.load(
        pack,
        context_length=task.context_length,
        num_threads=num_threads,
        kernels=kernels,
        kv_dtype=kv_dtype,
    ) as engine:
        continuations = [continue_greedily(engine, prompt, task.num_tokens) for prompt in task.prompts]
        return GgufAgreement.of(reference, score_windows(engine, task.windows), continuations)

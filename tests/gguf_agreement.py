"""One GGUF, run by llama.cpp from the file and by us from its pack."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from runtime.engine import Engine
from tests.agreement import Agreement, Parting, find_parting
from tests.engine_answers import continue_greedily, score_windows
from tests.llamacpp_oracle import LlamaCppOracle

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

NUM_CANDIDATES = 512  # of 4,096; the rest holds a thousandth of the probability


@dataclass(frozen=True, slots=True)
class GgufAgreement:
    """How ours compares with llama.cpp over a teacher-forced text and over greedy continuations."""

    text: Agreement
    num_prompts: int
    partings: tuple[Parting, ...]

    @property
    def num_identical(self) -> int:
        """Continuations equal to the last token."""
        return self.num_prompts - len(self.partings)

    @property
    def num_near_ties(self) -> int:
        """Continuations that part where rounding may have decided."""
        return sum(parting.is_near_tie for parting in self.partings)


def compare_with_llamacpp(
    gguf: Path,
    pack: Path,
    windows: Sequence[Sequence[int]],
    prompts: Sequence[Sequence[int]],
    *,
    num_tokens: int,
    num_candidates: int = NUM_CANDIDATES,
    kv_dtype: str = "f16",
    num_threads: int = 1,
    kernels: str = "auto",
) -> GgufAgreement:
    """Score `windows` and continue `prompts` (token ids) by `num_tokens` tokens with both; one at a time in memory."""
    longest = max([*map(len, windows), *(len(prompt) + num_tokens for prompt in prompts)])
    with LlamaCppOracle(gguf, context_length=longest, num_threads=num_threads, kv_dtype=kv_dtype) as oracle:
        scored = [
            candidates for window in windows for candidates in oracle.teacher_forced(window, num_candidates)
        ]
        continued = [oracle.greedy(prompt, num_tokens, num_candidates=64) for prompt in prompts]
    with Engine.load(
        pack, context_length=longest, num_threads=num_threads, kernels=kernels, kv_dtype=kv_dtype
    ) as engine:
        text = Agreement.of_candidates(scored, score_windows(engine, windows))
        partings = [
            find_parting(number, reference, continue_greedily(engine, prompt, num_tokens))
            for number, (prompt, reference) in enumerate(zip(prompts, continued, strict=True))
        ]
    return GgufAgreement(text, len(prompts), tuple(parting for parting in partings if parting is not None))

"""One token that an engine has chosen, and how likely it was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class GeneratedToken:
    """One step's choice; log-probabilities are natural logarithms of the unfiltered distribution."""

    token_id: int
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...]  # best first, as many as SamplingParams.logprobs

    @classmethod
    def of(cls, token_id: int, logits: Tensor, num_logprobs: int) -> GeneratedToken:
        """The token that was chosen from logits float32 [vocab]."""
        logprobs = logits.log_softmax(-1)
        best = logprobs.topk(min(num_logprobs, len(logprobs)))
        return cls(
            token_id,
            float(logprobs[token_id]),
            tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True)),
        )

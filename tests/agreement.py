"""How far two engines agree: the same text scored by both, and what each writes on its own.

KL over candidates: a reference that names only its n likeliest tokens gives a distribution over n + 1 outcomes,
the candidates and "any other token". The divergence of ours from it over the same n + 1 outcomes is a true
Kullback-Leibler divergence, never negative, and by the chain rule it is the full one less what the two disagree
on *within* the rest, weighted by the reference's rest. (Renormalising over the candidates instead would forgive
probability that ours moved to other tokens.) With the whole vocabulary as candidates there is no rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tests.llamacpp_oracle import Candidates

_SMALLEST_REST = 1e-4  # float32 sums of the reference are off by 2e-5, which a rest below this would magnify
NEAR_TIE = 0.05  # difference of two log-probabilities within which rounding may decide


@dataclass(frozen=True, slots=True)
class Agreement:
    """Two engines over the same positions of the same text."""

    num_positions: int
    top1: float  # share of positions with the same likeliest token
    mean_kl: float  # nats, of ours from the reference
    max_kl: float

    @classmethod
    def of_candidates(cls, reference: Sequence[Candidates], logits: NDArray[np.float32]) -> Agreement:
        """Our logits [num_positions, vocab] against a reference that named its likeliest tokens."""
        logprobs = log_softmax(logits)
        same = [
            candidates.token_ids[0] == row.argmax() for candidates, row in zip(reference, logits, strict=True)
        ]
        divergences = [_kl(candidates, row) for candidates, row in zip(reference, logprobs, strict=True)]
        return cls._of(same, divergences)

    @classmethod
    def of_logits(cls, reference: NDArray[np.float32], logits: NDArray[np.float32]) -> Agreement:
        """Our logits [num_positions, vocab] against the reference's, over the whole vocabulary."""
        expected, ours = log_softmax(reference), log_softmax(logits)
        divergences = (np.exp(expected) * (expected - ours)).sum(-1)
        return cls._of(reference.argmax(-1) == logits.argmax(-1), divergences)

    @classmethod
    def _of(
        cls, same: Sequence[bool] | NDArray[np.bool_], divergences: Sequence[float] | NDArray[np.float64]
    ) -> Agreement:
        return cls(len(same), float(np.mean(same)), float(np.mean(divergences)), float(np.max(divergences)))


@dataclass(frozen=True, slots=True)
class Parting:
    """The first step at which our greedy continuation is not the reference's."""

    prompt: int
    step: int
    expected_id: int
    token_id: int
    gap: float  # nats: by how much the reference prefers its own token

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding alone may have decided."""
        return self.gap < NEAR_TIE


def find_parting(prompt: int, reference: Sequence[Candidates], token_ids: Sequence[int]) -> Parting | None:
    """Where our continuation leaves the reference's greedy one; None when it does not."""
    for step, (candidates, token_id) in enumerate(zip(reference, token_ids, strict=True)):
        expected_id = int(candidates.token_ids[0])
        if token_id != expected_id:
            gap = candidates.logprob(expected_id) - candidates.logprob(token_id)
            return Parting(prompt, step, expected_id, token_id, gap)
    return None


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Log-probabilities over the last axis, in float64."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


def _kl(reference: Candidates, logprobs: NDArray[np.float64]) -> float:
    """Divergence of `logprobs` [vocab] from the reference over its candidates and the rest."""
    expected, ours = reference.logprobs, logprobs[reference.token_ids]
    probabilities = np.exp(expected)
    divergence = float((probabilities * (expected - ours)).sum())
    if len(expected) == len(logprobs):
        return divergence
    rest = max(1 - float(probabilities.sum()), _SMALLEST_REST)
    our_rest = max(1 - float(np.exp(ours).sum()), _SMALLEST_REST)
    return divergence + rest * math.log(rest / our_rest)

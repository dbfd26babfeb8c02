"""Choosing the next token from logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lmpack.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn; the default is greedy. Filters apply in the order top_k, top_p, min_p.

    temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off; repetition_penalty 1 is off and looks back
    over `repetition_window` tokens; logprobs is how many of the best log-probabilities to report per token; ignore_eos
    keeps going where the model would stop.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    repetition_window: int = 64
    seed: int = 0
    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    logprobs: int = 0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0 <= self.temperature <= 100, "0 (greedy) to 100")
        _check("top_k", self.top_k, self.top_k >= 0, "0 (off) or more")
        _check("top_p", self.top_p, 0 < self.top_p <= 1, "above 0, at most 1")
        _check("min_p", self.min_p, 0 <= self.min_p <= 1, "0 to 1")
        _check("repetition_penalty", self.repetition_penalty, 0 < self.repetition_penalty <= 100, "above 0")
        _check("repetition_window", self.repetition_window, self.repetition_window >= 0, "0 or more")
        _check("seed", self.seed, 0 <= self.seed < 1 << 63, "0 to 2^63 - 1")
        _check("max_tokens", self.max_tokens, self.max_tokens >= 0, "0 or more")
        _check("logprobs", self.logprobs, self.logprobs >= 0, "0 or more")
        _check("stop", self.stop, all(self.stop), "non-empty strings")


def _check(name: str, given: object, good: bool, expected: str) -> None:
    if not good:
        raise UsageError(f"{name} is {given!r}, expected {expected}")


class Sampler:
    """Draws tokens by SamplingParams, reproducibly for a seed."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self.generator = torch.Generator().manual_seed(params.seed)

    def sample(self, logits: Tensor, past_ids: Sequence[int]) -> int:
        """The next token's id from logits float32 [vocab]; `past_ids` are what the penalty looks at."""
        params = self.params
        logits = _penalise(logits, past_ids, params)
        if params.temperature == 0:
            return int(logits.argmax())
        # min_p and top_p look at the untempered distribution, as llama.cpp's default chain does.
        order = logits.argsort(descending=True, stable=True)
        if params.top_k:
            order = order[: params.top_k]
        kept = _nucleus(logits[order].softmax(-1), params)
        best_first = logits[order[:kept]].double()  # float32 would overflow at the lowest temperatures
        tempered = ((best_first - best_first[0]) / params.temperature).softmax(-1)
        drawn = torch.multinomial(tempered.cpu(), 1, generator=self.generator)
        return int(order[drawn])


def _nucleus(probabilities: Tensor, params: SamplingParams) -> int:
    """How many of the sorted probabilities top_p (Holtzman et al. 2020) and min_p (Nguyen et al. 2024) keep."""
    mass_before = probabilities.cumsum(-1) - probabilities
    keep = (mass_before < params.top_p) & (probabilities >= params.min_p * probabilities[0])
    return max(1, int(keep.sum()))


def _penalise(logits: Tensor, past_ids: Sequence[int], params: SamplingParams) -> Tensor:
    """Divide positive and multiply negative logits of recent tokens (CTRL, Keskar et al. 2019, section 4.1)."""
    if params.repetition_penalty == 1 or not past_ids or not params.repetition_window:
        return logits
    recent = torch.tensor(sorted(set(past_ids[-params.repetition_window :])), device=logits.device)
    chosen = logits[recent]
    penalty = params.repetition_penalty
    return logits.index_copy(0, recent, torch.where(chosen > 0, chosen / penalty, chosen * penalty))

"""Attention against a plain float64 softmax, one position at a time."""

from __future__ import annotations

import pytest
import torch

from runtime.kernels.attend import attend_to

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 16


def plain(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None) -> torch.Tensor:
    """The formula, a head and a position at a time, with operands rounded to the cache's dtype."""
    n, past = len(q), keys.shape[1] - len(q)
    out = torch.empty(n, HEADS, HEAD_DIM, dtype=torch.float64)
    for i in range(n):
        first = 0 if window is None else max(0, past + i + 1 - window)
        for head in range(HEADS):
            seen = slice(first, past + i + 1)
            key, value = (t[head // (HEADS // KV_HEADS), seen].double() for t in (keys, values))
            out[i, head] = ((key @ q[i, head].half().double()) / HEAD_DIM**0.5).softmax(
                -1
            ).half().double() @ value
    return out.flatten(1)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(("past", "n"), [(0, 1), (9, 1), (0, 7), (9, 7)])
@pytest.mark.parametrize("block", [1, 3, 1000])
def test_attention_is_the_formula(
    monkeypatch: pytest.MonkeyPatch, past: int, n: int, window: int | None, block: int
) -> None:
    monkeypatch.setattr("runtime.kernels.attend.SCORES_NBYTES", 4 * HEADS * (past + n) * block)
    generator = torch.Generator().manual_seed(past * 10 + n)
    q = torch.randn(n, HEADS, HEAD_DIM, generator=generator)
    keys, values = torch.randn(2, KV_HEADS, past + n, HEAD_DIM, generator=generator).half()
    attended = attend_to(q, keys, values.transpose(1, 2), window)
    torch.testing.assert_close(attended.double(), plain(q, keys, values, window), atol=5e-4, rtol=0)

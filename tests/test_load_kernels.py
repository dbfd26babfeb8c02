"""Choosing kernels by name, their threads, and several at once."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from lmpack.errors import UsageError
from runtime.kernels.kernels import load_kernels
from tests.kernel_cases import HIDDEN, Linear, inputs, weight


def test_auto_is_ggml_where_its_library_loads() -> None:
    kernels = load_kernels("auto", num_threads=1)
    assert kernels.name == "ggml"
    kernels.close()


def test_an_unknown_name_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="auto, torch or ggml"):
        load_kernels("cuda", num_threads=1)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads in /proc")
def test_close_ends_ggmls_threads() -> None:
    def num_threads() -> int:
        return sum(1 for _ in Path("/proc/self/task").iterdir())

    before = num_threads()
    kernels = load_kernels("ggml", num_threads=4)
    assert num_threads() == before + 3
    kernels.close()
    kernels.close()
    assert num_threads() == before


def test_two_ggml_kernels_in_two_threads_do_not_share_results() -> None:
    matrix = weight("Q4_K", 256, HIDDEN)
    x = [inputs(1, HIDDEN, seed=seed) for seed in range(2)]
    wrong: list[int] = []

    def work(number: int) -> None:
        kernels = load_kernels("ggml", num_threads=2)
        block = Linear(matrix)
        expected = kernels.run(block, x[number]).clone()
        for _ in range(50):
            if not torch.equal(kernels.run(block, x[number]), expected):
                wrong.append(number)
        kernels.close()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong

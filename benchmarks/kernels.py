"""How fast the ggml kernels go through weights, and how much of a call is ours.

    python benchmarks/kernels.py [--threads 1,2] [--dtypes Q4_K,Q6_K,Q8_0,BF16] [--json]

One token (n = 1): GB/s of the weights that a call uses, from memory that no cache holds; the slots are drawn anew
for every call. "ggml" is the part of a call inside ggml_graph_compute, "python" the rest of it. 512 tokens: tokens
per second through one layer (experts: top-8 of 128). The first line says what plain reads of the same memory give.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from converters.ggml_base import GGML_TYPE_IDS
from lmpack.dtype import dtype_nbytes
from lmpack.layer_entry import ExpertPart
from runtime.expert_bank import ExpertBank
from runtime.kernels.ggml_library import load_ggml
from runtime.kernels.kernels import ExpertRows, load_kernels
from runtime.kernels.weight import Weight

if TYPE_CHECKING:
    from collections.abc import Callable

    from runtime.kernels.kernels import Kernels
    from runtime.kernels.operations import Operations, T
    from runtime.step import Step

HIDDEN, INNER, NUM_SLOTS, TOP_K = 2048, 768, 128, 8
LINEAR_ROWS = 4096
BANKS_NBYTES = 1 << 30
PREFILL_TOKENS = 512


class ComputeClock:
    """Stands in for ggml_graph_compute and adds up the time inside it."""

    def __init__(self) -> None:
        self._library = load_ggml()
        self._compute = self._library.ggml_graph_compute
        self.seconds: list[float] = []

    def __enter__(self) -> Self:
        self._library.ggml_graph_compute = self  # type: ignore[attr-defined]
        return self

    def __exit__(self, *_: object) -> None:
        self._library.ggml_graph_compute = self._compute  # type: ignore[attr-defined]

    def __call__(self, *arguments: Any) -> Any:
        start = time.perf_counter()
        status = self._compute(*arguments)
        self.seconds.append(time.perf_counter() - start)
        return status


def blocks(dtype: str, num_rows: int, num_columns: int) -> torch.Tensor:
    rows = (
        np.random.default_rng(0).standard_normal((num_rows, num_columns)).astype(np.float32)
        / num_columns**0.5
    )
    out = torch.empty(dtype_nbytes(dtype, rows.shape), dtype=torch.uint8)
    load_ggml().ggml_quantize_chunk(
        GGML_TYPE_IDS[dtype], rows.ctypes.data, out.data_ptr(), 0, num_rows, num_columns, None
    )
    return out


def make_banks(dtype: str) -> list[ExpertBank]:
    """About 1 GiB of experts, all with the same content."""
    parts: list[ExpertPart] = []
    content: list[torch.Tensor] = []
    end = 0
    for role, shape in (("gate", (INNER, HIDDEN)), ("up", (INNER, HIDDEN)), ("down", (HIDDEN, INNER))):
        content.append(blocks(dtype, *shape))
        parts.append(ExpertPart(role, dtype, shape, end, len(content[-1])))
        end += len(content[-1])
    stride = (end + 4095) // 4096 * 4096
    expert = torch.cat((*content, torch.zeros(stride - end, dtype=torch.uint8)))
    num_banks = max(1, BANKS_NBYTES // (stride * NUM_SLOTS))
    return [ExpertBank(expert.repeat(NUM_SLOTS), stride, NUM_SLOTS, tuple(parts)) for _ in range(num_banks)]


def random_slots(n: int, seed: int) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    chosen = [rng.choice(NUM_SLOTS, TOP_K, replace=False) for _ in range(n)]
    return torch.from_numpy(np.stack(chosen).astype(np.int32))


def read_gb_per_s(bank: ExpertBank, num_threads: int) -> float:
    """What adding up the bank's 64-bit words gives: the memory's speed, more or less."""
    torch.set_num_threads(num_threads)
    words = bank.storage.view(torch.int64)
    seconds = min(timed(words.sum) for _ in range(5))
    torch.set_num_threads(1)
    return bank.storage.numel() / seconds / 1e9


def timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(call: Callable[[int], Any], num_calls: int) -> tuple[float, float]:
    """Median seconds of a call, and of ggml's part of it."""
    for number in range(3):
        call(number)
    with ComputeClock() as clock:
        seconds = [timed(lambda number=number: call(number)) for number in range(num_calls)]  # type: ignore[misc]
    return statistics.median(seconds), statistics.median(clock.seconds)


def rows_of(dtype: str, banks: list[ExpertBank], num_threads: int) -> list[dict[str, Any]]:
    kernels = load_kernels("ggml", num_threads=num_threads)
    x = torch.randn(PREFILL_TOKENS, HIDDEN, generator=torch.Generator().manual_seed(0))
    rows = []

    def add(kernel: str, n: int, nbytes: int, num_calls: int, call: Callable[[int], Any]) -> None:
        call_s, ggml_s = measure(call, num_calls)
        row = {
            "dtype": dtype,
            "threads": num_threads,
            "kernel": kernel,
            "n": n,
            "call_us": call_s * 1e6,
            "python_us": (call_s - ggml_s) * 1e6,
        }
        row |= {"gb_per_s": nbytes / call_s / 1e9, "ggml_gb_per_s": nbytes / ggml_s / 1e9} if n == 1 else {}
        row |= {"tokens_per_s": n / call_s}
        rows.append(row)

    expert_nbytes = sum(part.nbytes for part in banks[0].parts)
    slots = [random_slots(1, seed) for seed in range(200)]
    add("expert_ffn", 1, TOP_K * expert_nbytes, 150, expert_call(kernels, x[:1], slots, banks))
    many = [random_slots(PREFILL_TOKENS, seed) for seed in range(3)]
    add("expert_ffn", PREFILL_TOKENS, 0, 3, expert_call(kernels, x, many, banks))
    matrices = [
        Linear(kernels.prepare(Weight(blocks(dtype, LINEAR_ROWS, HIDDEN), dtype, (LINEAR_ROWS, HIDDEN))))
        for _ in range(8 if dtype != "BF16" else 3)
    ]
    nbytes = matrices[0].weight.storage.numel()
    add("linear", 1, nbytes, 300, lambda number: kernels.run(matrices[number % len(matrices)], x[:1]))
    add("linear", PREFILL_TOKENS, 0, 3, lambda number: kernels.run(matrices[0], x))
    kernels.close()
    return rows


def expert_call(
    kernels: Kernels, x: torch.Tensor, slots: list[torch.Tensor], banks: list[ExpertBank]
) -> Callable[[int], Any]:
    def call(number: int) -> None:
        chosen, bank = slots[number % len(slots)], banks[number % len(banks)]
        if len(x) == 1:
            kernels.expert_ffn(x, chosen.tolist(), bank)
            return
        outputs = torch.empty(chosen.numel(), HIDDEN)
        places = [(chosen.flatten() == slot).nonzero()[:, 0] for slot in range(NUM_SLOTS)]
        work = [ExpertRows(slot, rows // TOP_K, rows) for slot, rows in enumerate(places) if len(rows)]
        kernels.expert_ffns(x, work, bank, outputs)

    return call


@dataclass(frozen=True, eq=False)
class Linear:
    """A block: x times a matrix."""

    weight: Weight

    def __call__(self, ops: Operations[T], inputs: tuple[T, ...], step: Step | None) -> T:
        return ops.linear(inputs[0], self.weight)


def print_table(rows: list[dict[str, Any]]) -> None:
    columns = (
        "dtype",
        "threads",
        "kernel",
        "n",
        "call_us",
        "python_us",
        "gb_per_s",
        "ggml_gb_per_s",
        "tokens_per_s",
    )
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    for row in rows:
        cells = [row.get(column, "") for column in columns]
        print(
            "| "
            + " | ".join(f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in cells)
            + " |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--dtypes", default="Q4_K,Q6_K,Q8_0,BF16")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    threads = [int(number) for number in arguments.threads.split(",")]
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    reads: dict[int, float] = {}
    for dtype in arguments.dtypes.split(","):
        banks = make_banks(dtype)
        reads = reads or {number: read_gb_per_s(banks[0], number) for number in threads}
        for num_threads in threads:
            rows += rows_of(dtype, banks, num_threads)
        del banks
    if arguments.json:
        print(json.dumps({"read_gb_per_s": reads, "rows": rows}, indent=1))
        return
    print(
        "plain reads: "
        + ", ".join(f"{speed:.1f} GB/s with {number} threads" for number, speed in reads.items())
    )
    print_table(rows)


if __name__ == "__main__":
    main()

"""Tokens per second of lmpack and of llama.cpp on the same GGUF, taken in turns.

    python -m benchmarks.decode --model qwen3moe-8g.gguf --pack qwen3moe-8g.lmpack --threads 2

Each turn is a process of its own, so that one engine's memory is free when the other runs, and the turns alternate, so
that a busy or throttled machine slows both. llama.cpp is the prebuilt `xllamacpp` wheel with its own defaults (flash
attention, weights repacked for the CPU). Both do the same twice, a random prompt and greedy decoding after it: once to
bring into memory what it needs, once measured. What other programs took of the processors meanwhile is printed: with
busy threads waiting for each other, a few percent are enough to spoil a turn.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

REPOSITORY = Path(__file__).parents[1]
DEMO = REPOSITORY / "lmpack" / "demo" / "tiny-Q4_K_M.gguf"


@dataclass(frozen=True, slots=True)
class Load:
    """What both engines are asked to do."""

    gguf: Path
    pack: Path
    num_prompt_tokens: int
    num_tokens: int
    num_threads: int
    ram_nbytes: int | None
    io: str
    repack: bool
    seed: int

    @property
    def context_length(self) -> int:
        """Tokens of the prompt and of what follows."""
        return self.num_prompt_tokens + self.num_tokens

    def prompt_ids(self, vocab_size: int) -> list[int]:
        """The same random tokens for every engine."""
        random = np.random.default_rng(self.seed)
        ids: list[int] = random.integers(0, vocab_size, self.num_prompt_tokens).tolist()
        return ids


@dataclass(frozen=True, slots=True)
class Turn:
    """What one process measured."""

    engine: str  # with what it used
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    others: float = 0.0  # share of the processors that other programs used


def run_lmpack(load: Load) -> Turn:
    """One turn of ours."""
    from runtime.engine import Engine
    from runtime.sampler import SamplingParams

    with Engine.load(
        load.pack,
        ram=load.ram_nbytes,
        io=load.io,
        num_threads=load.num_threads,
        context_length=load.context_length,
    ) as engine:
        prompt_ids = load.prompt_ids(engine.plan.config.vocab_size)
        params = SamplingParams(max_tokens=load.num_tokens, ignore_eos=True)
        sum(1 for _ in engine.generate(prompt_ids, params))
        misses = engine.cache.misses
        started = time.perf_counter()
        tokens = engine.generate(prompt_ids, params)
        next(tokens)
        prefilled = time.perf_counter()
        num_steps = sum(1 for _ in tokens)
        finished = time.perf_counter()
        stats = engine.stats()
        misses = engine.cache.misses - misses
        return Turn(
            f"lmpack ({stats.kernels}, {stats.store}{f', {misses} misses' if misses else ''})",
            len(prompt_ids) / (prefilled - started),
            num_steps / (finished - prefilled),
        )


def run_llamacpp(load: Load) -> Turn:
    """One turn of llama.cpp."""
    from tests.llamacpp_oracle import LlamaCppOracle

    with LlamaCppOracle(
        load.gguf,
        context_length=load.context_length,
        num_threads=load.num_threads,
        flash_attention=True,
        repack=load.repack,
    ) as oracle:
        prompt_ids = load.prompt_ids(oracle.vocab_size)
        oracle.speed(prompt_ids, load.num_tokens)
        speed = oracle.speed(prompt_ids, load.num_tokens)
        name = "llama.cpp" if load.repack else "llama.cpp, no repacking"
        return Turn(name, speed.prefill_tokens_per_s, speed.decode_tokens_per_s)


def in_a_process(run: Callable[[Load], Turn], load: Load) -> Turn:
    """Run it in a fresh process, which gives all its memory back."""
    started, busy_s, own_s = time.perf_counter(), _busy_s(), _own_s()
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        turn = pool.submit(run, load).result()
    available_s = (time.perf_counter() - started) * (os.cpu_count() or 1)
    others_s = (_busy_s() - busy_s) - (_own_s() - own_s)
    return replace(turn, others=max(others_s, 0.0) / available_s)


def _busy_s() -> float:
    """Seconds that all processors together have been busy since the machine started."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text("ascii").split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    """Seconds that this process and its finished children have used."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def main() -> None:
    """Parse the flags, take turns, print the medians and their ratio."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=DEMO, help="a GGUF; default: the demo model")
    parser.add_argument("--pack", type=Path, help="its pack; default: made for this run")
    parser.add_argument("--turns", type=int, default=3, help="of each engine")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=64, help="decoded in a turn")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--ram", type=int, help="lmpack's budget in bytes; default: what is free")
    parser.add_argument("--io", default="auto", choices=("auto", "mmap", "direct"))
    parser.add_argument(
        "--no-repack", action="store_true", help="llama.cpp reads weights as they lie in the file, as we do"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        load = Load(
            arguments.model,
            arguments.pack or _convert(arguments.model, Path(folder)),
            arguments.prompt_tokens,
            arguments.tokens,
            arguments.threads,
            arguments.ram,
            arguments.io,
            not arguments.no_repack,
            arguments.seed,
        )
        turns = [
            in_a_process(run, load) for _ in range(arguments.turns) for run in (run_lmpack, run_llamacpp)
        ]
    ours, theirs = _median(turns[::2]), _median(turns[1::2])
    if arguments.json:
        print(
            json.dumps({"turns": [asdict(turn) for turn in turns], "ratio": _ratio(ours, theirs)}, indent=1)
        )
        return
    print(
        f"{arguments.model.name}, {arguments.threads} threads, medians of {arguments.turns} turns, tokens/s\n\n"
        f"| engine                   | prefill {arguments.prompt_tokens:5} | decode {arguments.tokens:5} |\n"
        f"| ------------------------ | ------------- | ------------ |"
    )
    for turn in (ours, theirs):
        print(f"| {turn.engine:24} | {turn.prefill_tokens_per_s:13.2f} | {turn.decode_tokens_per_s:12.2f} |")
    ratio = _ratio(ours, theirs)
    print(f"| {'ratio':24} | {ratio['prefill']:13.2f} | {ratio['decode']:12.2f} |")
    print("\nturn by turn: decode tokens/s (processors used by others)")
    for turn in turns:
        print(f"  {turn.engine:24} {turn.decode_tokens_per_s:8.2f} ({turn.others:.0%})")


def _convert(gguf: Path, folder: Path) -> Path:
    from converters.conversion import convert

    return convert(gguf, folder / f"{gguf.stem}.lmpack").path


def _median(turns: list[Turn]) -> Turn:
    return Turn(
        turns[0].engine,
        statistics.median(turn.prefill_tokens_per_s for turn in turns),
        statistics.median(turn.decode_tokens_per_s for turn in turns),
    )


def _ratio(ours: Turn, theirs: Turn) -> dict[str, float]:
    return {
        "prefill": ours.prefill_tokens_per_s / theirs.prefill_tokens_per_s,
        "decode": ours.decode_tokens_per_s / theirs.decode_tokens_per_s,
    }


if __name__ == "__main__":
    main()

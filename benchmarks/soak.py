"""Half an hour of generation from a model larger than memory: does anything grow, does it become slower?

    python -m benchmarks.soak --pack qwen3moe-8g.lmpack

One process in a memory cgroup of 3/8 of the pack's size (`--share`; `--ram` is the whole cgroup) answers one random
prompt after the other. A row for each quarter of the time: tokens decoded per second, resident memory, open
descriptors and threads at its end. It needs a machine where this user may make memory cgroups, and says so where that
is not.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from lmpack.byte_size import format_nbytes
from runtime.free_memory import resident_nbytes
from tests.memory_cgroup import NoCgroupError, memory_cgroup

NUM_QUARTERS = 4


@dataclass(frozen=True, slots=True)
class Quarter:
    """What a quarter of the time gave, and what the process kept at its end."""

    num_answers: int
    decode_tokens_per_s: float
    resident_nbytes: int
    num_descriptors: int
    num_threads: int


def soak(
    pack: str, *, ram_nbytes: int, seconds: float, num_prompt_tokens: int, num_tokens: int
) -> list[Quarter]:
    """Answer random prompts for so long."""
    from runtime.engine import Engine
    from runtime.sampler import SamplingParams

    with Engine.load(pack, ram=ram_nbytes, context_length=num_prompt_tokens + num_tokens) as engine:
        rng = np.random.default_rng(1)
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        quarters = []
        started = time.perf_counter()
        for number in range(1, NUM_QUARTERS + 1):
            before, num_answers = engine.stats(), 0
            while time.perf_counter() - started < seconds * number / NUM_QUARTERS or not num_answers:
                prompt_ids = rng.integers(0, engine.plan.config.vocab_size, num_prompt_tokens).tolist()
                sum(1 for _ in engine.generate(prompt_ids, params))
                num_answers += 1
            after = engine.stats()
            tokens, spent_s = after.decode_tokens - before.decode_tokens, after.decode_s - before.decode_s
            descriptors = len(os.listdir("/proc/self/fd"))
            quarters.append(
                Quarter(
                    num_answers, tokens / spent_s, resident_nbytes(), descriptors, threading.active_count()
                )
            )
    return quarters


def describe(quarters: list[Quarter]) -> str:
    """The table, and what the issue of growing or slowing comes to."""
    first, last = quarters[0], quarters[-1]
    return "\n".join(
        [
            "| quarter | answers | tokens/s | resident  | descriptors | threads |",
            "| ------- | ------- | -------- | --------- | ----------- | ------- |",
            *(
                f"| {number:7} | {quarter.num_answers:7} | {quarter.decode_tokens_per_s:8.2f} | "
                f"{format_nbytes(quarter.resident_nbytes):>9} | {quarter.num_descriptors:11} | {quarter.num_threads:7} |"
                for number, quarter in enumerate(quarters, 1)
            ),
            f"tokens/s of the last quarter over the first: {last.decode_tokens_per_s / first.decode_tokens_per_s:.2f}",
        ]
    )


def main() -> None:
    """Parse the flags, run the process in its cgroup, print its table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pack", type=Path, required=True, help="larger than the memory it is to run in")
    parser.add_argument("--share", type=float, default=3 / 8, help="of the pack's size")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64, help="decoded after each prompt")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", type=int, metavar="RAM", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        quarters = soak(
            str(arguments.pack),
            ram_nbytes=arguments.child,
            seconds=arguments.minutes * 60,
            num_prompt_tokens=arguments.prompt_tokens,
            num_tokens=arguments.tokens,
        )
        print(json.dumps([asdict(quarter) for quarter in quarters]))
        return
    pack_nbytes = sum(path.stat().st_size for path in arguments.pack.rglob("*") if path.is_file())
    limit_nbytes = int(pack_nbytes * arguments.share) // 4096 * 4096
    try:
        with memory_cgroup(limit_nbytes) as cgroup:
            child = [sys.executable, "-m", "benchmarks.soak", *sys.argv[1:], "--child", str(limit_nbytes)]
            done = cgroup.run(child, timeout_s=arguments.minutes * 60 + 3600)
            peak_nbytes = cgroup.peak_nbytes()
    except NoCgroupError as error:
        print(f"skipped: memory cgroups cannot be set here ({error})", file=sys.stderr)
        return
    if done.returncode:
        raise SystemExit(f"ended with {done.returncode}:\n{done.stderr}")
    quarters = [Quarter(**quarter) for quarter in json.loads(done.stdout.splitlines()[-1])]
    if arguments.json:
        print(json.dumps({"peak_nbytes": peak_nbytes, "quarters": [asdict(quarter) for quarter in quarters]}))
        return
    print(
        f"{format_nbytes(limit_nbytes)} for a pack of {format_nbytes(pack_nbytes)}, peak {format_nbytes(peak_nbytes)}"
    )
    print(describe(quarters))


if __name__ == "__main__":
    main()

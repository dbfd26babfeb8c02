"""A model larger than memory: lmpack and llama.cpp on the same GGUF, each in a memory cgroup of the same size.

    python -m benchmarks.beyond_ram --model qwen3moe-8g.gguf --pack qwen3moe-8g.lmpack

The cgroups are 3/8, 1/2 and 3/4 of the GGUF's size; `--ram` is the whole cgroup. Each engine runs in a process of its
own that starts with nothing of the model in the page cache, takes a prompt and decodes after it (cold), and does the
same once more (warm). llama.cpp is the prebuilt `xllamacpp` wheel, which maps the file. Two bounds are measured beside
it: what the drive gives for whole experts, eight reads in flight, in the same cgroup just before lmpack and just after
(with the bytes that lmpack misses per token, their mean is a limit in tokens/s), and how fast lmpack computes when
everything fits. "of the bound" is lmpack's cold decoding over the lower of the two. It needs a machine where this user
may make memory cgroups, and says so where that is not.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lmpack.byte_size import format_nbytes
from lmpack.cli.budget_chart import BudgetChart, BudgetPoint
from runtime.free_memory import peak_resident_nbytes
from tests.memory_cgroup import NoCgroupError, memory_cgroup

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SHARES = (3 / 8, 1 / 2, 3 / 4)
_TIMEOUT_S = 3600


@dataclass(frozen=True, slots=True)
class Load:
    """What both engines are asked to do."""

    gguf: str
    pack: str
    ram_nbytes: int
    num_prompt_tokens: int
    num_tokens: int
    num_threads: int
    passes: int
    seed: int

    def prompt_ids(self, vocab_size: int) -> list[int]:
        """The same random tokens for every engine."""
        ids = np.random.default_rng(self.seed).integers(0, vocab_size, self.num_prompt_tokens)
        return [int(token) for token in ids]


def run_lmpack(load: Load) -> list[dict[str, Any]]:
    """What each pass measured, ours."""
    from runtime.engine import Engine
    from runtime.sampler import SamplingParams

    passes = []
    with Engine.load(
        load.pack,
        ram=load.ram_nbytes,
        num_threads=load.num_threads,
        context_length=load.num_prompt_tokens + load.num_tokens,
    ) as engine:
        prompt_ids = load.prompt_ids(engine.plan.config.vocab_size)
        params = SamplingParams(max_tokens=load.num_tokens, ignore_eos=True)
        for _ in range(load.passes):
            before = engine.stats()
            sum(1 for _ in engine.generate(prompt_ids, params))
            after = engine.stats()
            tokens, spent_s = after.decode_tokens - before.decode_tokens, after.decode_s - before.decode_s
            looked_up = after.hits + after.misses - before.hits - before.misses
            passes.append(
                {
                    "prefill_tokens_per_s": len(prompt_ids) / (after.prefill_s - before.prefill_s),
                    "decode_tokens_per_s": tokens / spent_s,
                    "missed_nbytes_per_token": (after.decode_bytes_read - before.decode_bytes_read) / tokens,
                    "waiting_share": (after.decode_read_s - before.decode_read_s) / spent_s,
                    "hit_rate": (after.hits - before.hits) / looked_up,
                    "store": after.store,
                    "limit": after.limit(),
                }
            )
    return passes


def run_llamacpp(load: Load) -> list[dict[str, Any]]:
    """What each pass measured, llama.cpp."""
    from tests.llamacpp_oracle import LlamaCppOracle

    passes = []
    with LlamaCppOracle(
        Path(load.gguf),
        context_length=load.num_prompt_tokens + load.num_tokens,
        num_threads=load.num_threads,
        flash_attention=True,
        repack=False,
    ) as oracle:
        prompt_ids = load.prompt_ids(oracle.vocab_size)
        for _ in range(load.passes):
            speed = oracle.speed(prompt_ids, load.num_tokens)
            passes.append(asdict(speed))
    return passes


def run_drive(load: Load) -> list[dict[str, Any]]:
    """What the drive gives for whole experts, eight at a time."""
    from lmpack.pack import Pack
    from runtime.drive_speed import measure_reads

    pack = Pack.open(load.pack)
    stride = max(entry.stride for entry in pack.manifest.layers)
    files = [path for path in Path(load.pack, "experts").rglob("*.bin") if path.stat().st_size == stride]
    rate = measure_reads(files, stride, in_flight=8, direct=True, limit_s=2.0, seed=load.seed)
    return [{"gigabytes_per_s": rate.gigabytes_per_s}]


ENGINES = {"lmpack": run_lmpack, "llama.cpp": run_llamacpp, "drive": run_drive}


def in_cgroup(engine: str, load: Load, limit_nbytes: int) -> dict[str, Any]:
    """Run one engine in a process of its own with so much memory and nothing in the page cache."""
    forget([Path(load.gguf), *(path for path in Path(load.pack).rglob("*") if path.is_file())])
    with memory_cgroup(limit_nbytes) as cgroup:
        child = [sys.executable, "-m", "benchmarks.beyond_ram", "--child", engine, json.dumps(asdict(load))]
        done = cgroup.run(child, timeout_s=_TIMEOUT_S)
        if done.returncode:
            killed = " by the kernel, for want of memory" if cgroup.num_killed() else ""
            raise SystemExit(f"{engine} ended with {done.returncode}{killed}:\n{done.stderr}")
        return {**json.loads(done.stdout.splitlines()[-1]), "peak_nbytes": cgroup.peak_nbytes()}


def forget(paths: Iterable[Path]) -> None:
    """Have the kernel drop these files from its page cache."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fdatasync(descriptor)  # what is not yet written cannot be dropped
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def child(engine: str, load: Load) -> None:
    """Print one line of JSON for the process that started this one."""
    passes = ENGINES[engine](load)
    major_faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    facts = {"peak_rss_nbytes": peak_resident_nbytes(), "major_faults": major_faults}
    print(json.dumps({"passes": passes, **facts}))


def compare(load: Load, share: float) -> dict[str, Any]:
    """Both engines and the drive in cgroups of a share of the model."""
    whole = in_cgroup("lmpack", Load(**{**asdict(load), "passes": 2}), load.ram_nbytes)
    in_memory_tokens_per_s = whole["passes"][1]["decode_tokens_per_s"]
    limit_nbytes = int(Path(load.gguf).stat().st_size * share) // 4096 * 4096
    load = Load(**{**asdict(load), "ram_nbytes": limit_nbytes})
    drives = [drive_gigabytes_per_s(load)]
    ours = in_cgroup("lmpack", load, limit_nbytes)
    drives.append(drive_gigabytes_per_s(load))
    drive = statistics.mean(drives)
    theirs = in_cgroup("llama.cpp", load, limit_nbytes)
    cold = ours["passes"][0]
    missed_nbytes = cold["missed_nbytes_per_token"]
    drive_tokens_per_s = drive * 1e9 / missed_nbytes if missed_nbytes else None
    bound = min(drive_tokens_per_s or in_memory_tokens_per_s, in_memory_tokens_per_s)
    return {
        "share": share,
        "in_memory_tokens_per_s": in_memory_tokens_per_s,
        "limit_nbytes": limit_nbytes,
        "lmpack": ours,
        "llama.cpp": theirs,
        "drive_gigabytes_per_s": drives,
        "drive_tokens_per_s": drive_tokens_per_s,
        "of_the_bound": cold["decode_tokens_per_s"] / bound,
        "ratios": [
            {
                key: mine[key] / other[key] if other[key] else None
                for key in ("prefill_tokens_per_s", "decode_tokens_per_s")
            }
            for mine, other in zip(ours["passes"], theirs["passes"], strict=True)
        ],
    }


def drive_gigabytes_per_s(load: Load) -> float:
    """What the drive gives now, in the cgroup that the engines have."""
    return float(in_cgroup("drive", load, load.ram_nbytes)["passes"][0]["gigabytes_per_s"])


def describe(result: dict[str, Any]) -> str:
    """One budget's lines for people."""
    memory, (before, after) = format_nbytes(result["limit_nbytes"]), result["drive_gigabytes_per_s"]
    lines = [
        f"\n{result['share']:.3g} of the model, {memory}; the drive gives {before:.2f} GB/s before, {after:.2f} after\n",
        "| tokens/s          | lmpack | llama.cpp | ratio | missed MB/token | hits | waiting |",
        "| ----------------- | ------ | --------- | ----- | --------------- | ---- | ------- |",
    ]
    names = ["cold", "warm"]
    for index, (mine, other) in enumerate(
        zip(result["lmpack"]["passes"], result["llama.cpp"]["passes"], strict=True)
    ):
        for what in ("prefill", "decode"):
            key = f"{what}_tokens_per_s"
            facts = (
                f"{mine['missed_nbytes_per_token'] / 1e6:15.1f} | {mine['hit_rate']:4.0%} | {mine['waiting_share']:7.0%}"
                if what == "decode"
                else f"{'':15} | {'':4} | {'':7}"
            )
            lines.append(
                f"| {names[min(index, 1)]} {what:12} | {mine[key]:6.2f} | {other[key]:9.3f} | "
                f"{mine[key] / other[key] if other[key] else float('inf'):5.1f} | {facts} |"
            )
    allowed = result["drive_tokens_per_s"]
    lines += [
        "",
        f"in memory lmpack decodes {result['in_memory_tokens_per_s']:.2f} tokens/s, "
        + (f"the drive allows {allowed:.2f} at what was missed" if allowed else "nothing was missed"),
        f"of the bound: {result['of_the_bound']:.0%}",
        f"peak charged: {_peaks(result)}",
    ]
    lines.append(f"lmpack: {result['lmpack']['passes'][0]['limit']}")
    return "\n".join(lines)


def _peaks(result: dict[str, Any]) -> str:
    return ", ".join(
        f"{engine} {format_nbytes(result[engine]['peak_nbytes'])} ({result[engine]['major_faults']} major faults)"
        for engine in ("lmpack", "llama.cpp")
    )


def main() -> None:
    """Parse the flags, run every budget, print a table for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="a GGUF, larger than the memory it is to run in")
    parser.add_argument("--pack", type=Path, help="its pack")
    parser.add_argument(
        "--shares", default=",".join(map(str, SHARES)), help="of the model's size, with commas"
    )
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=16, help="decoded after the prompt")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--passes", type=int, default=2, choices=(1, 2), help="cold, or cold and warm")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON document instead of tables")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw both engines' cold decoding")
    parser.add_argument("--child", nargs=2, metavar=("ENGINE", "LOAD"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        engine, load = arguments.child
        child(engine, Load(**json.loads(load)))
        return
    if arguments.model is None or arguments.pack is None:
        parser.error("--model and --pack are needed")
    model_nbytes = arguments.model.stat().st_size
    load = Load(
        str(arguments.model),
        str(arguments.pack),
        2 * model_nbytes,
        arguments.prompt_tokens,
        arguments.tokens,
        arguments.threads,
        arguments.passes,
        arguments.seed,
    )
    if not arguments.json:
        print(
            f"{arguments.model.name}, {format_nbytes(model_nbytes)}, {arguments.threads} threads, "
            f"{arguments.prompt_tokens} tokens of prompt, {arguments.tokens} decoded"
        )
    results = []
    for share in arguments.shares.split(","):
        try:
            results.append(compare(load, float(share)))
        except NoCgroupError as error:
            print(f"skipped: memory cgroups cannot be set here ({error})", file=sys.stderr)
            return
        if not arguments.json:
            print(describe(results[-1]), flush=True)
    if arguments.json:
        print(json.dumps({"budgets": results}, indent=1))
    if arguments.plot:
        chart(load, results).save(arguments.plot)


def chart(load: Load, results: Sequence[dict[str, Any]]) -> BudgetChart:
    """Both engines' cold decoding over the budgets."""
    points = [
        BudgetPoint(
            result["limit_nbytes"],
            ours["decode_tokens_per_s"],
            0.0,
            ours["hit_rate"],
            theirs["decode_tokens_per_s"],
        )
        for result in sorted(results, key=lambda result: result["limit_nbytes"])
        for ours, theirs in [(result["lmpack"]["passes"][0], result["llama.cpp"]["passes"][0])]
    ]
    how = (
        f"{load.num_tokens} tokens after a prompt of {load.num_prompt_tokens}, {load.num_threads} threads, "
        "a memory cgroup of each budget, from a cold start"
    )
    model = Path(load.gguf)
    title = f"{model.stem}, {format_nbytes(model.stat().st_size)}: lmpack and llama.cpp"
    return BudgetChart(title, how, points, other="llama.cpp (mmap)")


if __name__ == "__main__":
    main()

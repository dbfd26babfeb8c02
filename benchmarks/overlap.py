"""What each way to read experts while others are computed gains: hits first, and guesses for the next layer.

    python -m benchmarks.overlap --pack qwen3moe-8g.lmpack --ram 2500MiB --profile qwen3moe.profile.safetensors

Every turn loads the pack anew, takes a prompt and decodes after it, with one way to overlap: none (a layer waits for
all its experts), hits first (and the others as they are read), and with it guesses by the next layer's router and by a
profile's transitions. The ways take turns, so that a busy machine slows all of them; the first turn is not counted.
Precision and recall are over experts that were not resident. The prompt is random tokens, or a text, which a trained
model continues as it would for a person.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lmpack.byte_size import format_nbytes, parse_byte_size
from runtime.engine import Engine
from runtime.sampler import SamplingParams

if TYPE_CHECKING:
    from runtime.run_stats import RunStats


@dataclass(frozen=True, slots=True)
class Way:
    """One way to overlap reading and computing."""

    name: str
    prefetch: str = "off"
    hits_first: bool = True


def run(way: Way, arguments: argparse.Namespace) -> RunStats:
    """One turn."""
    with Engine.load(
        arguments.pack,
        ram=parse_byte_size(arguments.ram),
        io="direct",
        num_threads=arguments.threads,
        context_length=arguments.prompt_tokens + arguments.tokens,
        prefetch=way.prefetch,
    ) as engine:
        for moe in engine.model.moes:
            moe.hits_first = way.hits_first
        if arguments.text is not None:
            prompt_ids = engine.tokenizer.encode(arguments.text.read_text(encoding="utf-8"))
        else:
            prompt_ids = (
                np.random.default_rng(1)
                .integers(0, engine.plan.config.vocab_size, arguments.prompt_tokens)
                .tolist()
            )
        params = SamplingParams(max_tokens=arguments.tokens, ignore_eos=True)
        sum(1 for _ in engine.generate(prompt_ids[: arguments.prompt_tokens], params))
        return engine.stats()


def row(way: Way, turns: list[RunStats]) -> str:
    """A line of the table: medians over the turns, and the turns' range."""
    speeds = [stats.decode_tokens / stats.decode_s for stats in turns]

    def share(values: list[float | None]) -> str:
        known = [value for value in values if value is not None]
        return f"{statistics.median(known):.0%}" if known else ""

    missed = statistics.median(stats.decode_bytes_read / stats.decode_tokens for stats in turns) / 1e6
    return (
        f"| {way.name:20} | {statistics.median(speeds):8.2f} ({min(speeds):.2f} to {max(speeds):.2f}) "
        f"| {share([stats.hit_rate for stats in turns]):>4} | {missed:8.1f} "
        f"| {share([stats.decode_read_s / stats.decode_s for stats in turns]):>7} "
        f"| {share([stats.guess_precision for stats in turns]):>9} "
        f"| {share([stats.guess_recall for stats in turns]):>6} |"
    )


def main() -> None:
    """Parse the flags, take the turns, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pack", type=Path, required=True)
    parser.add_argument("--ram", required=True, help="too little for all experts, such as 2500MiB")
    parser.add_argument("--profile", help="of this model: adds a row for its transitions")
    parser.add_argument("--text", type=Path, help="the prompt; default: random tokens")
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=16, help="decoded after the prompt")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    ways = [
        Way("none", hits_first=False),
        Way("hits first", "off"),
        Way("and guesses: router", "router"),
        *([Way("and guesses: profile", f"profile:{arguments.profile}")] if arguments.profile else []),
    ]
    run(ways[0], arguments)
    turns = [[run(way, arguments) for way in ways] for _ in range(arguments.turns)]
    print(
        f"{arguments.pack.name}, --ram {format_nbytes(parse_byte_size(arguments.ram))}, {arguments.tokens} tokens, "
        f"medians of {arguments.turns} turns\n\n"
        "| overlap              | tokens/s                | hits | MB/token | waiting | precision | recall |\n"
        "| -------------------- | ----------------------- | ---- | -------- | ------- | --------- | ------ |"
    )
    for index, way in enumerate(ways):
        print(row(way, [turn[index] for turn in turns]))


if __name__ == "__main__":
    main()

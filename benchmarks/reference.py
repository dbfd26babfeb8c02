"""What a reference pack costs: the same model from its checkpoint and from page-aligned expert files, in turns.

    python -m benchmarks.reference --source qwen3moe-8g.gguf --pack qwen3moe-8g.lmpack --ram 3200MiB

The reference pack is made for this run. Each turn is an `lmpack bench` of its own, from a page cache that has forgotten
both; its first prompt and answer are not timed. The two take turns, so that a busy machine slows both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converters.conversion import convert
from lmpack.byte_size import format_nbytes
from lmpack.cli.fresh_process import run_fresh
from lmpack.pack import Pack

if TYPE_CHECKING:
    from collections.abc import Sequence


def turn(pack: Path, io: str, files: Sequence[Path], arguments: argparse.Namespace) -> dict[str, Any]:
    """One bench, cold; its only run."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    command = ["bench", str(pack), "--json", "--ram", arguments.ram, "--io", io]
    command += [
        "-p",
        str(arguments.prompt_tokens),
        "-n",
        str(arguments.tokens),
        "-r",
        str(arguments.repetitions),
    ]
    command += [] if arguments.threads is None else ["--threads", str(arguments.threads)]
    exit_code, output = run_fresh(command, keep_output=True)
    if exit_code:
        raise SystemExit(exit_code)  # it has said why
    (run,) = json.loads(output)["runs"]
    assert isinstance(run, dict)
    return run


def row(name: str, turns: list[dict[str, Any]], tokens: int) -> str:
    """A line of the table: medians over the turns."""

    def median(phase: str, key: str) -> float:
        return float(statistics.median(run[phase][key] for run in turns))

    megabytes = median("answer", "read_nbytes") / tokens / 1e6
    return (
        f"| {name:24} | {median('prompt', 'tokens_per_s'):8.2f} | {median('answer', 'tokens_per_s'):8.2f} "
        f"| {median('answer', 'hit_rate'):4.0%} | {megabytes:8.1f} | {median('answer', 'waiting_share'):7.0%} |"
    )


def main() -> None:
    """Parse the flags, convert, take the turns, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", type=Path, required=True, help="the checkpoint")
    parser.add_argument("--pack", type=Path, required=True, help="its full pack")
    parser.add_argument("--ram", required=True, help="too little for all experts, such as 3200MiB")
    parser.add_argument("--io", default="direct", help="stores, with commas")
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=16, help="decoded after each prompt")
    parser.add_argument("--repetitions", type=int, default=2, help="prompts in a turn")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        reference = Path(folder) / "reference.lmpack"
        report = convert(arguments.source, reference, reference=True)
        written = [path for path in reference.rglob("*") if path.is_file()]
        opened = Pack.open(reference).reference
        assert opened is not None
        files = [*opened.paths.values(), *(path for path in arguments.pack.rglob("*") if path.is_file())]
        ways = [(kind, io) for io in arguments.io.split(",") for kind in ("pack", "reference")]
        turns = [
            [turn(arguments.pack if kind == "pack" else reference, io, files, arguments) for kind, io in ways]
            for _ in range(arguments.turns)
        ]
        nbytes = sum(path.stat().st_size for path in written)
    print(
        f"{arguments.source.name}: {format_nbytes(report.source_nbytes)} hashed in {report.seconds:.1f} s, "
        f"{format_nbytes(nbytes)} written\n{arguments.pack.name}, --ram {arguments.ram}, prompts of "
        f"{arguments.prompt_tokens} tokens and answers of {arguments.tokens}, medians of {arguments.turns} turns\n\n"
        "| read from                | prompt   | answer   | hits | MB/token | waiting |\n"
        "| ------------------------ | -------- | -------- | ---- | -------- | ------- |"
    )
    for index, (kind, io) in enumerate(ways):
        runs = [runs[index] for runs in turns]
        print(row(f"{kind}, {io}", runs, arguments.tokens * arguments.repetitions))


if __name__ == "__main__":
    main()

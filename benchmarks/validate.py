"""Measure `lmpack validate` against `sha256sum` over the same files, and `--quick` of a pack of 25,000 experts.

    python -m benchmarks.validate big.lmpack --work /path/with/room/for/100/MB

`sha256sum` runs as many processes at once as there are cores (`xargs -P`), as validate runs threads. Before each run
the pack's pages are dropped from the page cache; --warm leaves them there. Both are timed as processes, from start to
end, in turns; the best of --repeat counts. The pack of 25,000 experts is written below --work and deleted at the end.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.convert import files_of, forget
from lmpack.manifest import Source, SourceFile
from lmpack.pack_writer import PackWriter

TARGET_RATIO = 0.85
TARGET_QUICK_S = 1.0
NUM_LAYERS, NUM_EXPERTS = 100, 250
FILES_PER_PROCESS = 32


def main() -> None:
    """Parse the flags, measure, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pack", type=Path)
    parser.add_argument(
        "--work", type=Path, required=True, help="an existing folder for the pack of many experts"
    )
    parser.add_argument("--warm", action="store_true", help="leave the pack in the page cache")
    parser.add_argument("--repeat", type=int, default=1)
    arguments = parser.parse_args()
    many = arguments.work / "many-experts.lmpack"
    write_many_experts(many)
    try:
        quick_s = min(timed([sys.executable, "-m", "lmpack", "validate", many, "--quick"]) for _ in range(3))
    finally:
        shutil.rmtree(many)
    hashed, validated = [], []
    for _ in range(arguments.repeat):  # in turns, so that a busy minute hits both
        hashed.append(measured(arguments.pack, hash_command(arguments.pack), arguments.warm))
        command = [sys.executable, "-m", "lmpack", "validate", arguments.pack]
        validated.append(measured(arguments.pack, command, arguments.warm))
    nbytes = sum(path.stat().st_size for path in files_of(arguments.pack))
    print(f"{nbytes / 1e9:.2f} GB in {len(files_of(arguments.pack))} files, {os.cpu_count()} cores")
    for name, seconds in (("sha256sum, in parallel", min(hashed)), ("lmpack validate", min(validated))):
        print(f"{name:<24}{seconds:>8.2f} s{nbytes / 1e6 / seconds:>8.0f} MB/s")
    print(f"throughput / sha256sum: {min(hashed) / min(validated):.2f} (target {TARGET_RATIO:.2f})")
    print(
        f"validate --quick of {NUM_LAYERS * NUM_EXPERTS} experts: {quick_s:.2f} s (target below {TARGET_QUICK_S:.0f} s)"
    )


def hash_command(pack: Path) -> list[str | Path]:
    """Return the command that hashes every file of a pack, on all cores."""
    script = f'find "$0" -type f -print0 | xargs -0 -P {os.cpu_count()} -n {FILES_PER_PROCESS} sha256sum'
    return ["sh", "-c", script, pack]


def measured(pack: Path, command: list[str | Path], is_warm: bool) -> float:
    """Time a command over a pack."""
    if not is_warm:
        forget(pack)
    return timed(command)


def timed(command: list[str | Path]) -> float:
    """Return how long a process took."""
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def write_many_experts(path: Path) -> None:
    """Write a pack of tiny experts, all different."""
    with PackWriter(path) as writer:
        parts = [(role, "Q4_K", (1, 256)) for role in ("gate", "up", "down")]
        for layer in range(NUM_LAYERS):
            writer.add_layer(layer, NUM_EXPERTS, parts)
        for layer in range(NUM_LAYERS):
            for expert in range(NUM_EXPERTS):
                number = (layer * NUM_EXPERTS + expert).to_bytes(4, "little")
                for role, _, _ in parts:
                    writer.write_part(layer, expert, role, number * 36)
        kept = writer.keep("source/a", b"a")
        file = SourceFile("a", *kept, "source/a", *kept, ())
        writer.finish(architecture="many", config={}, source=Source("gguf", (file,)))


if __name__ == "__main__":
    main()

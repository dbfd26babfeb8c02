"""How fast the stores read whole experts in random order from a cold page cache, and what a hit costs.

    python -m benchmarks.expert_reads [--pack m.lmpack] [--threads 1,4,8,16] [--batch 8]

Every expert is read once, `--batch` at a time, as a layer asks for its misses; releasing them is part of the time.
Before each run the kernel drops the pack's files from its page cache (posix_fadvise), which no other process notices.
Without --pack, one of 256 experts of 2.6 MB is made in a temporary folder (TMPDIR chooses the drive).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lmpack.pack import Pack
from runtime.direct_store import DirectStore
from runtime.expert_cache import ExpertCache
from runtime.expert_readers import ExpertReaders, Read
from runtime.mmap_store import MmapStore
from tests.expert_packs import all_keys, budget_with_slots, write_expert_pack

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lmpack.expert_key import ExpertKey
    from runtime.expert_store import ExpertStore

STORES: dict[str, Callable[..., ExpertStore]] = {
    "direct": DirectStore,
    "direct, buffered": partial(DirectStore, buffered=True),
    "mmap": MmapStore,
}
Q4_K_EXPERT = [("gate", "Q4_K", (768, 2048)), ("up", "Q4_K", (768, 2048)), ("down", "Q4_K", (2048, 768))]


@dataclass(frozen=True, slots=True)
class Figure:
    """One run."""

    store: str  # as it calls itself
    num_threads: int
    gigabytes_per_s: float


def measure(pack: Pack, name: str, num_threads: int, keys: Sequence[ExpertKey], batch: int) -> Figure:
    """Read the experts, cold, `batch` at a time."""
    drop_from_page_cache(pack)
    store = STORES[name](pack, budget_with_slots(pack.manifest))
    readers = ExpertReaders(store.read, num_threads)
    nbytes = 0
    started = time.perf_counter()
    for first in range(0, len(keys), batch):
        wanted = keys[first : first + batch]
        reads = [Read(key, slot) for key in wanted if (slot := store.acquire(key)) is not None]
        for read in reads:
            readers.start(read)
        for read in reads:
            read.wakeup.get()
            if read.error is not None:
                raise read.error
            store.release(read.key, read.slot)
            nbytes += pack.manifest.layer(read.key.layer).stride
    spent_s = time.perf_counter() - started
    figure = Figure(store.name, num_threads, nbytes / spent_s / 1e9)
    readers.close()
    store.close()
    return figure


def hit_us(pack: Pack, num_experts: int) -> float:
    """Microseconds of a fetch that finds all its experts resident; the best of many rounds."""
    budget = budget_with_slots(pack.manifest)
    cache = ExpertCache(DirectStore(pack, budget), budget)
    entry = pack.manifest.layers[0]
    experts = list(range(min(num_experts, entry.num_experts)))
    cache.fetch(entry.layer, experts)
    rounds = []
    for _ in range(50):
        started = time.perf_counter()
        for _ in range(100):
            cache.fetch(entry.layer, experts)
        rounds.append((time.perf_counter() - started) / 100)
    cache.close()
    return min(rounds) * 1e6


def drop_from_page_cache(pack: Pack) -> None:
    """Have the kernel forget the pack's expert files."""
    for key in all_keys(pack):
        descriptor = os.open(pack.expert_path(key), os.O_RDONLY)
        os.fdatasync(descriptor)  # what is not yet written cannot be dropped
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def main() -> None:
    """Parse the flags, measure, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pack", type=Path, help="default: one made for this run")
    parser.add_argument("--experts", type=int, default=256, help="how many to read, at most")
    parser.add_argument("--threads", default="1,4,8,16", help="numbers of reader threads, with commas")
    parser.add_argument("--batch", type=int, default=8, help="experts read at a time")
    parser.add_argument("--rounds", type=int, default=3, help="the median counts")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    arguments = parser.parse_args()
    threads = [int(number) for number in arguments.threads.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        pack = (
            Pack.open(arguments.pack)
            if arguments.pack
            else write_expert_pack(Path(folder) / "experts.lmpack", {0: (arguments.experts, Q4_K_EXPERT)})
        )
        keys = all_keys(pack)
        random.Random(arguments.seed).shuffle(keys)
        keys = keys[: arguments.experts]
        runs = [
            [measure(pack, name, num_threads, keys, arguments.batch) for name in STORES]
            for _ in range(arguments.rounds)
            for num_threads in threads
        ]
        hit = hit_us(pack, 8)
    figures = [
        _median(runs[row :: len(threads)], column) for row in range(len(threads)) for column in range(3)
    ]
    if arguments.json:
        print(
            json.dumps({"reads": [asdict(figure) for figure in figures], "fetch_of_8_hits_us": hit}, indent=1)
        )
        return
    nbytes = sum(pack.manifest.layer(key.layer).stride for key in keys) / len(keys)
    print(f"{len(keys)} experts of {nbytes / 1e6:.2f} MB, {arguments.batch} at a time, cold, GB/s\n")
    print("| threads | " + " | ".join(figure.store for figure in figures[:3]) + " |")
    print("| ------- | " + " | ".join("-" * len(figure.store) for figure in figures[:3]) + " |")
    for row, num_threads in enumerate(threads):
        cells = [
            f"{figure.gigabytes_per_s:{len(figure.store)}.2f}" for figure in figures[3 * row : 3 * row + 3]
        ]
        print(f"| {num_threads:7} | " + " | ".join(cells) + " |")
    print(f"\na fetch of 8 experts that are all resident: {hit:.1f} us")


def _median(rows: list[list[Figure]], column: int) -> Figure:
    ordered = sorted((row[column] for row in rows), key=lambda figure: figure.gigabytes_per_s)
    return ordered[len(ordered) // 2]


if __name__ == "__main__":
    main()

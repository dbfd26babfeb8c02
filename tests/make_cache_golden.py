"""Writes data/cache_hits.json: which requests of a trace libCacheSim, the policies' authors' own simulator, calls hits.

    pip install libcachesim && python -m tests.make_cache_golden

SLRU has two segments here; while the cache still has room, libCacheSim fills the upper one with newcomers as well, so
its hits are comparable only after a while.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import libcachesim as lcs  # type: ignore[import-not-found]
from libcachesim.cache import _create_common_params  # type: ignore[import-not-found]
from libcachesim.libcachesim_python import SLRU_init  # type: ignore[import-not-found]

NUM_KEYS = 120
CAPACITIES = (20, 40, 80)  # S3-FIFO's queues are whole tenths
PATH = Path(__file__).parent / "data" / "cache_hits.json"


def make_trace() -> list[int]:
    """Skewed choices whose favourites change twice."""
    rng = random.Random(7)
    weights = [(rank + 1) ** -0.8 for rank in range(NUM_KEYS)]
    trace = []
    for _ in range(3):
        keys = rng.sample(range(NUM_KEYS), NUM_KEYS)
        trace += rng.choices(keys, weights, k=1000)
    return trace


def hits(cache: Any, trace: list[int]) -> list[bool]:
    """What the cache answers to each request; it is told when each key comes next, which Belady needs."""
    next_uses = [0] * len(trace)
    upcoming: dict[int, int] = {}
    for when in reversed(range(len(trace))):
        next_uses[when] = upcoming.get(trace[when], 1 << 62)
        upcoming[trace[when]] = when
    answers = []
    for when, key in enumerate(trace):
        request = lcs.Request()
        request.obj_id, request.obj_size, request.clock_time = key + 1, 1, when
        request.next_access_vtime = next_uses[when]
        answers.append(cache.get(request))
    return answers


def main() -> None:
    """Ask every policy at every capacity."""
    trace = make_trace()
    answers: dict[str, dict[str, str]] = {}
    for capacity in CAPACITIES:
        slru = SLRU_init(_create_common_params(capacity, 1 << 30, 24, False, None), "n-seg=2")
        caches = {
            "lru": lcs.LRU(capacity),
            "lfu": lcs.LFU(capacity),
            "slru": slru,
            "s3fifo": lcs.S3FIFO(capacity),
            "belady": lcs.Belady(capacity),
        }
        for name, cache in caches.items():
            bits = "".join("01"[hit] for hit in hits(cache, trace))
            answers.setdefault(name, {})[str(capacity)] = f"{int(bits, 2):0{len(bits) // 4}x}"
    PATH.write_text(json.dumps({"trace": trace, "hits": answers}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""What a run says of itself: rates that agree with their figures, and what limited it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from runtime.engine import Engine
from runtime.run_stats import RunStats
from tests.smallest_budget import smallest_budget

if TYPE_CHECKING:
    from pathlib import Path

QUIET = RunStats(
    architecture="tinymoe",
    kernels="torch",
    store="direct",
    io_reason="asked for",
    num_readers=8,
    policy="lru",
    num_threads=1,
    context_length=64,
    device="cpu",
    ram_nbytes=1 << 30,
    vram_nbytes=None,
    expert_slots_nbytes=1 << 20,
    ram_tier_nbytes=0,
    prefill_tokens=0,
    prefill_s=0.0,
    decode_tokens=10,
    decode_s=10.0,
    prefill_bytes_asked=0,
    prefill_bytes_read=0,
    decode_bytes_read=4_000_000_000,
    decode_read_s=1.0,
    hits=50,
    misses=50,
    ram_hits=0,
    evictions=50,
    experts_warmed=0,
    bytes_read=4_000_000_000,
    read_s=1.0,
    drive_s=2.0,
    prefetch="off",
    guessed=0,
    guesses_needed=0,
    guesses_right=0,
    useful_guesses=0,
    wasted_guesses=0,
    major_faults=300,
    peak_rss_nbytes=1 << 20,
)


@pytest.mark.parametrize(
    ("read_s", "major_faults", "limit"),
    [
        (1.0, 300, "the processor limits this run: 10% of the time went to waiting for experts"),
        (4.0, 300, "drive and processor limit this run together: 40% of the time"),
        (9.0, 300, "the drive limits this run: 90% of the time went to waiting for experts; more --ram"),
        (
            9.0,
            30_000,
            "memory is short: 30000 times the kernel had to bring pages back; give a smaller --ram",
        ),
    ],
)
def test_one_sentence_says_what_limits_a_run(read_s: float, major_faults: int, limit: str) -> None:
    stats = replace(QUIET, read_s=read_s, major_faults=major_faults)
    assert stats.limit().startswith(limit)
    assert f"limit     {limit}" in stats.describe()
    assert stats.to_json()["limit"] == stats.limit()


def test_the_drive_gave_what_was_read_while_it_was_read_from() -> None:
    assert QUIET.drive_bytes_per_s == 2e9
    assert "read at 2.00 GB/s, up to 8 reads at a time (asked for); waited 1.00 s, 10%" in QUIET.describe()
    assert replace(QUIET, drive_s=0.0).drive_bytes_per_s is None


def test_a_run_that_did_nothing_has_no_rates() -> None:
    idle = replace(QUIET, decode_tokens=0, decode_s=0.0, read_s=0.0, hits=0, misses=0, bytes_read=0)
    assert (idle.waiting_share, idle.hit_rate, idle.prefill_read_ratio) == (0.0, 1.0, None)


def test_a_prompt_reads_no_expert_twice_in_a_layer_whatever_the_budget(demo_pack: Path) -> None:
    smallest = smallest_budget(lambda: Engine.load(demo_pack, ram=1))
    with Engine.load(demo_pack, ram=smallest + (2 << 20), num_threads=1) as engine:
        vocab_size = engine.plan.config.vocab_size
        engine.hidden([17 * token % vocab_size for token in range(200)], engine.new_kv())
        stats = engine.stats()
    assert stats.evictions > 0
    assert stats.decode_bytes_read == 0
    assert 0 < stats.prefill_bytes_read <= stats.prefill_bytes_asked
    assert stats.prefill_bytes_read == stats.bytes_read
    assert stats.prefill_read_ratio is not None
    assert stats.prefill_read_ratio <= 1.0

"""Timings of an engine: tokens, seconds and experts' bytes, apart for prompts and for what was generated."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from runtime.expert_cache import ExpertCache


@dataclass(slots=True)
class Timings:
    """What was spent so far."""

    prefill_tokens: int = 0
    prefill_s: float = 0.0
    decode_tokens: int = 0
    decode_s: float = 0.0
    prefill_bytes_asked: int = 0  # of experts, each once per layer and chunk
    prefill_bytes_read: int = 0
    decode_bytes_read: int = 0
    decode_read_s: float = 0.0  # of decode_s, waiting for the drive

    @contextmanager
    def timed(self, num_tokens: int, cache: ExpertCache, *, follows: bool) -> Iterator[None]:
        """Count what the block does: one token that follows others as decoding, more or the first as prefill."""
        started = time.perf_counter()
        asked, read, read_s = cache.bytes_asked, cache.bytes_read, cache.read_s
        yield
        spent_s = time.perf_counter() - started
        if num_tokens == 1 and follows:
            self.decode_tokens += 1
            self.decode_s += spent_s
            self.decode_bytes_read += cache.bytes_read - read
            self.decode_read_s += cache.read_s - read_s
        else:
            self.prefill_tokens += num_tokens
            self.prefill_s += spent_s
            self.prefill_bytes_asked += cache.bytes_asked - asked
            self.prefill_bytes_read += cache.bytes_read - read

"""What a run used and did, so that nothing about it is silent."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from lmpack.byte_size import format_nbytes


@dataclass(frozen=True, slots=True)
class RunStats:
    """Figures of one engine since it was loaded; seconds, bytes, tokens."""

    architecture: str
    kernels: str
    store: str
    policy: str
    num_threads: int
    context_length: int
    ram_nbytes: int
    expert_slots_nbytes: int
    prefill_tokens: int
    prefill_s: float
    decode_tokens: int
    decode_s: float
    hits: int
    misses: int
    evictions: int
    experts_warmed: int
    bytes_read: int
    read_s: float
    peak_rss_nbytes: int

    @property
    def hit_rate(self) -> float:
        """Share of expert look-ups that were resident; 1 when there were none."""
        lookups = self.hits + self.misses
        return self.hits / lookups if lookups else 1.0

    def to_json(self) -> dict[str, Any]:
        """All figures, with the rates derived from them; a rate is null when nothing was timed."""
        return {
            **asdict(self),
            "hit_rate": self.hit_rate,
            "prefill_tokens_per_s": _rate(self.prefill_tokens, self.prefill_s),
            "decode_tokens_per_s": _rate(self.decode_tokens, self.decode_s),
        }

    def describe(self) -> str:
        """A few lines for people."""
        lines = [
            f"ran       {self.architecture} on {self.kernels} kernels, {self.num_threads} threads",
            f"prefill   {self.prefill_tokens} tokens in {self.prefill_s:.2f} s"
            + _per_second(self.prefill_tokens, self.prefill_s),
            f"decode    {self.decode_tokens} tokens in {self.decode_s:.2f} s"
            + _per_second(self.decode_tokens, self.decode_s),
            f"memory    {format_nbytes(self.ram_nbytes)} budget, {format_nbytes(self.expert_slots_nbytes)} "
            + f"of it for experts; {format_nbytes(self.peak_rss_nbytes)} peak resident",
        ]
        if self.hits + self.misses:
            lines.append(
                f"experts   {self.policy} over the {self.store} store: {self.hit_rate:.1%} hits, "
                f"{self.misses} read ({format_nbytes(self.bytes_read)} in {self.read_s:.2f} s), "
                f"{self.evictions} evicted"
                + (f", {self.experts_warmed} there at the start" if self.experts_warmed else "")
            )
        return "\n".join(lines)


def _rate(tokens: int, seconds: float) -> float | None:
    return tokens / seconds if seconds > 0 else None


def _per_second(tokens: int, seconds: float) -> str:
    rate = _rate(tokens, seconds)
    return f" ({rate:.1f} tokens/s)" if rate is not None and tokens else ""

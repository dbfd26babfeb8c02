"""What a run used and did, so that nothing about it is silent."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from lmpack.byte_size import format_nbytes
from lmpack.plural import counted

_MANY_FAULTS = 100  # per token; a start has some hundreds in all
_MOSTLY, _PARTLY = 0.5, 0.15  # of the time spent waiting


@dataclass(frozen=True, slots=True)
class RunStats:
    """Figures of one engine since it was loaded; seconds, bytes, tokens."""

    architecture: str
    kernels: str
    store: str
    io_reason: str
    num_readers: int
    policy: str
    num_threads: int
    context_length: int
    device: str
    ram_nbytes: int
    vram_nbytes: int | None  # null on the CPU, where there is one memory
    expert_slots_nbytes: int  # on the device
    ram_tier_nbytes: int  # of the experts between the device and the drive
    prefill_tokens: int
    prefill_s: float
    decode_tokens: int
    decode_s: float
    prefill_bytes_asked: int  # what the experts that a chunk needed take, each once per layer
    prefill_bytes_read: int
    decode_bytes_read: int
    decode_read_s: float  # of decode_s, waiting for the drive
    hits: int
    misses: int
    ram_hits: int  # of the misses, those that were in the RAM tier
    evictions: int
    experts_warmed: int
    bytes_read: int
    read_s: float  # waiting for the drive
    drive_s: float  # reading from it, whether anybody waited or not
    prefetch: str
    guessed: int  # experts that a layer lacked and was expected to take
    guesses_needed: int  # experts that it lacked and took
    guesses_right: int  # both
    useful_guesses: int  # that were read, or on their way, when they were asked for
    wasted_guesses: int
    major_faults: int
    peak_rss_nbytes: int

    @property
    def hit_rate(self) -> float:
        """Share of expert look-ups that were resident; 1 when there were none."""
        lookups = self.hits + self.misses
        return self.hits / lookups if lookups else 1.0

    @property
    def waiting_share(self) -> float:
        """Share of all forward passes' time that went to waiting for the drive."""
        spent_s = self.prefill_s + self.decode_s
        return self.read_s / spent_s if spent_s else 0.0

    @property
    def drive_bytes_per_s(self) -> float | None:
        """What the drive gave while it was read from; None when it was not."""
        return self.bytes_read / self.drive_s if self.drive_s > 0 else None

    @property
    def prefill_read_ratio(self) -> float | None:
        """Bytes read over bytes of the experts needed, each once per layer and chunk: above 1 some came twice."""
        return self.prefill_bytes_read / self.prefill_bytes_asked if self.prefill_bytes_asked else None

    @property
    def guess_precision(self) -> float | None:
        """Share of the guessed experts that were needed; None without guesses."""
        return self.guesses_right / self.guessed if self.guessed else None

    @property
    def guess_recall(self) -> float | None:
        """Share of the experts needed that had been guessed; None when none were."""
        return self.guesses_right / self.guesses_needed if self.guesses_needed else None

    def limit(self) -> str:
        """What limits this run, in one sentence."""
        tokens = self.prefill_tokens + self.decode_tokens
        if tokens and self.major_faults > _MANY_FAULTS * tokens:
            return (
                f"memory is short: {self.major_faults} times the kernel had to bring pages back; "
                "give a smaller --ram, or end other programs"
            )
        share = f"{self.waiting_share:.0%} of the time went to waiting for experts"
        if self.waiting_share > _MOSTLY:
            return f"the drive limits this run: {share}; more --ram or a faster drive would help"
        if self.waiting_share > _PARTLY:
            return f"drive and processor limit this run together: {share}"
        return f"the processor limits this run: {share}"

    def to_json(self) -> dict[str, Any]:
        """All figures, with the rates derived from them; a rate is null when nothing was timed."""
        return {
            **asdict(self),
            "hit_rate": self.hit_rate,
            "waiting_share": self.waiting_share,
            "drive_bytes_per_s": self.drive_bytes_per_s,
            "prefill_read_ratio": self.prefill_read_ratio,
            "guess_precision": self.guess_precision,
            "guess_recall": self.guess_recall,
            "limit": self.limit(),
            "prefill_tokens_per_s": _rate(self.prefill_tokens, self.prefill_s),
            "decode_tokens_per_s": _rate(self.decode_tokens, self.decode_s),
        }

    def describe(self) -> str:
        """A few lines for people."""
        lines = [
            f"ran       {self.architecture} on {self.kernels} kernels, {counted(self.num_threads, 'thread')}"
            + (f", device {self.device}" if self.vram_nbytes is not None else ""),
            f"prefill   {counted(self.prefill_tokens, 'token')} in {self.prefill_s:.2f} s"
            + _per_second(self.prefill_tokens, self.prefill_s),
            f"decode    {counted(self.decode_tokens, 'token')} in {self.decode_s:.2f} s"
            + _per_second(self.decode_tokens, self.decode_s),
            f"memory    {self._memory()}; {format_nbytes(self.peak_rss_nbytes)} peak resident",
        ]
        if self.hits + self.misses:
            lines.append(
                f"experts   {self.policy} over the {self.store} store: {self.hit_rate:.1%} hits, "
                f"{self.misses - self.ram_hits} read, {self.evictions} evicted"
                + (f", {self.ram_hits} from the RAM tier" if self.vram_nbytes is not None else "")
                + (f", {self.experts_warmed} there at the start" if self.experts_warmed else "")
            )
            lines.append(
                f"drive     {format_nbytes(self.bytes_read)} read"
                + (f" at {self.drive_bytes_per_s / 1e9:.2f} GB/s" if self.drive_bytes_per_s else "")
                + f", up to {self.num_readers} reads at a time ({self.io_reason}); waited {self.read_s:.2f} s, "
                f"{self.waiting_share:.0%} of the time; {self.major_faults} major faults"
            )
            if self.guess_precision is not None and self.guess_recall is not None:
                lines.append(
                    f"guesses   by {self.prefetch}: {self.guess_precision:.0%} right, {self.guess_recall:.0%} of "
                    f"what was needed; {self.useful_guesses} reads useful, {self.wasted_guesses} in vain"
                )
            if self.prefill_read_ratio is not None:
                lines.append(
                    f"prompt    {self.prefill_read_ratio:.2f} bytes read for each byte of experts it needed"
                )
        lines.append(f"limit     {self.limit()}")
        return "\n".join(lines)

    def _memory(self) -> str:
        experts = format_nbytes(self.expert_slots_nbytes)
        if self.vram_nbytes is None:
            return f"{format_nbytes(self.ram_nbytes)} budget, {experts} of it for experts"
        return (
            f"{format_nbytes(self.vram_nbytes)} device budget, {experts} of it for experts; RAM "
            f"{format_nbytes(self.ram_nbytes)}, {format_nbytes(self.ram_tier_nbytes)} for others"
        )


def _rate(tokens: int, seconds: float) -> float | None:
    return tokens / seconds if seconds > 0 else None


def _per_second(tokens: int, seconds: float) -> str:
    rate = _rate(tokens, seconds)
    return f" ({rate:.1f} tokens/s)" if rate is not None and tokens else ""

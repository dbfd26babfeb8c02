"""Routing origin: the models, tokenizers and prompt sets that a profile or a trace was recorded from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoutingOrigin:
    """Where routing was seen; each tuple has one value per source, more after a merge, without repeats."""

    architecture: str  # GGUF's name, such as "qwen3moe"
    pack_ids: tuple[str, ...]  # 64 hex digits each
    tokenizers_sha256: tuple[str, ...]
    prompt_sets_sha256: tuple[str, ...]

    def merge(self, other: RoutingOrigin) -> RoutingOrigin:
        """Both origins' sources, in order; the architectures must be equal."""
        assert self.architecture == other.architecture
        return RoutingOrigin(
            self.architecture,
            _union(self.pack_ids, other.pack_ids),
            _union(self.tokenizers_sha256, other.tokenizers_sha256),
            _union(self.prompt_sets_sha256, other.prompt_sets_sha256),
        )


def _union(first: tuple[str, ...], second: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(first + second))

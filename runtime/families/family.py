"""What a family file declares."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """How the layers of some architectures differ; everything else follows from which tensors exist."""

    architectures: tuple[str, ...]  # GGUF's names
    gguf_permutes_qk: bool = False  # a GGUF of the family stores rotated pairs of q and k rows side by side

"""What a family file declares, and the look-up by GGUF architecture name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime.rope import Pairing


@dataclass(frozen=True, slots=True)
class Family:
    """How the layers of some architectures differ; everything else follows from which tensors exist."""

    architectures: tuple[str, ...]  # GGUF's names
    gguf_rope: Pairing = "half"  # the order in which a GGUF of the family stores q and k rows

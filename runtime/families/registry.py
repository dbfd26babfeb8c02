"""Which family an architecture belongs to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmpack.errors import UnsupportedError
from runtime.families import llama, olmoe, qwen

if TYPE_CHECKING:
    from runtime.families.family import Family

FAMILIES: dict[str, Family] = {
    name: module.FAMILY for module in (llama, olmoe, qwen) for name in module.FAMILY.architectures
}


def find_family(architecture: str) -> Family:
    """The family of a GGUF architecture name; UnsupportedError lists the known ones."""
    if architecture not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise UnsupportedError(f"architecture {architecture!r} can be packed but not run yet; known: {known}")
    return FAMILIES[architecture]

"""What lmpack inspect --residency adds: how much of a pack the page cache holds, and of which experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmpack.errors import UnsupportedError
from lmpack.expert_key import ExpertKey

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmpack.pack import Pack
    from lmpack.reference import FileExtent

_LINE_EXPERTS = 64  # in one line of the map
_LEVELS = " .:-=+*#%@"  # from nothing to everything


@dataclass(frozen=True, slots=True)
class Residency:
    """Bytes in the page cache: of the shared tensors, and of every expert, layer by layer."""

    shared_nbytes: int
    shared_cached_nbytes: int
    layers: dict[int, list[tuple[int, int]]]  # layer -> (nbytes, cached) of each expert

    @classmethod
    def of_pack(cls, pack: Pack) -> Residency:
        """Ask the kernel; raises UnsupportedError where it does not tell."""
        layers = {
            entry.layer: [
                _residency(pack.expert_extents(ExpertKey(entry.layer, expert)))
                for expert in range(entry.num_experts)
            ]
            for entry in pack.manifest.layers
        }
        return cls(*_residency(pack.shared_extents()), layers)

    def to_json(self) -> dict[str, object]:
        """All of it, with the numbers of the experts that are wholly there."""
        return {
            "shared": {"nbytes": self.shared_nbytes, "cached_nbytes": self.shared_cached_nbytes},
            "layers": [
                {
                    "layer": layer,
                    "nbytes": sum(nbytes for nbytes, _ in experts),
                    "cached_nbytes": sum(cached for _, cached in experts),
                    "experts": [
                        number for number, (nbytes, cached) in enumerate(experts) if cached >= nbytes
                    ],
                }
                for layer, experts in self.layers.items()
            ],
        }

    def lines(self) -> list[str]:
        """A map for people: one character an expert."""
        everything = [pair for experts in self.layers.values() for pair in experts]
        whole = sum(cached >= nbytes for nbytes, cached in everything)
        shared = _share([(self.shared_nbytes, self.shared_cached_nbytes)])
        lines = [
            "",
            f"in the page cache: {_share(everything)} of the experts, {whole} of {len(everything)} wholly",
            f"                   {shared} of the shared tensors",
        ]
        for layer, experts in self.layers.items():
            cells = "".join(_LEVELS[min(9, 9 * cached // nbytes)] for nbytes, cached in experts)
            for first in range(0, len(cells), _LINE_EXPERTS):
                head = f"L{layer:03d} {_share(experts):>5}" if first == 0 else " " * 10
                lines.append(f"{head} |{cells[first : first + _LINE_EXPERTS]}|")
        return lines


def _share(pairs: list[tuple[int, int]]) -> str:
    nbytes = sum(pair[0] for pair in pairs)
    return f"{min(1.0, sum(pair[1] for pair in pairs) / nbytes):.0%}" if nbytes else "none"


def _residency(extents: Sequence[FileExtent]) -> tuple[int, int]:
    """How many bytes these are, and how many of them are cached."""
    from runtime.page_cache import cached_nbytes

    cached = 0
    for extent in extents:
        found = cached_nbytes(extent.path, extent.offset, extent.nbytes)
        if found is None:
            raise UnsupportedError(
                f"{extent.path}: the kernel tells what is cached only to a file's owner; run this as its owner"
            )
        cached += min(found, extent.nbytes)  # pages are counted whole
    return sum(extent.nbytes for extent in extents), cached

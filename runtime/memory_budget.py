"""How a memory budget is spent: what every run needs first, then expert slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmpack.byte_size import format_nbytes
from lmpack.errors import BudgetError
from runtime.expert_layout import expert_layouts
from runtime.free_memory import free_memory_nbytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from lmpack.manifest import Manifest
    from runtime.expert_layout import ExpertLayout

_HEADROOM = 0.1
"""Of what is free now, the share that a run without --ram leaves to everybody else."""
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Memory:
    """A kind of memory that a budget is made for."""

    name: str
    option: str  # that limits it
    process_nbytes: Callable[[], int]
    free_nbytes: Callable[[], int]


def process_nbytes() -> int:
    """Return what Python takes with torch, ggml and a tokenizer of 150,000 tokens loaded.

    240 to 330 MiB were measured; a torch that could use a GPU has its libraries loaded wherever it computes, and takes
    280 MiB more. It depends on nothing else, so that a budget which is legal today is legal tomorrow.
    """
    import torch  # here, for lmpack simulate plans without it

    can_use_gpu = torch.version.cuda is not None or torch.version.hip is not None
    return (720 if can_use_gpu else 384) << 20


RAM = Memory("memory", "--ram", process_nbytes, free_memory_nbytes)


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Bytes of each purpose; together at most `total_nbytes`."""

    total_nbytes: int
    process_nbytes: int
    dense_nbytes: int
    kv_nbytes: int
    buffers_nbytes: int
    layouts: tuple[ExpertLayout, ...]
    slots: tuple[int, ...]  # of each layout

    @classmethod
    def plan(
        cls,
        manifest: Manifest,
        *,
        ram_nbytes: int | None,
        dense_nbytes: int,
        kv_nbytes: int,
        buffers_nbytes: int,
        top_k: int,
        memory: Memory = RAM,
        elsewhere: Sequence[int] | None = None,
    ) -> MemoryBudget:
        """Give the experts what the rest leaves of `ram_nbytes` (None: what is free now, less a tenth).

        Every layout gets at least `top_k` slots, what one token needs in one layer, and no more than it has
        experts; beyond that, the layouts share by the bytes they lack, so that no layout loses when the budget
        grows. Of each layout so many experts can be `elsewhere`, in faster memory, and need no slot but `top_k` to
        come and go through. `memory` is the kind that is given out, `ram_nbytes` of it. Raises BudgetError naming
        the smallest budget that works.
        """
        total = ram_nbytes if ram_nbytes is not None else int(memory.free_nbytes() * (1 - _HEADROOM))
        layouts = expert_layouts(manifest)
        least = [min(top_k, layout.num_experts) for layout in layouts]
        most = [layout.num_experts for layout in layouts]
        if elsewhere is not None:
            most = [min(all_, all_ - gone + top_k) for all_, gone in zip(most, elsewhere, strict=True)]
        purposes = {
            "process": memory.process_nbytes(),
            "dense weights": dense_nbytes,
            "KV cache": kv_nbytes,
            "buffers": buffers_nbytes,
        }
        fixed = sum(purposes.values())
        smallest = fixed + sum(slots * layout.stride for slots, layout in zip(least, layouts, strict=True))
        if total < smallest:
            given = f"the {memory.name} " + ("budget" if ram_nbytes is not None else "that is free now")
            raise BudgetError(
                f"{given} is {format_nbytes(total)}, too little for this model: {_list(purposes)} and {sum(least)} "
                f"experts take {format_nbytes(smallest)}; use {memory.option} {-(-smallest // _MIB)}MiB or more"
                f"{', or a smaller --context' if kv_nbytes else ''}; the smallest is {smallest} bytes"
            )
        slots = _share(layouts, least, most, total - smallest)
        return cls(total, purposes["process"], dense_nbytes, kv_nbytes, buffers_nbytes, layouts, slots)

    @property
    def experts_nbytes(self) -> int:
        """What the slots take."""
        return sum(slots * layout.stride for slots, layout in zip(self.slots, self.layouts, strict=True))

    @property
    def resident_share(self) -> float:
        """Share of the experts' bytes that fit; 1 for a dense model."""
        all_nbytes = sum(layout.nbytes for layout in self.layouts)
        return self.experts_nbytes / all_nbytes if all_nbytes else 1.0

    def describe(self) -> str:
        """One line for people."""
        purposes = {
            "dense": self.dense_nbytes,
            "KV": self.kv_nbytes,
            "buffers": self.buffers_nbytes,
            "process": self.process_nbytes,
            "experts": self.experts_nbytes,
        }
        return f"budget {format_nbytes(self.total_nbytes)}: {_list(purposes)} ({self.resident_share:.0%} resident)"


def _list(purposes: Mapping[str, int]) -> str:
    return ", ".join(f"{purpose} {format_nbytes(nbytes)}" for purpose, nbytes in purposes.items() if nbytes)


def _share(
    layouts: Sequence[ExpertLayout], least: Sequence[int], most: Sequence[int], extra_nbytes: int
) -> tuple[int, ...]:
    """Slots per layout: the least, and of the rest a share by what its experts beyond the least take."""
    wanted = [(high - low) * layout.stride for layout, low, high in zip(layouts, least, most, strict=True)]
    all_wanted = sum(wanted)
    if all_wanted <= extra_nbytes:
        return tuple(most)
    return tuple(
        slots + extra_nbytes * want // all_wanted // layout.stride
        for layout, slots, want in zip(layouts, least, wanted, strict=True)
    )

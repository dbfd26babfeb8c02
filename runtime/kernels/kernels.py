"""What the model asks of an implementation of its arithmetic, and which one answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from lmpack.errors import UnsupportedError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from runtime.expert_bank import ExpertBank
    from runtime.kernels.operations import Operations, T
    from runtime.kernels.weight import Weight
    from runtime.step import Step


class Block(Protocol):
    """A part of the model, written in operations; the same object means the same operations over equal shapes."""

    def __call__(self, ops: Operations[T], inputs: tuple[T, ...], step: Step | None) -> T: ...

    def __hash__(self) -> int: ...


@dataclass(frozen=True, slots=True, eq=False)
class ExpertRows:
    """An expert's share of a prefill."""

    slot: int
    rows: Tensor  # int64: of x
    places: Tensor  # int64, as many: rows of the outputs


class Kernels(Protocol):
    """Arithmetic over weights in their stored blocks.

    A returned tensor may be a view of memory that the next call reuses: clone what must outlive it.
    An UnsupportedError names a dtype or an expert part that the implementation cannot use.
    """

    @property
    def name(self) -> str:
        """What reports print: torch or ggml."""

    def run(self, block: Block, *inputs: Tensor, step: Step | None = None) -> Tensor:
        """What the block makes of these tensors (float32 or int32, contiguous), and of the step where it attends.

        The weights that a block names must stay where they are until close().
        """

    def prepare(self, weight: Weight) -> Weight:
        """The same matrix as `linear` multiplies it fastest, perhaps in the same memory: the argument is used up."""

    def computes_at_once(self, num_rows: int, bank: ExpertBank) -> bool:
        """Whether expert_ffn is the way for several tokens that take so many slots of this bank in all."""

    def expert_ffn(self, x: Tensor, slots: Sequence[Sequence[int]], bank: ExpertBank) -> Tensor:
        """Each token through its slots' down(silu(gate(x)) * up(x)), unweighted (Shazeer 2020, eq. 6).

        x float32 [n, hidden], n rows of k slots -> float32 [n, k, hidden]. A token and an expert give the same bits
        whatever the slot's number, the other slots and the other tokens. May be called from a block's host function.
        """

    def expert_ffns(self, x: Tensor, work: Iterable[ExpertRows], bank: ExpertBank, outputs: Tensor) -> None:
        """Rows of many tokens through the same, into rows of `outputs`: x [n, hidden], outputs [m, hidden].

        Each share is computed as `work` yields it, by several threads at once, one at a time of which asks for the
        next. A token and an expert give the same bits whatever the rows beside it, and as expert_ffn.
        """

    def close(self) -> None:
        """Join the threads and free the memory; may be called again."""


def load_kernels(name: str, *, num_threads: int, device: str = "cpu") -> Kernels:
    """The kernels called "torch" or "ggml"; "auto" is ggml on the CPU where its library is there, else torch,
    whose name then says what is wrong with ggml's.

    UnsupportedError when "ggml" is asked for by name and cannot be loaded; the message says why.
    """
    assert num_threads >= 1
    if device != "cpu" and name == "ggml":
        raise UsageError(
            f"the ggml kernels run on the CPU alone; with --device {device} use --kernels torch or auto"
        )
    if name == "torch" or (device != "cpu" and name == "auto"):
        return _torch_kernels(num_threads)
    if name == "ggml":
        return _ggml_kernels(num_threads)
    if name == "auto":
        try:
            return _ggml_kernels(num_threads)
        except UnsupportedError as error:
            return _torch_kernels(num_threads, str(error))
    raise UsageError(f"no kernels are called {name!r}; expected auto, torch or ggml")


def _torch_kernels(num_threads: int, reason: str = "") -> Kernels:
    from runtime.kernels.torch_kernels import TorchKernels

    return TorchKernels(num_threads, reason)


def _ggml_kernels(num_threads: int) -> Kernels:
    from runtime.kernels.ggml_kernels import GGMLKernels

    return GGMLKernels(num_threads)

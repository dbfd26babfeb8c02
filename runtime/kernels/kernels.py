"""What the model asks of an implementation of its matrix products, and which one answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from lmpack.errors import UnsupportedError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from runtime.expert_bank import ExpertBank
    from runtime.kernels.rms_norm import RMSNorm
    from runtime.kernels.weight import Weight


class Kernels(Protocol):
    """Matrix products over weights in their stored blocks.

    A returned tensor may be a view of memory that the next call reuses: clone what must outlive it.
    An UnsupportedError names a dtype or an expert part that the implementation cannot use.
    """

    @property
    def name(self) -> str:
        """What reports print: torch or ggml."""

    def embed(self, weight: Weight, token_ids: Tensor) -> Tensor:
        """Rows of the table: int64 [n] -> float32 [n, hidden]."""

    def linear(self, x: Tensor, weights: Sequence[Weight], norm: RMSNorm | None = None) -> tuple[Tensor, ...]:
        """Several matrices over one input, normalised first when asked: float32 [n, in] -> [n, out_i] each."""

    def expert_ffn(self, x: Tensor, slots: Tensor, bank: ExpertBank, norm: RMSNorm | None = None) -> Tensor:
        """Each chosen slot's down(silu(gate(x)) * up(x)), unweighted (Shazeer 2020, eq. 6).

        x float32 [n, hidden], slots int32 [n, k] -> float32 [n, k, hidden]. A token and an expert give the same
        bits whatever the slot's number, n and k.
        """

    def feed_forward(
        self, x: Tensor, gate: Weight, up: Weight, down: Weight, norm: RMSNorm | None = None
    ) -> Tensor:
        """down(silu(gate(x)) * up(x)): float32 [n, hidden] -> float32 [n, hidden]."""

    def close(self) -> None:
        """Join the threads and free the memory; may be called again."""


def load_kernels(name: str, *, num_threads: int) -> Kernels:
    """The kernels called "torch" or "ggml"; "auto" is ggml where its library is there, else torch.

    UnsupportedError when "ggml" is asked for by name and cannot be loaded; the message says why.
    """
    assert num_threads >= 1
    if name == "torch":
        return _torch_kernels()
    if name == "ggml":
        return _ggml_kernels(num_threads)
    if name == "auto":
        try:
            return _ggml_kernels(num_threads)
        except UnsupportedError:
            return _torch_kernels()  # its name says so in every report
    raise UsageError(f"no kernels are called {name!r}; expected auto, torch or ggml")


def _torch_kernels() -> Kernels:
    from runtime.kernels.torch_kernels import TorchKernels

    return TorchKernels()


def _ggml_kernels(num_threads: int) -> Kernels:
    from runtime.kernels.ggml_kernels import GGMLKernels

    return GGMLKernels(num_threads)

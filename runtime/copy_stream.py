"""Copies between memory of this process and memory on the compute device, where the two are apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class CopyEvent(Protocol):
    """The end of one copy; a torch.cuda.Event is one."""

    def synchronize(self) -> None:
        """Return when the copy has ended."""


class CopyStream(Protocol):
    """Makes copies one after another, in the order in which they were submitted, by whatever thread."""

    def allocate(self, nbytes: int) -> Tensor:
        """Memory on the device, uint8, one-dimensional; not to be used after close()."""

    def pin(self, storage: Tensor) -> None:
        """Have copies from and to this memory of the process run beside everything else, until close()."""

    def copy(self, source: Tensor, target: Tensor) -> CopyEvent:
        """Submit a copy of bytes; neither side may be touched on the host before the event."""

    def follow_compute(self) -> None:
        """Begin no copy submitted from now on before the arithmetic that this thread has asked for so far has ended."""

    def close(self) -> None:
        """End all copies, then give the device's memory back; a second time does nothing."""

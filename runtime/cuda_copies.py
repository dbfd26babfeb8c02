"""Copies from and to a GPU, on a stream of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


class CudaCopies:
    """A CopyStream for CUDA: what runs on the device's current stream goes on meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        self._pinned: list[int] = []  # addresses

    def allocate(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def pin(self, storage: Tensor) -> None:
        # Registered where it lies: torch's own pinned memory comes in powers of two.
        torch.cuda.check_error(self._cudart.cudaHostRegister(storage.data_ptr(), storage.numel(), 0))
        self._pinned.append(storage.data_ptr())

    def copy(self, source: Tensor, target: Tensor) -> torch.cuda.Event:
        # blocking: who waits for it does not spin
        event: torch.cuda.Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event.record(self._stream)
        return event

    def follow_compute(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def close(self) -> None:
        self._stream.synchronize()
        while self._pinned:
            torch.cuda.check_error(self._cudart.cudaHostUnregister(self._pinned.pop()))

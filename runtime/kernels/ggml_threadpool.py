"""Threads of ggml's that wait for the next graph."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from runtime.kernels.ggml_library import ThreadpoolParams

if TYPE_CHECKING:
    from runtime.kernels.ggml_library import GGMLLibrary

# Idle workers spin this long before they sleep: in ggml's unit, about 3 ms. Longer than Python takes between two
# calls of one token, shorter than a read from the drive.
_POLL = 1


class Threadpool:
    """num_threads - 1 workers beside the calling thread, which computes as well."""

    def __init__(self, library: GGMLLibrary, num_threads: int) -> None:
        self._library = library
        self.num_threads = num_threads
        params = ThreadpoolParams()
        library.ggml_threadpool_params_init(ctypes.byref(params), num_threads)
        params.poll = _POLL
        self.address: int | None = library.ggml_threadpool_new(ctypes.byref(params))
        assert self.address is not None

    def close(self) -> None:
        """Join the workers; may be called again."""
        if self.address is not None:
            self._library.ggml_threadpool_free(self.address)
            self.address = None

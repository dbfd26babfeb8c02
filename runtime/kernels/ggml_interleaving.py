"""ggml's faster layout of some quantized matrices: the blocks of several rows side by side.

ggml keeps it behind a buffer type that its CPU backend offers, CPU_REPACK; which dtypes it takes depends on the
processor. It fills memory of ours in that layout, and multiplies by it where a tensor names such a buffer and the
layout.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import sys
from typing import TYPE_CHECKING

from converters.ggml_base import GGML_TYPE_IDS
from lmpack.dtype import dtype_nbytes
from runtime.kernels.ggml_library import InitParams, TensorStruct
from runtime.kernels.weight import Weight

if TYPE_CHECKING:
    from collections.abc import Iterator

    from runtime.kernels.ggml_library import GGMLLibrary

_NAME = b"CPU_REPACK"
_ROWS_AT_ONCE = 1024  # a multiple of every layout's rows; as much is copied aside meanwhile
_ERROR = 4  # GGML_LOG_LEVEL_ERROR
_DTYPES = {type_id: dtype for dtype, type_id in GGML_TYPE_IDS.items()}


class Interleaving:
    """Lays matrices out anew, and marks the tensors that show them."""

    def __init__(self, library: GGMLLibrary) -> None:
        self._library = library
        self._layouts: dict[str, int] = {}  # ggml's description of a dtype's layout
        kinds = [kind for kind in _buffer_types(library) if library.ggml_backend_buft_name(kind) == _NAME]
        self._buffer: int | None = library.ggml_backend_buft_alloc_buffer(kinds[0], 64) if kinds else None

    def apply(self, weight: Weight) -> Weight:
        """The matrix in ggml's layout, in the same memory; the argument itself where ggml has none for it."""
        if self._buffer is None:
            return weight
        rows, columns = weight.shape
        with self._tensor(weight.dtype, rows, columns) as whole:
            whole.buffer = self._buffer
            whole.data = self._library.ggml_backend_buffer_get_base(self._buffer)
            self._library.ggml_backend_buffer_init_tensor(self._buffer, ctypes.addressof(whole))
            if whole.extra is None:
                return weight
            self._layouts[weight.dtype] = whole.extra
        row_nbytes = dtype_nbytes(weight.dtype, (columns,))
        with _silenced(self._library):  # ggml reports each matrix
            for first in range(0, rows, _ROWS_AT_ONCE):
                self._lay_out(weight, first, min(_ROWS_AT_ONCE, rows - first), row_nbytes)
        return Weight(weight.storage, weight.dtype, weight.shape, interleaved=True)

    def mark(self, tensor: TensorStruct) -> None:
        """Say that this tensor's memory is laid out so."""
        tensor.buffer = self._buffer
        tensor.extra = self._layouts[_DTYPES[tensor.type]]

    def close(self) -> None:
        """Free ggml's side of it; may be called again."""
        if self._buffer is not None:
            self._library.ggml_backend_buffer_free(self._buffer)
            self._buffer = None

    def _lay_out(self, weight: Weight, first: int, num_rows: int, row_nbytes: int) -> None:
        target = weight.storage[first * row_nbytes : (first + num_rows) * row_nbytes]
        aside = target.clone()
        with self._tensor(weight.dtype, num_rows, weight.shape[1]) as part:
            part.data = target.data_ptr()
            self.mark(part)
            self._library.ggml_backend_tensor_set(ctypes.addressof(part), aside.data_ptr(), 0, len(aside))

    @contextlib.contextmanager
    def _tensor(self, dtype: str, rows: int, columns: int) -> Iterator[TensorStruct]:
        context = self._library.ggml_init(InitParams(2 * self._library.ggml_tensor_overhead(), None, True))
        try:
            address = self._library.ggml_new_tensor_2d(context, GGML_TYPE_IDS[dtype], columns, rows)
            yield TensorStruct.from_address(address)
        finally:
            self._library.ggml_free(context)


def _buffer_types(library: GGMLLibrary) -> list[int]:
    """The kinds of memory, beside plain memory, that ggml's CPU backend computes from."""
    registry = library.ggml_backend_cpu_reg()
    address = library.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
    if address is None:
        return []
    of_device = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(address)
    kinds = of_device(library.ggml_backend_reg_dev_get(registry, 0))
    return list(itertools.takewhile(lambda kind: kind is not None, kinds))  # NULL ends the array


@contextlib.contextmanager
def _silenced(library: GGMLLibrary) -> Iterator[None]:
    """Keep ggml from writing anything but errors to the standard error."""

    def log(level: int, text: bytes, _: object) -> None:
        if level == _ERROR:
            sys.stderr.write(text.decode(errors="replace"))

    callback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(log)
    library.ggml_log_set(ctypes.cast(callback, ctypes.c_void_p), None)
    try:
        yield
    finally:
        library.ggml_log_set(None, None)

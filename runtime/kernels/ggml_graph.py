"""One ggml graph over memory that is handed in run by run: no ggml allocator, no backend, no copies."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from runtime.kernels.ggml_library import GGML_TYPE_IDS, InitParams, PlanStruct, TensorStruct

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from runtime.kernels.ggml_library import GGMLLibrary
    from runtime.kernels.ggml_threadpool import Threadpool

_ALIGNMENT = 64  # a cache line
_STATUS_SUCCESS = 0


@dataclass(frozen=True, slots=True)
class Output:
    """A float32 tensor that run() returns: the results of these operations, one after the other."""

    results: tuple[TensorStruct, ...]
    shape: tuple[int, ...]


class Graph:
    """Built once per shape: leaves, operations, finish(); afterwards a run only changes `data` pointers."""

    def __init__(self, library: GGMLLibrary, max_tensors: int = 32) -> None:
        self._library = library
        nbytes = max_tensors * library.ggml_tensor_overhead()
        nbytes += library.ggml_graph_overhead_custom(max_tensors, False)
        self._context = library.ggml_init(InitParams(nbytes, None, True))
        if not self._context:
            raise MemoryError("ggml_init")
        self._graph = library.ggml_new_graph_custom(self._context, max_tensors, False)
        self._leaves: list[tuple[TensorStruct, int]] = []
        self._operations: list[TensorStruct] = []
        self._outputs: tuple[Output, ...] = ()
        self._kept: tuple[Tensor, ...] | None = None
        self._inner: list[tuple[TensorStruct, int]] = []
        self._plan = PlanStruct()
        self._scratch_address = 0
        self.scratch_nbytes = 0

    @property
    def num_leaves(self) -> int:
        return len(self._leaves)

    def leaf(self, dtype: str, *ne: int, offset: int = 0) -> TensorStruct:
        """The caller's memory, in one to three dimensions in ggml's order, `offset` bytes after its address."""
        new = getattr(self._library, f"ggml_new_tensor_{len(ne)}d")
        tensor = TensorStruct.from_address(new(self._context, GGML_TYPE_IDS[dtype], *ne))
        self._leaves.append((tensor, offset))
        return tensor

    def stacked_leaf(
        self, dtype: str, shape: tuple[int, int], num_slots: int, stride: int, offset: int
    ) -> TensorStruct:
        """One [out_features, in_features] matrix of the caller's in each slot, `stride` bytes apart."""
        stack = self.leaf(dtype, shape[1], shape[0], num_slots, offset=offset)
        stack.nb[2] = stride
        stack.nb[3] = stride * num_slots
        return stack

    def operation(self, name: str, *arguments: TensorStruct | float) -> TensorStruct:
        """The result of ggml's function of this name over tensors of this graph and plain numbers."""
        function = getattr(self._library, name)
        plain = (
            ctypes.addressof(argument) if isinstance(argument, TensorStruct) else argument
            for argument in arguments
        )
        address = function(self._context, *plain)
        result = TensorStruct.from_address(address)
        self._operations.append(result)
        return result

    def finish(self, outputs: Sequence[Output], threadpool: Threadpool, *, keep_outputs: bool) -> Graph:
        """Fix the order of the operations and where their results lie.

        keep_outputs: allocate them here, for every run to write again; otherwise each run returns new ones.
        """
        library = self._library
        self._outputs = tuple(outputs)
        if keep_outputs:
            self._kept = self._new_outputs()
        leaving = {ctypes.addressof(result) for output in outputs for result in output.results}
        for operation in self._operations:
            library.ggml_build_forward_expand(self._graph, ctypes.addressof(operation))
        self._plan = library.ggml_graph_plan(self._graph, threadpool.num_threads, threadpool.address)
        end = align(self._plan.work_size)
        for operation in self._operations:
            address = ctypes.addressof(operation)
            if address not in leaving:
                self._inner.append((operation, end))
                end += align(library.ggml_nbytes(address))
        self.scratch_nbytes = end
        return self

    def run(self, scratch_address: int, addresses: Iterable[int]) -> tuple[Tensor, ...]:
        """Compute the outputs from the leaves at these addresses, given in the order in which they were made.

        scratch_address: of `scratch_nbytes` bytes, aligned to a cache line, that nobody else uses meanwhile.
        """
        if scratch_address != self._scratch_address:
            self._scratch_address = scratch_address
            self._plan.work_data = scratch_address
            for tensor, offset in self._inner:
                tensor.data = scratch_address + offset
        for (tensor, offset), address in zip(self._leaves, addresses, strict=True):
            tensor.data = address + offset
        outputs = self._kept or self._new_outputs()
        status = self._library.ggml_graph_compute(self._graph, ctypes.byref(self._plan))
        if status != _STATUS_SUCCESS:
            raise RuntimeError(f"ggml_graph_compute returned {status}")
        return outputs

    def close(self) -> None:
        """Free ggml's side of it."""
        self._library.ggml_free(self._context)

    def _new_outputs(self) -> tuple[Tensor, ...]:
        tensors = tuple(torch.empty(output.shape) for output in self._outputs)
        for output, tensor in zip(self._outputs, tensors, strict=True):
            address = tensor.data_ptr()
            for result in output.results:
                result.data = address
                address += self._library.ggml_nbytes(ctypes.addressof(result))
        return tensors


def align(nbytes: int) -> int:
    """The next multiple of a cache line."""
    return (nbytes + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT

"""A recorded sequence of ggml's operations and of host functions between them, in memory that is handed in.

No ggml allocator and no backend: weights stay where they are, and what lies between two operations gets a place in a
scratch, which it leaves after its last use.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from converters.ggml_base import GGML_TYPE_IDS
from runtime.kernels.ggml_library import InitParams, PlanStruct, TensorStruct
from runtime.kernels.scratch import ScratchPlaces

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from runtime.kernels.ggml_library import GGMLLibrary
    from runtime.kernels.ggml_threadpool import Threadpool
    from runtime.kernels.scratch import Scratch
    from runtime.step import Step

_STATUS_SUCCESS = 0
_TENSORS_PER_CONTEXT = 256
_TORCH_DTYPES = {GGML_TYPE_IDS["F32"]: torch.float32, GGML_TYPE_IDS["I32"]: torch.int32}


@dataclass(frozen=True, slots=True, eq=False)
class _HostCall:
    function: Callable[..., Tensor]
    inputs: tuple[TensorStruct, ...]
    result: TensorStruct
    shape: tuple[int, ...]


class Program:
    """Leaves, operations and host calls, then finish(); afterwards a run only changes `data` pointers."""

    def __init__(self, library: GGMLLibrary) -> None:
        self._library = library
        self._contexts: list[int] = []
        self._tensor_context = 0
        self._room = 0  # tensors that it still takes
        self._tensors: dict[int, TensorStruct] = {}  # by address
        self._inputs: dict[int, tuple[int, int]] = {}  # leaf -> number of the input, offset in bytes
        self._bound: dict[int, Callable[[Step], int]] = {}  # leaf -> its address in a step
        self._steps: list[TensorStruct | _HostCall] = []
        self._segment: dict[int, int] = {}  # result -> how many host calls precede it
        self._num_host_calls = 0
        self._parts: list[Callable[[], None]] = []
        self._placed: list[tuple[TensorStruct, int]] = []  # offset in the scratch
        self._work: list[tuple[PlanStruct, int]] = []
        self._given: list[tuple[TensorStruct, int, int]] = []  # in an input: its number, offset
        self._moving: list[tuple[TensorStruct, Callable[[Step], int], int]] = []  # in a step's memory: offset
        self._result: tuple[int, tuple[int, ...]] = (0, ())  # offset and shape
        self._memory: Tensor | None = None
        self._views: dict[int, Tensor] = {}  # what host functions and callers see
        self.scratch_nbytes = 0
        self.step: Step | None = None

    def input(self, number: int, dtype: str, *ne: int, offset: int = 0) -> TensorStruct:
        """The caller's memory, `offset` bytes after the address that a run is given as this input."""
        leaf = self._leaf(dtype, ne)
        self._inputs[ctypes.addressof(leaf)] = (number, offset)
        return leaf

    def memory(self, dtype: str, address: int, *ne: int) -> TensorStruct:
        """Memory that stays where it is."""
        leaf = self._leaf(dtype, ne)
        leaf.data = address
        return leaf

    def bound(self, dtype: str, address: Callable[[Step], int], *ne: int) -> TensorStruct:
        """Memory that each step has elsewhere."""
        leaf = self._leaf(dtype, ne)
        self._bound[ctypes.addressof(leaf)] = address
        return leaf

    def operation(self, name: str, *arguments: TensorStruct | float | None) -> TensorStruct:
        """The result of ggml's function of this name over tensors of this program and plain numbers."""
        plain = [
            self._address_here(argument) if isinstance(argument, TensorStruct) else argument
            for argument in arguments
        ]
        result = self._new(name, *plain)
        self._steps.append(result)
        self._segment[ctypes.addressof(result)] = self._num_host_calls
        return result

    def host(
        self, function: Callable[..., Tensor], inputs: tuple[TensorStruct, ...], shape: tuple[int, ...]
    ) -> TensorStruct:
        """What a function of torch tensors makes of these, float32 in this shape (torch's)."""
        outside = {*self._inputs, *self._bound}  # memory that no view of the scratch shows
        inputs = tuple(
            self.operation("ggml_cont", tensor) if self._root(tensor)[0] in outside else tensor
            for tensor in inputs
        )
        result = self._leaf("F32", shape[::-1])
        self._steps.append(_HostCall(function, inputs, result, shape))
        self._num_host_calls += 1
        return result

    def finish(self, results: Sequence[TensorStruct], shape: tuple[int, ...], team: Threadpool) -> Program:
        """Fix the order of all steps and where each result lies; `results`, one after the other, are a run's result."""
        offsets, end = self._offsets(results)
        self._result = (offsets[self._root(results[0])[0]], shape)
        segment: list[TensorStruct] = []
        work_nbytes = 0
        for step in (*self._steps, None):
            if isinstance(step, TensorStruct):
                segment.append(step)
                continue
            if segment:
                plan = self._add_graph(segment, team)
                work_nbytes = max(work_nbytes, plan.work_size)
                self._work.append((plan, end))
                segment = []
            if step is not None:
                self._add_host_call(step)
        for tensor in self._tensors.values():
            root, offset = self._root(tensor)
            if root in offsets:
                self._placed.append((tensor, offsets[root] + offset))
            elif root in self._inputs:
                number, start = self._inputs[root]
                self._given.append((tensor, number, start + offset))
            elif root in self._bound:
                self._moving.append((tensor, self._bound[root], offset))
            elif tensor.data is None:
                fixed = self._tensors[root].data
                tensor.data = None if fixed is None else fixed + offset
        self.scratch_nbytes = end + work_nbytes
        return self

    def run(self, scratch: Scratch, addresses: Sequence[int], step: Step | None = None) -> Tensor:
        """Compute from the inputs at these addresses; a view of the scratch, good until its next use."""
        if self._memory is not scratch.memory:
            self._place(scratch)
        for tensor, number, offset in self._given:
            tensor.data = addresses[number] + offset
        if step is not None:
            for tensor, address, offset in self._moving:
                tensor.data = address(step) + offset
        self.step = step
        for part in self._parts:
            part()
        return self._views[0]

    def close(self) -> None:
        """Free ggml's side of it."""
        while self._contexts:
            self._library.ggml_free(self._contexts.pop())

    def _context(self, nbytes: int) -> int:
        context: int | None = self._library.ggml_init(InitParams(nbytes, None, True))
        if not context:
            raise MemoryError("ggml_init")
        self._contexts.append(context)
        return context

    def _new(self, name: str, *arguments: object) -> TensorStruct:
        """Call one of ggml's functions that make one tensor."""
        if self._room == 0:
            self._context(_TENSORS_PER_CONTEXT * self._library.ggml_tensor_overhead())
            self._room = _TENSORS_PER_CONTEXT
            self._tensor_context = self._contexts[-1]
        self._room -= 1
        address = getattr(self._library, name)(self._tensor_context, *arguments)
        tensor = TensorStruct.from_address(address)
        self._tensors[address] = tensor
        return tensor

    def _leaf(self, dtype: str, ne: tuple[int, ...]) -> TensorStruct:
        return self._new(f"ggml_new_tensor_{len(ne)}d", GGML_TYPE_IDS[dtype], *ne)

    def _address_here(self, tensor: TensorStruct) -> int:
        """The tensor as an operation of the present graph may name it: by an alias, when an earlier graph made it."""
        address = ctypes.addressof(tensor)
        if self._segment.get(address, self._num_host_calls) != self._num_host_calls:
            return ctypes.addressof(self._new("ggml_view_tensor", address))
        return address

    def _root(self, tensor: TensorStruct) -> tuple[int, int]:
        """The tensor whose memory this one shows, and how many bytes after its start."""
        if tensor.view_src is None:
            return ctypes.addressof(tensor), 0
        return tensor.view_src, tensor.view_offs

    def _offsets(self, results: Sequence[TensorStruct]) -> tuple[dict[int, int], int]:
        """Where each root that a step writes lies in the scratch, and where the last ends."""
        last_use: dict[int, int] = {}
        for index, step in enumerate(self._steps):
            used = step.inputs if isinstance(step, _HostCall) else _sources(step)
            for source in used:
                tensor = self._tensors[source] if isinstance(source, int) else source
                last_use[self._root(tensor)[0]] = index
        offsets: dict[int, int] = {}
        end = 0
        for result in results:
            offsets[self._root(result)[0]] = end
            end += self._library.ggml_nbytes(ctypes.addressof(result))
        places = ScratchPlaces(end)
        for index, step in enumerate(self._steps):
            result = step.result if isinstance(step, _HostCall) else step
            root = ctypes.addressof(result)
            if result.view_src is None and root not in offsets:
                offsets[root] = places.take(self._library.ggml_nbytes(root), last_use.get(root, index))
            places.leave(index)
        return offsets, places.end

    def _add_graph(self, operations: Sequence[TensorStruct], team: Threadpool) -> PlanStruct:
        library = self._library
        size = 2 * len(operations) + 64  # operations and the leaves that they name
        size = max(size, sum(1 + len(_sources(operation)) for operation in operations))
        graph = library.ggml_new_graph_custom(
            self._context(library.ggml_graph_overhead_custom(size, False)), size, False
        )
        for operation in operations:
            library.ggml_build_forward_expand(graph, ctypes.addressof(operation))
        plan: PlanStruct = library.ggml_graph_plan(graph, team.num_threads, team.address)
        reference = ctypes.byref(plan)
        compute = library.ggml_graph_compute

        def run() -> None:
            status = compute(graph, reference)
            if status != _STATUS_SUCCESS:
                raise RuntimeError(f"ggml_graph_compute returned {status}")

        self._parts.append(run)
        return plan

    def _add_host_call(self, call: _HostCall) -> None:
        views = self._views
        inputs = [ctypes.addressof(tensor) for tensor in call.inputs]
        result = ctypes.addressof(call.result)
        views.update(dict.fromkeys((*inputs, result), torch.empty(0)))  # made when placed

        def run() -> None:
            made = call.function(*(views[address] for address in inputs))
            assert made.shape == call.shape
            views[result].copy_(made.view(views[result].shape))

        self._parts.append(run)

    def _place(self, scratch: Scratch) -> None:
        scratch.fit(self.scratch_nbytes)
        memory = scratch.memory
        start = memory.data_ptr()
        for tensor, offset in self._placed:
            tensor.data = start + offset
            address = ctypes.addressof(tensor)
            if address in self._views:
                self._views[address] = _view(memory, offset, tensor)
        for plan, offset in self._work:
            plan.work_data = start + offset
        offset, shape = self._result
        nbytes = 4 * math.prod(shape)
        self._views[0] = memory[offset : offset + nbytes].view(torch.float32).view(shape)
        self._memory = memory


def _sources(tensor: TensorStruct) -> list[int]:
    return [address for address in tensor.src if address is not None]


def _view(memory: Tensor, offset: int, tensor: TensorStruct) -> Tensor:
    """A result as torch sees it: ggml's dimensions the other way round, leading ones of length 1 left out."""
    shape, strides = list(tensor.ne), [nbytes // 4 for nbytes in tensor.nb]
    while len(shape) > 2 and shape[-1] == 1:
        shape.pop()
        strides.pop()
    words = memory[offset:].view(_TORCH_DTYPES[tensor.type])
    return words.as_strided(shape[::-1], strides[::-1])

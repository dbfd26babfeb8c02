"""Experts of a prefill, each one thread's: what several of them share is cut at whole experts."""

from __future__ import annotations

import functools
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

import torch

from runtime.kernels.ggml_program import Program
from runtime.kernels.ggml_programs import Programs
from runtime.kernels.ggml_threadpool import Threadpool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor

    from runtime.expert_bank import ExpertBank
    from runtime.kernels.expert_matrices import ExpertMatrices, ExpertMatrix
    from runtime.kernels.ggml_library import GGMLLibrary, TensorStruct
    from runtime.kernels.kernels import ExpertRows


class ExpertLanes:
    """Threads with a program and a scratch of their own each."""

    def __init__(self, library: GGMLLibrary, num_threads: int) -> None:
        self._lanes = [_Lane(library) for _ in range(num_threads)]
        self._threads = ThreadPoolExecutor(num_threads, initializer=torch.set_num_threads, initargs=(1,))

    def run(
        self,
        work: Iterable[ExpertRows],
        x: Tensor,
        experts: ExpertMatrices,
        bank: ExpertBank,
        outputs: Tensor,
    ) -> None:
        """Compute each share in the lane that is free; raises what `work` raises, when all lanes have stopped."""
        shares = _Shares(work)
        running = [self._threads.submit(lane.run, shares, x, experts, bank, outputs) for lane in self._lanes]
        try:
            for lane in running:
                lane.result()
        finally:
            shares.stop()
            wait(running)

    def close(self) -> None:
        """Join the threads; may be called again."""
        self._threads.shutdown()
        for lane in self._lanes:
            lane.close()


class _Lane:
    def __init__(self, library: GGMLLibrary) -> None:
        self._library = library
        self._alone = Threadpool(library, 1)
        self._programs = Programs()

    def run(
        self, shares: _Shares, x: Tensor, experts: ExpertMatrices, bank: ExpertBank, outputs: Tensor
    ) -> None:
        with torch.inference_mode():
            for share in shares:
                assert 0 <= share.slot < bank.num_slots
                rows = x[share.rows]
                program = self._programs.get(
                    (len(rows), experts), functools.partial(self._recorded, len(rows), experts)
                )
                address = bank.storage.data_ptr() + share.slot * bank.stride
                outputs[share.places] = program.run(self._programs.scratch, (rows.data_ptr(), address))

    def close(self) -> None:
        self._programs.close()
        self._alone.close()

    def _recorded(self, n: int, experts: ExpertMatrices) -> Program:
        program = Program(self._library)
        result = expert(program, experts, 1, program.input(0, "F32", experts.hidden_size, n))
        return program.finish([result], (n, experts.hidden_size), self._alone)


class _Shares:
    """An iterator that several threads may share."""

    def __init__(self, work: Iterable[ExpertRows]) -> None:
        self._work = iter(work)
        self._lock = threading.Lock()
        self._stopped = False

    def __iter__(self) -> Iterator[ExpertRows]:
        return self

    def __next__(self) -> ExpertRows:
        with self._lock:
            if self._stopped:
                raise StopIteration
            return next(self._work)

    def stop(self) -> None:
        self._stopped = True


def swiglu(
    program: Program,
    experts: ExpertMatrices,
    product: Callable[[ExpertMatrix, TensorStruct], TensorStruct],
    x: TensorStruct,
) -> TensorStruct:
    """down(silu(gate(x)) * up(x)), where `product` multiplies by one of an expert's matrices."""
    # Neighbours in the slot are one taller matrix: x is rounded once, and the threads meet less often.
    if (joined := experts.gate.followed_by(experts.up)) is not None:
        inner = program.operation("ggml_swiglu", product(joined, x))
    elif (joined := experts.up.followed_by(experts.gate)) is not None:
        inner = program.operation("ggml_swiglu_swapped", product(joined, x))
    else:
        inner = program.operation("ggml_swiglu_split", product(experts.gate, x), product(experts.up, x))
    return product(experts.down, inner)


def expert(program: Program, experts: ExpertMatrices, number: int, x: TensorStruct) -> TensorStruct:
    """x through the expert at the program's input of this number."""

    def product(matrix: ExpertMatrix, rows: TensorStruct) -> TensorStruct:
        out_features, in_features = matrix.shape
        weight = program.input(number, matrix.dtype, in_features, out_features, offset=matrix.offset)
        return program.operation("ggml_mul_mat", weight, rows)

    return swiglu(program, experts, product, x)

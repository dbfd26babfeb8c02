"""ggml's CPU library through ctypes: the functions that compute, and whether we can trust their structs.

Every function and struct below is declared in ggml.h and ggml-cpu.h of ggml 0.20. A struct that another version laid
out differently would corrupt memory silently, so loading checks each field we touch against what ggml's own functions
say of it.
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING

from converters.ggml_base import GGML_TYPE_IDS, HOW_TO_INSTALL, GGMLBase, find_ggml
from lmpack.errors import UnsupportedError

if TYPE_CHECKING:
    from pathlib import Path

    from converters.ggml_base import Functions

_SPARE_NBYTES = 64  # room for fields that a later version appends to a struct that it writes as a whole


class InitParams(ctypes.Structure):
    """struct ggml_init_params."""

    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class TensorStruct(ctypes.Structure):
    """struct ggml_tensor; ne counts elements from the fastest dimension, nb are strides in bytes."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * 64),
        ("extra", ctypes.c_void_p),
    )


class PlanStruct(ctypes.Structure):
    """struct ggml_cplan."""

    _fields_ = (
        ("work_size", ctypes.c_size_t),
        ("work_data", ctypes.c_void_p),
        ("n_threads", ctypes.c_int),
        ("threadpool", ctypes.c_void_p),
        ("abort_callback", ctypes.c_void_p),
        ("abort_callback_data", ctypes.c_void_p),
        ("use_ref", ctypes.c_bool),
        ("spare", ctypes.c_uint8 * _SPARE_NBYTES),
    )


class ThreadpoolParams(ctypes.Structure):
    """struct ggml_threadpool_params."""

    _fields_ = (
        ("cpumask", ctypes.c_bool * 512),
        ("n_threads", ctypes.c_int),
        ("prio", ctypes.c_int),
        ("poll", ctypes.c_uint32),
        ("strict_cpu", ctypes.c_bool),
        ("paused", ctypes.c_bool),
        ("spare", ctypes.c_uint8 * _SPARE_NBYTES),
    )


class TypeTraitsStruct(ctypes.Structure):
    """struct ggml_type_traits_cpu."""

    _fields_ = (
        ("from_float", ctypes.c_void_p),
        ("vec_dot", ctypes.c_void_p),
        ("vec_dot_type", ctypes.c_int),
        ("nrows", ctypes.c_int64),
    )


_POINTER, _INT, _INT64, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_size_t
_FLOAT = ctypes.c_float

# name -> (result, arguments); ggml_context, ggml_tensor, ggml_cgraph and ggml_threadpool pointers are plain ones
_GRAPH_FUNCTIONS: Functions = {
    "ggml_init": (_POINTER, (InitParams,)),
    "ggml_free": (None, (_POINTER,)),
    "ggml_tensor_overhead": (_SIZE, ()),
    "ggml_graph_overhead_custom": (_SIZE, (_SIZE, ctypes.c_bool)),
    "ggml_nbytes": (_SIZE, (_POINTER,)),
    "ggml_get_data": (_POINTER, (_POINTER,)),
    "ggml_get_name": (_POINTER, (_POINTER,)),  # char *: we want its address
    "ggml_set_input": (None, (_POINTER,)),
    "ggml_new_tensor_1d": (_POINTER, (_POINTER, _INT, _INT64)),
    "ggml_new_tensor_2d": (_POINTER, (_POINTER, _INT, _INT64, _INT64)),
    "ggml_new_tensor_3d": (_POINTER, (_POINTER, _INT, _INT64, _INT64, _INT64)),
    "ggml_view_1d": (_POINTER, (_POINTER, _POINTER, _INT64, _SIZE)),
    "ggml_view_tensor": (_POINTER, (_POINTER, _POINTER)),
    "ggml_reshape_2d": (_POINTER, (_POINTER, _POINTER, _INT64, _INT64)),
    "ggml_reshape_3d": (_POINTER, (_POINTER, _POINTER, _INT64, _INT64, _INT64)),
    "ggml_cont": (_POINTER, (_POINTER, _POINTER)),
    "ggml_cpy": (_POINTER, (_POINTER, _POINTER, _POINTER)),
    "ggml_soft_max": (_POINTER, (_POINTER, _POINTER)),
    "ggml_argsort": (_POINTER, (_POINTER, _POINTER, _INT)),
    "ggml_view_2d": (_POINTER, (_POINTER, _POINTER, _INT64, _INT64, _SIZE, _SIZE)),
    "ggml_sum_rows": (_POINTER, (_POINTER, _POINTER)),
    "ggml_div": (_POINTER, (_POINTER, _POINTER, _POINTER)),
    "ggml_out_prod": (_POINTER, (_POINTER, _POINTER, _POINTER)),
    "ggml_log_set": (None, (_POINTER, _POINTER)),
    "ggml_backend_reg_dev_get": (_POINTER, (_POINTER, _SIZE)),
    "ggml_backend_reg_get_proc_address": (_POINTER, (_POINTER, ctypes.c_char_p)),
    "ggml_backend_buft_name": (ctypes.c_char_p, (_POINTER,)),
    "ggml_backend_buft_alloc_buffer": (_POINTER, (_POINTER, _SIZE)),
    "ggml_backend_buffer_free": (None, (_POINTER,)),
    "ggml_backend_buffer_get_base": (_POINTER, (_POINTER,)),
    "ggml_backend_buffer_init_tensor": (_INT, (_POINTER, _POINTER)),
    "ggml_backend_tensor_set": (None, (_POINTER, _POINTER, _SIZE, _SIZE)),
    "ggml_add": (_POINTER, (_POINTER, _POINTER, _POINTER)),
    "ggml_sigmoid": (_POINTER, (_POINTER, _POINTER)),
    "ggml_soft_max_ext": (_POINTER, (_POINTER, _POINTER, _POINTER, _FLOAT, _FLOAT)),
    "ggml_rope_ext": (
        _POINTER,
        (_POINTER, _POINTER, _POINTER, _POINTER, _INT, _INT, _INT, *(_FLOAT,) * 6),
    ),
    "ggml_mul": (_POINTER, (_POINTER, _POINTER, _POINTER)),
    "ggml_rms_norm": (_POINTER, (_POINTER, _POINTER, _FLOAT)),
    "ggml_mul_mat": (_POINTER, (_POINTER, _POINTER, _POINTER)),
    "ggml_mul_mat_id": (_POINTER, (_POINTER, _POINTER, _POINTER, _POINTER)),
    "ggml_swiglu": (_POINTER, (_POINTER, _POINTER)),
    "ggml_swiglu_swapped": (_POINTER, (_POINTER, _POINTER)),
    "ggml_swiglu_split": (_POINTER, (_POINTER, _POINTER, _POINTER)),
    "ggml_get_rows": (_POINTER, (_POINTER, _POINTER, _POINTER)),
    "ggml_new_graph_custom": (_POINTER, (_POINTER, _SIZE, ctypes.c_bool)),
    "ggml_build_forward_expand": (None, (_POINTER, _POINTER)),
    "ggml_threadpool_params_init": (None, (_POINTER, _INT)),
}
_COMPUTE_FUNCTIONS: Functions = {
    "ggml_cpu_init": (None, ()),
    "ggml_backend_cpu_reg": (_POINTER, ()),
    "ggml_get_type_traits_cpu": (_POINTER, (_INT,)),
    "ggml_threadpool_new": (_POINTER, (_POINTER,)),
    "ggml_threadpool_free": (None, (_POINTER,)),
    "ggml_graph_plan": (PlanStruct, (_POINTER, _INT, _POINTER)),
    "ggml_graph_compute": (_INT, (_POINTER, _POINTER)),
}


class GGMLLibrary(GGMLBase):
    """All of ggml's functions that we call; load_ggml() gives the process's one instance."""

    how_to_go_on = f"{HOW_TO_INSTALL}, or use the torch kernels"

    def __init__(self, folder: Path) -> None:
        """Open the libraries in this folder; UnsupportedError says what is wrong with them."""
        super().__init__(folder)
        self.declare(self.base, _GRAPH_FUNCTIONS)
        self.declare(self.cpu, _COMPUTE_FUNCTIONS)
        self.ggml_cpu_init()
        self._check_structs()

    def multiplies(self, dtype: str) -> bool:
        """Tell whether ggml has a CPU dot product for rows of this dtype."""
        type_id = GGML_TYPE_IDS.get(dtype)
        if type_id is None or not self.ggml_type_size(type_id):
            return False
        traits = TypeTraitsStruct.from_address(self.ggml_get_type_traits_cpu(type_id))
        return traits.vec_dot is not None

    def check_product(self, dtype: str, shape: tuple[int, int]) -> None:
        """UnsupportedError unless a matrix of this dtype can be multiplied; the shape says which one it is."""
        if not self.multiplies(dtype):
            raise UnsupportedError(
                f"a {dtype} matrix of shape {list(shape)}: ggml {self.version} has no CPU product for this dtype; "
                f"use the torch kernels"
            )

    def _check_structs(self) -> None:
        """Each field that we read or write must be where ggml's own functions see it."""
        arena = ctypes.create_string_buffer(1 << 16)
        context = self.ggml_init(InitParams(len(arena), ctypes.addressof(arena), False))
        try:
            address = self.ggml_new_tensor_3d(context, GGML_TYPE_IDS["Q8_0"], 64, 3, 5)
            tensor = TensorStruct.from_address(address)
            view = TensorStruct.from_address(self.ggml_view_1d(context, address, 32, 34))
            x = self.ggml_new_tensor_3d(context, GGML_TYPE_IDS["F32"], 64, 1, 5)
            product_address = self.ggml_mul_mat(context, address, x)
            product = TensorStruct.from_address(product_address)
            self.ggml_set_input(address)
            graph = self.ggml_new_graph_custom(context, 8, False)
            self.ggml_build_forward_expand(graph, product_address)
            plan: PlanStruct = self.ggml_graph_plan(graph, 1, None)
            pool = ThreadpoolParams()
            self.ggml_threadpool_params_init(ctypes.byref(pool), 3)
            checks = {
                "type": tensor.type == GGML_TYPE_IDS["Q8_0"],
                "ne": tuple(tensor.ne) == (64, 3, 5, 1),
                "nb": tuple(tensor.nb) == (34, 68, 204, 1020),
                "flags": tensor.flags == 1,  # GGML_TENSOR_FLAG_INPUT
                "name": self.ggml_get_name(address) == address + TensorStruct.name.offset,
                "data": tensor.data is not None and tensor.data == self.ggml_get_data(address),
                "view_src": view.view_src == address,
                "view_offs": view.view_offs == 34,
                "src": tuple(product.src[:3]) == (address, x, None),
                "ggml_cplan": (plan.work_data, plan.n_threads, plan.threadpool) == (None, 1, None)
                and 5 * 68 <= plan.work_size <= 1 << 20,  # five rows of Q8_0, and some slack
                "ggml_threadpool_params": (pool.n_threads, pool.paused, pool.strict_cpu) == (3, False, False)
                and pool.poll <= 100,
            }
            tensor.nb[2] = 4096
            checks["nb as we write it"] = self.ggml_nbytes(address) == 2 * 34 + 2 * 68 + 4 * 4096
            tensor.data = 4096
            checks["data as we write it"] = self.ggml_get_data(address) == 4096
        finally:
            self.ggml_free(context)
        wrong = [name for name, right in checks.items() if not right]
        if wrong:
            self.refuse(f"its structs are laid out differently (checked: {', '.join(wrong)})")


@functools.cache
def load_ggml() -> GGMLLibrary:
    """Load the libraries of the installed libggml-python wheel; UnsupportedError says why it cannot be done."""
    return GGMLLibrary(find_ggml(GGMLLibrary.how_to_go_on))

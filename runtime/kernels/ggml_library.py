"""ggml's CPU library through ctypes: where it is, whether we can trust it, and the functions we call.

The shared objects are those of the libggml-python wheel; every function and struct below is declared in the
headers it ships (ggml.h, ggml-cpu.h of ggml 0.20). A struct that another version laid out differently would
corrupt memory silently, so loading checks each field we touch against what ggml's own functions say of it.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from lmpack.dtype import GGML_DTYPES, block_of
from lmpack.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Container

OLDEST_VERSION = (0, 20)
FIRST_UNKNOWN_VERSION = (
    1,
    0,
)  # within 0.x, ggml appends to its enums and structs; the checks below find the rest
GGML_TYPE_IDS = {dtype: type_id for type_id, dtype in GGML_DTYPES.items()}
_HOW_TO_GO_ON = "run: pip install 'libggml-python>=0.20,<1', or use the torch kernels"
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

# what ggml was compiled for (ggml_cpu_has_*) -> Linux's name of it in /proc/cpuinfo
_CPU_FLAGS = {
    "avx": "avx",
    "avx2": "avx2",
    "fma": "fma",
    "f16c": "f16c",
    "bmi2": "bmi2",
    "avx_vnni": "avx_vnni",
    "avx512": "avx512f",
    "avx512_vbmi": "avx512_vbmi",
    "avx512_vnni": "avx512_vnni",
    "avx512_bf16": "avx512_bf16",
}

# name -> (result, arguments); ggml_context, ggml_tensor, ggml_cgraph and ggml_threadpool pointers are plain ones
_BASE_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ggml_init": (_POINTER, (InitParams,)),
    "ggml_free": (None, (_POINTER,)),
    "ggml_tensor_overhead": (_SIZE, ()),
    "ggml_graph_overhead_custom": (_SIZE, (_SIZE, ctypes.c_bool)),
    "ggml_type_name": (ctypes.c_char_p, (_INT,)),
    "ggml_type_size": (_SIZE, (_INT,)),
    "ggml_blck_size": (_INT64, (_INT,)),
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
    "ggml_quantize_chunk": (_SIZE, (_INT, _POINTER, _POINTER, _INT64, _INT64, _INT64, _POINTER)),
}
_CPU_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ggml_cpu_init": (None, ()),
    "ggml_backend_cpu_reg": (_POINTER, ()),
    "ggml_get_type_traits_cpu": (_POINTER, (_INT,)),
    "ggml_threadpool_new": (_POINTER, (_POINTER,)),
    "ggml_threadpool_free": (None, (_POINTER,)),
    "ggml_graph_plan": (PlanStruct, (_POINTER, _INT, _POINTER)),
    "ggml_graph_compute": (_INT, (_POINTER, _POINTER)),
    **{f"ggml_cpu_has_{feature}": (_INT, ()) for feature in _CPU_FLAGS},
}


class GGMLLibrary:
    """ggml's functions as attributes, once they are checked; load_ggml() gives the process's one instance."""

    def __init__(self, folder: Path) -> None:
        """Open the libraries in this folder; UnsupportedError says what is wrong with them."""
        self.folder = folder
        base, cpu = _open(folder, "ggml-base"), _open(folder, "ggml-cpu")
        self.version = _supported_version(folder, base)
        for library, functions in ((base, _BASE_FUNCTIONS), (cpu, _CPU_FUNCTIONS)):
            for name, (result, arguments) in functions.items():
                setattr(self, name, _function(folder, library, name, result, arguments))
        missing = self.missing_instructions(_cpu_flags())
        if missing:
            self._refuse(f"it was compiled for {', '.join(missing)}, which this processor does not have")
        self.ggml_cpu_init()
        self._check_types()
        self._check_structs()

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., Any]: ...

    def multiplies(self, dtype: str) -> bool:
        """Tell whether ggml has a CPU dot product for rows of this dtype."""
        type_id = GGML_TYPE_IDS.get(dtype)
        if type_id is None or not self.ggml_type_size(type_id):
            return False
        traits = TypeTraitsStruct.from_address(self.ggml_get_type_traits_cpu(type_id))
        return traits.vec_dot is not None

    def missing_instructions(self, cpu_flags: Container[str]) -> list[str]:
        """x86 instruction sets that the library was compiled for and a processor with these flags lacks."""
        return [
            flag
            for feature, flag in _CPU_FLAGS.items()
            if getattr(self, f"ggml_cpu_has_{feature}")() and flag not in cpu_flags
        ]

    def _check_types(self) -> None:
        """A dtype's number, name and block must be those that lmpack reads files with."""
        for type_id, dtype in GGML_DTYPES.items():
            theirs = (
                self.ggml_type_name(type_id).decode().upper(),
                self.ggml_blck_size(type_id),
                self.ggml_type_size(type_id),
            )
            ours = (dtype, *block_of(dtype))
            if theirs != ours:
                self._refuse(f"type {type_id} is {theirs} there, and {ours} in this version of lmpack")

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
            self._refuse(f"its structs are laid out differently (checked: {', '.join(wrong)})")

    def _refuse(self, reason: str) -> NoReturn:
        raise UnsupportedError(f"{self.folder}: ggml {self.version}: {reason}; {_HOW_TO_GO_ON}")


@functools.cache
def load_ggml() -> GGMLLibrary:
    """Load the libraries of the installed libggml-python wheel; UnsupportedError says why it cannot be done."""
    spec = importlib.util.find_spec("libggml")
    if spec is None or spec.submodule_search_locations is None:
        raise UnsupportedError(f"the package libggml-python is not installed; {_HOW_TO_GO_ON}")
    for location in spec.submodule_search_locations:
        for folder in (Path(location) / "lib64", Path(location) / "lib"):
            if _library_file(folder, "ggml-cpu").is_file():
                return GGMLLibrary(folder)
    raise UnsupportedError(
        f"{', '.join(spec.submodule_search_locations)}: no {_library_file(Path(), 'ggml-cpu')} in lib64 or lib; "
        f"{_HOW_TO_GO_ON}"
    )


def _cpu_flags() -> Container[str]:
    """The processor's x86 flags as Linux knows them; all that we ask about on other systems."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8", errors="replace") if cpuinfo.is_file() else ""
    line = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return line[1].split() if line else _CPU_FLAGS.values()


def _library_file(folder: Path, name: str) -> Path:
    return folder / f"lib{name}.{'dylib' if sys.platform == 'darwin' else 'so'}"


def _open(folder: Path, name: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(_library_file(folder, name)))
    except OSError as error:
        raise UnsupportedError(f"{folder}: lib{name} cannot be loaded ({error}); {_HOW_TO_GO_ON}") from error


def _function(folder: Path, library: ctypes.CDLL, name: str, result: Any, arguments: tuple[Any, ...]) -> Any:
    try:
        function = getattr(library, name)
    except AttributeError:
        raise UnsupportedError(f"{folder}: this ggml has no function {name}; {_HOW_TO_GO_ON}") from None
    function.restype = result
    function.argtypes = arguments
    return function


def _supported_version(folder: Path, base: ctypes.CDLL) -> str:
    version: str = _function(folder, base, "ggml_version", ctypes.c_char_p, ())().decode(errors="replace")
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or not OLDEST_VERSION <= (int(numbers[1]), int(numbers[2])) < FIRST_UNKNOWN_VERSION:
        raise UnsupportedError(f"{folder}: ggml {version} is not supported; {_HOW_TO_GO_ON}")
    return version

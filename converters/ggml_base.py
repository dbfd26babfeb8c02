"""ggml's base library through ctypes: where it is, whether we can trust it, and what quantizes.

The shared objects are those of the libggml-python wheel; every function is declared in the headers it ships (ggml.h
and ggml-cpu.h of ggml 0.20).
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from lmpack.dtype import GGML_DTYPES, block_of
from lmpack.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Container

OLDEST_VERSION = (0, 20)
FIRST_UNKNOWN_VERSION = (1, 0)  # within 0.x, ggml appends to its enums and structs; checks find the rest
GGML_TYPE_IDS = {dtype: type_id for type_id, dtype in GGML_DTYPES.items()}
HOW_TO_INSTALL = "run: pip install 'libggml-python>=0.20,<1'"

_POINTER, _INT, _INT64, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_size_t

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

Functions = dict[str, tuple[Any, tuple[Any, ...]]]  # name -> (result, arguments)
_BASE_FUNCTIONS: Functions = {
    "ggml_type_name": (ctypes.c_char_p, (_INT,)),
    "ggml_type_size": (_SIZE, (_INT,)),
    "ggml_blck_size": (_INT64, (_INT,)),
    "ggml_get_type_traits": (_POINTER, (_INT,)),
    "ggml_quantize_chunk": (_SIZE, (_INT, _POINTER, _POINTER, _INT64, _INT64, _INT64, _POINTER)),
    "ggml_quantize_requires_imatrix": (ctypes.c_bool, (_INT,)),
}
_CPU_FUNCTIONS: Functions = {f"ggml_cpu_has_{feature}": (_INT, ()) for feature in _CPU_FLAGS}


class GGMLBase:
    """ggml's functions as attributes, once they are checked."""

    how_to_go_on: ClassVar[str] = HOW_TO_INSTALL

    def __init__(self, folder: Path) -> None:
        """Open the libraries in this folder; UnsupportedError says what is wrong with them."""
        self.folder = folder
        self.base, self.cpu = self._open("ggml-base"), self._open("ggml-cpu")
        self.version = self._supported_version()
        self.declare(self.base, _BASE_FUNCTIONS)
        self.declare(self.cpu, _CPU_FUNCTIONS)
        missing = self.missing_instructions(_cpu_flags())
        if missing:
            self.refuse(f"it was compiled for {', '.join(missing)}, which this processor does not have")
        self._check_types()

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., Any]: ...

    def declare(self, library: ctypes.CDLL, functions: Functions) -> None:
        """Make functions of a library attributes; UnsupportedError names one that is not there."""
        for name, (result, arguments) in functions.items():
            setattr(self, name, self._function(library, name, result, arguments))

    def missing_instructions(self, cpu_flags: Container[str]) -> list[str]:
        """x86 instruction sets that the library was compiled for and a processor with these flags lacks."""
        return [
            flag
            for feature, flag in _CPU_FLAGS.items()
            if getattr(self, f"ggml_cpu_has_{feature}")() and flag not in cpu_flags
        ]

    def refuse(self, reason: str) -> NoReturn:
        """Raise UnsupportedError with the library's place and version and with what to do."""
        raise UnsupportedError(f"{self.folder}: ggml {self.version}: {reason}; {self.how_to_go_on}")

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
                self.refuse(f"type {type_id} is {theirs} there, and {ours} in this version of lmpack")

    def _open(self, name: str) -> ctypes.CDLL:
        try:
            return ctypes.CDLL(str(_library_file(self.folder, name)))
        except OSError as error:
            raise UnsupportedError(
                f"{self.folder}: lib{name} cannot be loaded ({error}); {self.how_to_go_on}"
            ) from error

    def _function(self, library: ctypes.CDLL, name: str, result: Any, arguments: tuple[Any, ...]) -> Any:
        try:
            function = getattr(library, name)
        except AttributeError:
            raise UnsupportedError(
                f"{self.folder}: this ggml has no function {name}; {self.how_to_go_on}"
            ) from None
        function.restype = result
        function.argtypes = arguments
        return function

    def _supported_version(self) -> str:
        version: str = self._function(self.base, "ggml_version", ctypes.c_char_p, ())().decode(
            errors="replace"
        )
        numbers = re.match(r"(\d+)\.(\d+)", version)
        if (
            numbers is None
            or not OLDEST_VERSION <= (int(numbers[1]), int(numbers[2])) < FIRST_UNKNOWN_VERSION
        ):
            raise UnsupportedError(f"{self.folder}: ggml {version} is not supported; {self.how_to_go_on}")
        return version


def find_ggml(how_to_go_on: str = HOW_TO_INSTALL) -> Path:
    """Return the folder of the installed libggml-python wheel's libraries; UnsupportedError when there is none."""
    spec = importlib.util.find_spec("libggml")
    if spec is None or spec.submodule_search_locations is None:
        raise UnsupportedError(f"the package libggml-python is not installed; {how_to_go_on}")
    for location in spec.submodule_search_locations:
        for folder in (Path(location) / "lib64", Path(location) / "lib"):
            if _library_file(folder, "ggml-cpu").is_file():
                return folder
    raise UnsupportedError(
        f"{', '.join(spec.submodule_search_locations)}: no {_library_file(Path(), 'ggml-cpu')} in lib64 or lib; "
        f"{how_to_go_on}"
    )


def _cpu_flags() -> Container[str]:
    """The processor's x86 flags as Linux knows them; all that we ask about on other systems."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8", errors="replace") if cpuinfo.is_file() else ""
    line = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return line[1].split() if line else _CPU_FLAGS.values()


def _library_file(folder: Path, name: str) -> Path:
    return folder / f"lib{name}.{'dylib' if sys.platform == 'darwin' else 'so'}"

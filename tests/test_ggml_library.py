"""Which ggml libraries are accepted, and how the others are refused."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from lmpack.dtype import GGML_DTYPES, block_of
from lmpack.errors import UnsupportedError
from runtime.kernels.ggml_library import GGMLLibrary, load_ggml
from runtime.kernels.kernels import load_kernels

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

needs_compiler = pytest.mark.skipif(
    shutil.which("cc") is None or sys.platform != "linux", reason="builds a shared object with cc"
)


@pytest.fixture
def forget_library() -> Iterator[None]:
    load_ggml.cache_clear()
    yield
    load_ggml.cache_clear()


def altered_library(folder: Path, source: str) -> Path:
    """A folder with the real libraries, in which the functions of this C source hide the real ones."""
    real = load_ggml().folder
    (folder / "libggml-cpu.so").symlink_to(real / "libggml-cpu.so")
    (folder / "hide.c").write_text(source)
    subprocess.run(
        [
            *("cc", "-shared", "-fPIC", "-o", "libggml-base.so", "hide.c"),
            *("-Wl,--no-as-needed", str(real / "libggml-base.so"), f"-Wl,-rpath,{real}"),
        ],
        cwd=folder,
        check=True,
    )
    return folder


def test_the_installed_library_passes_its_checks() -> None:
    library = load_ggml()
    assert library.version.startswith("0.")
    assert library is load_ggml()


def test_ggmls_blocks_are_those_of_our_table() -> None:
    library = load_ggml()
    for type_id, dtype in GGML_DTYPES.items():
        assert (library.ggml_blck_size(type_id), library.ggml_type_size(type_id)) == block_of(dtype)


@pytest.mark.parametrize(
    ("dtype", "multiplies"),
    [("Q4_K", True), ("BF16", True), ("I32", False), ("F8_E4M3", False), ("Q9_Z", False)],
)
def test_it_says_which_dtypes_have_a_product(dtype: str, multiplies: bool) -> None:
    assert load_ggml().multiplies(dtype) is multiplies


@pytest.mark.skipif(platform.machine() != "x86_64", reason="asks about x86 instructions")
def test_a_processor_that_lacks_what_ggml_was_compiled_for_would_crash_and_is_told() -> None:
    library = load_ggml()
    compiled_for = library.missing_instructions(())
    assert "avx2" in compiled_for
    assert library.missing_instructions([flag for flag in compiled_for if flag != "fma"]) == ["fma"]
    assert library.missing_instructions(compiled_for) == []


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, forget_library: None) -> None:
    monkeypatch.setitem(sys.modules, "libggml", None)
    with pytest.raises(UnsupportedError, match="libggml-python is not installed; run: pip install"):
        load_ggml()


def test_without_the_package_auto_means_the_torch_kernels(
    monkeypatch: pytest.MonkeyPatch, forget_library: None
) -> None:
    monkeypatch.setitem(sys.modules, "libggml", None)
    name = load_kernels("auto", num_threads=1).name
    assert re.fullmatch(r"torch \(.*libggml-python is not installed.*\)", name)
    with pytest.raises(UnsupportedError, match="libggml-python"):
        load_kernels("ggml", num_threads=1)


def test_a_file_that_is_no_library_is_refused_with_its_folder(tmp_path: Path) -> None:
    for name in ("libggml-base.so", "libggml-cpu.so", "libggml-base.dylib", "libggml-cpu.dylib"):
        (tmp_path / name).write_bytes(b"not a library")
    with pytest.raises(UnsupportedError, match=f"{re.escape(str(tmp_path))}: libggml-base cannot be loaded"):
        GGMLLibrary(tmp_path)


@needs_compiler
@pytest.mark.parametrize("version", ["0.19.9", "1.0.0", "nonsense"])
def test_a_version_that_we_do_not_know_is_refused(tmp_path: Path, version: str) -> None:
    folder = altered_library(tmp_path, f'const char * ggml_version(void) {{ return "{version}"; }}')
    with pytest.raises(UnsupportedError, match=f"ggml {version} is not supported"):
        GGMLLibrary(folder)


@needs_compiler
def test_a_library_without_a_function_that_we_call_is_refused(tmp_path: Path) -> None:
    for name in ("ggml-base", "ggml-cpu"):
        (tmp_path / "few.c").write_text('const char * ggml_version(void) { return "0.20.2"; }')
        subprocess.run(["cc", "-shared", "-fPIC", "-o", f"lib{name}.so", "few.c"], cwd=tmp_path, check=True)
    with pytest.raises(UnsupportedError, match="no function ggml_type_name"):
        GGMLLibrary(tmp_path)


@needs_compiler
def test_a_block_of_another_size_is_refused(tmp_path: Path) -> None:
    folder = altered_library(tmp_path, "unsigned long ggml_type_size(int type) { return 18; }")
    with pytest.raises(UnsupportedError, match=r"type 0 is .* there, and .* in this version of lmpack"):
        GGMLLibrary(folder)


@needs_compiler
@pytest.mark.parametrize(
    ("source", "field"),
    [
        ("char * ggml_get_name(char * tensor) { return tensor + 8; }", "name"),
        ("void * ggml_get_data(void * tensor) { return 0; }", "data"),
        ("unsigned long ggml_nbytes(void * tensor) { return 1; }", "nb as we write it"),
        ("void ggml_set_input(void * tensor) {}", "flags"),
        ("void ggml_threadpool_params_init(void * params, int n_threads) {}", "ggml_threadpool_params"),
    ],
)
def test_a_struct_laid_out_differently_is_refused(tmp_path: Path, source: str, field: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"laid out differently \(checked: .*{field}"):
        GGMLLibrary(altered_library(tmp_path, source))

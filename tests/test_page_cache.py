"""What the page cache holds: as another reader of the kernel's figures sees it."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from runtime.page_cache import cached_nbytes, is_wholly_cached
from tests.page_cache import forget

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def cold_file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(bytes(10 * 4096 + 1))
    forget([path])
    return path


def test_pages_that_were_read_are_cached(cold_file: Path) -> None:
    assert cached_nbytes(cold_file) == 0
    with cold_file.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        file.read(1)
        assert 4096 <= (cached_nbytes(cold_file) or 0) < 11 * 4096
        file.read()
    assert cached_nbytes(cold_file) == 11 * 4096


def test_a_file_is_wholly_cached_when_every_page_was_read(cold_file: Path) -> None:
    with cold_file.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        assert not is_wholly_cached(file.fileno(), 10 * 4096 + 1)
        file.read(1)
        assert not is_wholly_cached(file.fileno(), 10 * 4096 + 1)
        file.read()
        if not tells_of_cached_pages(cold_file):
            pytest.skip("cachestat(2) is missing before Linux 6.5, and blind on overlay file systems")
        assert is_wholly_cached(file.fileno(), 10 * 4096 + 1)


def tells_of_cached_pages(path: Path) -> bool:
    kernel = tuple(int(number) for number in os.uname().release.split("-")[0].split(".")[:2])
    command = ["stat", "--file-system", "--format=%T", str(path)]
    file_system = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return kernel >= (6, 5) and file_system != "overlayfs"


def test_an_empty_file_has_nothing_to_cache(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert cached_nbytes(tmp_path / "empty") == 0


def test_it_agrees_with_fincore(cold_file: Path) -> None:
    fincore = shutil.which("fincore")
    if fincore is None:
        pytest.skip("no fincore")
    with cold_file.open("rb", buffering=0) as file:
        file.read(3 * 4096)
    command = [fincore, "--bytes", "--noheadings", "--output", "RES", str(cold_file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert cached_nbytes(cold_file) == int(done.stdout)

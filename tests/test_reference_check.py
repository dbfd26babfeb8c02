"""What validate says when a reference pack's source, or what the pack keeps of it, is not what it was."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from lmpack.errors import PackError
from lmpack.pack import Pack
from lmpack.reference import CONVERT_AGAIN
from tests.reference_packs import plain_and_reference
from tests.test_validation import flip, the_problem

if TYPE_CHECKING:
    from collections.abc import Callable

AGAIN = re.escape(CONVERT_AGAIN)


@pytest.fixture
def gguf(tmp_path: Path) -> tuple[Path, Pack, Pack]:
    return plain_and_reference("gguf", tmp_path)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (Path.unlink, "missing, or not a regular file"),
        (make_pipe, "not a regular file"),
        (make_folder, "not a regular file"),
        (cut, r"truncated: \d+ bytes, expected \d+"),
        (grow, r"too long: \d+ bytes, expected \d+"),
        (partial(flip, position=0), "is not a gguf file"),
        (partial(flip, position=50), "its header is not the one that the pack was made from"),
    ],
)
def test_another_source_is_refused_at_once(
    gguf: tuple[Path, Pack, Pack], change: Callable[[Path], None], message: str
) -> None:
    src, _, reference = gguf
    change(src)
    wanted = rf"^{re.escape(str(src))}: {message}; {AGAIN}"
    for quick in (False, True):
        assert re.search(wanted, str(the_problem(reference.path, quick=quick)))
    with pytest.raises(PackError, match=rf"{wanted[1:]}; run: lmpack validate {reference.path}$"):
        Pack.open(reference.path)


def test_a_damaged_kept_file_is_not_blamed_on_the_source(gguf: tuple[Path, Pack, Pack]) -> None:
    _, _, reference = gguf
    (source,) = reference.manifest.source.files
    for position in (0, 50, source.kept_nbytes - 1):
        flip(reference.path / source.kept, position)
        assert the_problem(reference.path).file == source.kept
        flip(reference.path / source.kept, position)

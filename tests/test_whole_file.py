"""A whole file: all of its bytes or none, and nothing beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lmpack.errors import StorageError
from lmpack.whole_file import whole_file

if TYPE_CHECKING:
    from pathlib import Path


def test_the_file_has_its_name_when_it_has_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "chart.svg"
    with whole_file(path) as file:
        file.write(b"new")
        assert not path.exists()
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_was_there_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "chart.svg"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), whole_file(path) as file:
        file.write(b"new")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_drive_is_named_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "chart.svg"
    with pytest.raises(StorageError, match=r"chart\.svg: no space"), whole_file(path) as file:
        with open("/dev/full", "wb", buffering=0) as full:
            full.write(b"new")
        file.write(b"new")
    assert list(tmp_path.iterdir()) == []


def test_folders_above_it_are_made(tmp_path: Path) -> None:
    with whole_file(tmp_path / "a" / "b" / "chart.svg") as file:
        file.write(b"new")
    assert (tmp_path / "a" / "b" / "chart.svg").read_bytes() == b"new"


def test_a_folder_that_cannot_be_made_is_an_error_of_the_drive(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="a file stands where"), whole_file(tmp_path / "file" / "a" / "b"):
        raise AssertionError("there is nothing to write to")

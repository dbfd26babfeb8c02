"""What lies in an unfinished pack is not trusted: no link is followed, no pipe waited for, no size believed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from converters.conversion import convert
from lmpack.errors import UsageError
from tests.gguf_fixtures import METADATA, gguf_bytes, moe_tensors

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def src(tmp_path: Path) -> Path:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(moe_tensors(), METADATA))
    return path


@pytest.fixture
def partial(tmp_path: Path) -> Path:
    path = tmp_path / "m.lmpack.partial"
    path.mkdir()
    return path


@pytest.mark.parametrize(
    ("link", "message"),
    [(os.symlink, "is no part of this pack; move it away"), (os.link, "has another name somewhere")],
)
def test_nothing_is_written_through_a_link(
    src: Path, partial: Path, tmp_path: Path, link: Callable[[Path, Path], None], message: str
) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(b"mine")
    (partial / "journal").touch()
    link(precious, partial / "shared.bin")
    with pytest.raises(UsageError, match=rf"shared\.bin: {message}"):
        convert(src, tmp_path / "m.lmpack", resume=True)
    assert precious.read_bytes() == b"mine"


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("elsewhere"), os.mkdir])
def test_a_journal_is_a_regular_file(
    src: Path, partial: Path, tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(partial / "journal")
    with pytest.raises(UsageError, match="journal: not a regular file; delete"):
        convert(src, tmp_path / "m.lmpack", resume=True)


def test_a_journal_without_an_end_is_not_read_to_it(src: Path, partial: Path, tmp_path: Path) -> None:
    with (partial / "journal").open("wb") as journal:
        journal.truncate(1 << 40)  # more than any memory
    resumed = convert(src, tmp_path / "m.lmpack", resume=True)
    assert resumed.pack_id == convert(src, tmp_path / "n.lmpack").pack_id


def test_the_folder_itself_is_no_link(src: Path, partial: Path, tmp_path: Path) -> None:
    (partial / "journal").touch()
    partial.rename(tmp_path / "elsewhere")
    partial.symlink_to("elsewhere")
    with pytest.raises(UsageError, match="is a link; delete it, then convert without --resume"):
        convert(src, tmp_path / "m.lmpack", resume=True)


def test_a_pack_that_is_there_already_is_called_that(src: Path, tmp_path: Path) -> None:
    convert(src, tmp_path / "m.lmpack")
    with pytest.raises(
        UsageError, match=r"m\.lmpack: exists; it is a pack: nothing is left to do if an earlier"
    ):
        convert(src, tmp_path / "m.lmpack", resume=True)

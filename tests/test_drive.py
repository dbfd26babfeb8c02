"""The drive: errors that say what to do, room that is checked before it is needed."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest

from lmpack.drive import check_space, storage_errors, sync_each, sync_tree
from lmpack.errors import StorageError, UsageError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "no space"),
        (errno.EDQUOT, "quota"),
        (errno.EROFS, "read-only"),
        (errno.EACCES, "permission denied"),
        (errno.EFBIG, "a file this large is not allowed here"),
        (errno.EIO, "check it before you trust it"),
        (errno.ENOTDIR, "a file stands where a folder is needed"),
        (errno.EISDIR, "is a folder, expected a file"),
        (errno.ENOTEMPTY, "Directory not empty"),
    ],
)
def test_what_the_drive_says_becomes_advice(tmp_path: Path, number: int, advice: str) -> None:
    with pytest.raises(StorageError, match=rf"a\.lmpack: .*{advice}"), storage_errors(tmp_path / "a.lmpack"):
        raise OSError(number, os.strerror(number))


def test_our_own_errors_pass_unchanged(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="as it was"), storage_errors(tmp_path):
        raise UsageError("as it was")


def test_space_is_checked_where_the_path_will_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_space(tmp_path / "not" / "yet" / "there", 4096, 1)
    with pytest.raises(StorageError, match=r"a\.lmpack: needs 1028\.0 TiB, .* free; free some space"):
        check_space(tmp_path / "a.lmpack", 2**50, 1)
    monkeypatch.chdir(tmp_path)
    check_space(tmp_path.relative_to(tmp_path) / "a.lmpack", 4096, 1)


def test_inodes_are_checked_where_the_file_system_counts_them(tmp_path: Path) -> None:
    if not os.statvfs(tmp_path).f_files:
        pytest.skip("this file system has no fixed number of inodes")
    with pytest.raises(StorageError, match=r"needs 4611686018427387904 files, .* has only \d+ inodes free"):
        check_space(tmp_path / "a.lmpack", 4096, 2**62)


def test_a_tree_is_synced_at_once_or_file_by_file(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(b"x")
    for sync in (sync_tree, sync_each):
        sync(tmp_path)
    with pytest.raises(FileNotFoundError):
        sync_tree(tmp_path / "nothing")

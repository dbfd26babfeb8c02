"""Drive: what a file system has room for, why it refused, and when everything is really on it."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lmpack.byte_size import format_nbytes
from lmpack.errors import LmpackError, StorageError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_ADVICE = {
    errno.ENOSPC: "no space (or inodes) left on the drive; free some and run it again",
    errno.EDQUOT: "your disk quota is used up; free some space and run it again",
    errno.EROFS: "the file system is read-only; choose another destination",
    errno.EACCES: "permission denied; change its permissions, or choose another place",
    errno.EPERM: "permission denied; change its permissions, or choose another place",
    errno.EFBIG: "a file this large is not allowed here; choose another drive, or raise ulimit -f",
    errno.ENAMETOOLONG: "the name is too long for this file system; choose a shorter one",
    errno.ENOTDIR: "a file stands where a folder is needed; choose another destination",
    errno.ENOENT: "no such file or folder",
    errno.EEXIST: "something else has this name; move it away, or choose another",
    errno.EISDIR: "is a folder, expected a file",
    errno.EMFILE: "too many open files; raise the limit with: ulimit -n 65536",
    errno.EIO: "the drive reports an input/output error; check it before you trust it",
}

_FILE_NBYTES = 4096
"""What a file takes besides its bytes, and more: a name, an inode, the rest of its last block."""
_CANNOT_LOCK = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL)


def existing_parent(path: Path) -> Path:
    """Return path, or the nearest folder above it that exists."""
    existing = path.absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    return existing


def check_space(path: Path, nbytes: int, num_files: int) -> None:
    """Raise StorageError when the drive that path would be on lacks room for these bytes and files.

    Room that the file system needs for itself is counted in. The path itself need not exist; only what an ordinary user
    may fill counts.
    """
    existing = existing_parent(path)
    with storage_errors(existing):
        drive = os.statvfs(existing)
        if drive.f_flag & os.ST_RDONLY:  # such a file system also says that it has no room
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        if not existing.is_dir():
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    if (
        drive.f_files and drive.f_favail < num_files
    ):  # btrfs and others report no inodes at all: they never run out
        raise StorageError(
            f"{path}: needs {num_files} files, {existing} has only {drive.f_favail} inodes free; "
            "delete small files or choose another drive"
        )
    free_nbytes = drive.f_bavail * drive.f_frsize
    # btrfs has 4 bytes of checksums for each 4,096; four times that is set aside
    nbytes += nbytes // 256 + num_files * _FILE_NBYTES
    if free_nbytes < nbytes:
        raise StorageError(
            f"{path}: needs {format_nbytes(nbytes)}, {existing} has {format_nbytes(free_nbytes)} free; "
            "free some space or choose another drive"
        )


def read_into(view: memoryview, descriptor: int, offset: int) -> int:
    """Read a file's bytes from `offset` on until the view is full or the file ends; how many there were."""
    done = 0
    while done < view.nbytes:
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


def write_from(view: memoryview, descriptor: int, offset: int) -> None:
    """Write all of the view to a file from `offset` on."""
    while view.nbytes:  # one call writes at most 2 GiB on Linux
        written = os.pwrite(descriptor, view, offset)
        if written == 0:
            raise StorageError("the drive took no bytes")
        view, offset = view[written:], offset + written


@contextmanager
def storage_errors(path: Path | str) -> Iterator[None]:
    """Turn an OSError inside the block into a StorageError that names path and says what to do."""
    try:
        yield
    except LmpackError:
        raise
    except OSError as error:
        raise StorageError(f"{path}: {advice(error)}") from error


def advice(error: OSError) -> str:
    """Say what the operating system refused, and what to do about it."""
    return _ADVICE.get(error.errno or 0, error.strerror or str(error))


def try_lock(descriptor: int) -> bool:
    """Lock an open file or folder until it is closed; tell whether nobody else holds it.

    A file system that knows no locks says that nobody does.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _CANNOT_LOCK:
            raise
    return True


@contextmanager
def alone_in(folder: Path, refusal: str) -> Iterator[None]:
    """Hold a folder's lock during the block; raises UsageError with the refusal when another process or call does."""
    with storage_errors(folder):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if not try_lock(descriptor):
                raise UsageError(f"{folder}: {refusal}")
            yield
        finally:
            os.close(descriptor)


def sync_tree(path: Path) -> None:
    """Return once every file and folder below path is on the drive; raise OSError when it refuses.

    Linux's syncfs does it in one call for the whole file system; elsewhere each file is synced by itself.
    """
    syncfs = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
    if syncfs is None:
        sync_each(path)
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if syncfs(descriptor) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), os.fspath(path))
    finally:
        os.close(descriptor)


def sync_each(path: Path) -> None:
    """Do what sync_tree does with one call for each file and folder."""
    for folder, _, names in os.walk(path):
        for name in names:
            sync_path(os.path.join(folder, name))
        sync_path(folder)


def sync_path(path: Path | str) -> None:
    """Return once one file, or the names in one folder, are on the drive."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

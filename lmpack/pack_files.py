"""Pack files: which files a pack must have, which a folder has, and where the two differ."""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmpack.drive import advice, storage_errors
from lmpack.errors import PackError, StorageError
from lmpack.expert_key import ExpertKey
from lmpack.manifest import MANIFEST_FILE, PROFILES_FOLDER, SHARED_FILE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from lmpack.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong with one file of a pack."""

    file: str  # inside the pack, with /
    key: ExpertKey | None  # the first expert that the file holds
    message: str

    def __str__(self) -> str:
        """Give the problem as one line."""
        what = self.file if self.key is None else f"expert {self.key} ({self.file})"
        return f"{what}: {self.message}"


@dataclass(frozen=True, slots=True)
class ExpectedFile:
    """A file that the manifest names."""

    nbytes: int
    key: ExpertKey | None


def expected_files(manifest: Manifest) -> dict[str, ExpectedFile]:
    """Return every file the manifest names, except itself, by its path inside the pack."""
    kept = {file.kept: ExpectedFile(file.kept_nbytes, None) for file in manifest.source.files}
    if manifest.is_reference:
        return kept
    files: dict[str, ExpectedFile] = {SHARED_FILE: ExpectedFile(manifest.shared_file_nbytes, None)}
    for layer in manifest.layers:
        for number, expert in enumerate(layer.experts):
            if expert.file not in files:
                files[expert.file] = ExpectedFile(expert.file_nbytes, ExpertKey(layer.layer, number))
    return files | kept


def folders_of(file: str) -> list[str]:
    """Return the folders on the way to a file of a pack, the outermost first."""
    *folders, _ = file.split("/")
    return ["/".join(folders[: depth + 1]) for depth in range(len(folders))]


def needed_folders(expected: Iterable[str]) -> set[str]:
    """Return every folder that the files of a pack are in."""
    parents = {file.rpartition("/")[0] for file in expected}  # far fewer than files
    return {folder for parent in parents for folder in folders_of(f"{parent}/")}


SPECIAL = -1  # in place of a size: a symbolic link, a device, a pipe; a pack has none
FOLDER = -2


def found_files(path: Path) -> dict[str, int]:
    """Return every entry below a folder: path inside it -> bytes, SPECIAL or FOLDER."""
    found: dict[str, int] = {}
    folders = [""]
    while folders:
        prefix = folders.pop()
        with storage_errors(path / prefix), os.scandir(path / prefix) as entries:
            for entry in entries:
                name = prefix + entry.name
                if entry.is_dir(follow_symlinks=False):
                    folders.append(f"{name}/")
                    found[name] = FOLDER
                elif entry.is_file(follow_symlinks=False):
                    found[name] = entry.stat(follow_symlinks=False).st_size
                else:
                    found[name] = SPECIAL
    return found


def wrong_files(expected: Mapping[str, ExpectedFile], found: Mapping[str, int]) -> Iterator[Problem]:
    """Yield what the manifest names and the folder lacks, or has with another size or kind.

    What is in the place of a folder is one problem, whatever should be in there.
    """
    told: set[str] = set()
    for file, wanted in expected.items():
        nbytes = found.get(file)
        if nbytes is None:
            no_folder = next((at for at in folders_of(file) if found.get(at, FOLDER) != FOLDER), None)
            if no_folder is None:
                yield Problem(file, wanted.key, f"missing, expected {wanted.nbytes} bytes")
            elif no_folder not in told:
                told.add(no_folder)
                advice = "a pack holds no links: move it away, and copy what it points to"
                is_link = found[no_folder] == SPECIAL
                yield Problem(no_folder, None, f"not a folder; {advice if is_link else 'move it away'}")
        elif nbytes == FOLDER:
            yield Problem(file, wanted.key, "a folder, expected a file; delete it")
        elif nbytes < 0:
            yield Problem(
                file, wanted.key, "not a regular file; a pack holds no links: copy what it points to"
            )
        elif nbytes != wanted.nbytes:
            verb = "truncated" if nbytes < wanted.nbytes else "too long"
            yield Problem(file, wanted.key, f"{verb}: {nbytes} bytes, expected {wanted.nbytes}")


def extra_files(expected: Mapping[str, ExpectedFile], found: Mapping[str, int]) -> Iterator[Problem]:
    """Yield what the folder has and the manifest does not name; files and folders below profiles/ are welcome."""
    occupied = {name.rpartition("/")[0] for name in found}
    needed = needed_folders(expected)
    for file in sorted(found.keys() - expected.keys() - occupied - needed - {MANIFEST_FILE}):
        what = "an empty folder" if found[file] == FOLDER else "not in the manifest"
        if not f"{file}/".startswith(PROFILES_FOLDER) or found[file] == SPECIAL:
            yield Problem(_printable(file), None, f"{what}; move it out of the pack, or delete it")


def open_regular(path: Path) -> int:
    """Return a descriptor for reading a regular file; a link is not followed, a pipe not waited for.

    Raises PackError when path is missing or special, StorageError when the drive refuses.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO):
            raise PackError(f"{path}: missing, or not a regular file") from None
        raise StorageError(f"{path}: {advice(error)}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise PackError(f"{path}: not a regular file")
    return descriptor


def read_regular_file(path: Path, *, most: int) -> bytes:
    """Return a regular file's bytes; raise PackError when it has more than `most`, otherwise as open_regular."""
    with open(open_regular(path), "rb") as file, storage_errors(path):
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes > most:
            raise PackError(f"{path}: {nbytes} bytes, expected at most {most}")
        return file.read(most)


def _printable(name: str) -> str:
    """Return a file name that anybody may have chosen in a form that fits one line of UTF-8."""
    return name if name.isprintable() else ascii(name)[1:-1]

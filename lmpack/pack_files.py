"""Pack files: which files a pack must have, which a folder has, and where the two differ."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmpack.errors import PackError
from lmpack.expert_key import ExpertKey
from lmpack.manifest import MANIFEST_FILE, PROFILES_FOLDER, SHARED_FILE

if TYPE_CHECKING:
    from collections.abc import Iterator
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
        return (
            f"{self.file}: {self.message}"
            if self.key is None
            else f"{self.file} (expert {self.key}): {self.message}"
        )


@dataclass(frozen=True, slots=True)
class ExpectedFile:
    """A file that the manifest names."""

    nbytes: int
    key: ExpertKey | None


def expected_files(manifest: Manifest) -> dict[str, ExpectedFile]:
    """Return every file the manifest names, except itself, by its path inside the pack."""
    files: dict[str, ExpectedFile] = {SHARED_FILE: ExpectedFile(manifest.shared_nbytes, None)}
    for layer in manifest.layers:
        for number, expert in enumerate(layer.experts):
            if expert.file not in files:
                files[expert.file] = ExpectedFile(expert.nbytes, ExpertKey(layer.layer, number))
    for source_file in manifest.source.files:
        files[source_file.kept] = ExpectedFile(source_file.kept_nbytes, None)
    return files


def found_files(path: Path) -> dict[str, int]:
    """Return every entry below a folder that is not itself a folder: path inside it -> bytes.

    -1 stands for what is not a regular file (a symbolic link, a device, a pipe): a pack has none.
    """
    return dict(_walk(os.fspath(path), ""))


def layout_problems(manifest: Manifest, found: dict[str, int]) -> Iterator[Problem]:
    """Compare names and sizes: yield what is missing, of the wrong size or kind, or not in the manifest."""
    expected = expected_files(manifest)
    for file, wanted in expected.items():
        nbytes = found.get(file)
        if nbytes is None:
            yield Problem(file, wanted.key, f"missing, expected {wanted.nbytes} bytes")
        elif nbytes < 0:
            yield Problem(
                file, wanted.key, "not a regular file; a pack holds no links: copy what it points to"
            )
        elif nbytes != wanted.nbytes:
            verb = "truncated" if nbytes < wanted.nbytes else "too long"
            yield Problem(file, wanted.key, f"{verb}: {nbytes} bytes, expected {wanted.nbytes}")
    for file in sorted(found.keys() - expected.keys() - {MANIFEST_FILE}):
        if not file.startswith(PROFILES_FOLDER) or found[file] < 0:
            yield Problem(file, None, "not in the manifest; delete it or move it out of the pack")


def read_regular_file(path: Path, *, most: int) -> bytes:
    """Return a file's bytes without following a link; raise PackError when it is missing, special or too long."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise PackError(f"{path}: cannot be read: {error.strerror}") from None
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise PackError(f"{path}: not a regular file")
        if status.st_size > most:
            raise PackError(f"{path}: {status.st_size} bytes, expected at most {most}")
        return file.read(most + 1)


def _walk(folder: str, prefix: str) -> Iterator[tuple[str, int]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(entry.path, f"{prefix}{entry.name}/")
            elif entry.is_file(follow_symlinks=False):
                yield prefix + entry.name, entry.stat(follow_symlinks=False).st_size
            else:
                yield prefix + entry.name, -1

"""Checkpoint: what a GGUF set and a safetensors folder have in common: files, and tensors inside them.

Nothing here reads weights; a checkpoint says where each tensor's bytes lie and what they are.
"""

from __future__ import annotations

import itertools
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from lmpack.drive import storage_errors
from lmpack.errors import CheckpointError, UsageError
from lmpack.manifest import MANIFEST_FILE
from lmpack.strict_json import JsonError
from lmpack.tensor_info import check_tensor_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from converters.model_config import ModelDescription
    from converters.tensor_role import TensorRole

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_MAX_LFS_POINTER_NBYTES = 1024  # the specification's limit
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """A file of a checkpoint; the name is relative to the checkpoint's folder, with forward slashes."""

    name: str
    path: Path
    nbytes: int
    mtime_ns: int  # to notice a file that changes under the conversion

    @classmethod
    def of(cls, path: Path, name: str) -> CheckpointFile:
        """Look at a regular file; raises CheckpointError for a folder, a device or a dangling link."""
        try:
            found = path.stat()
        except OSError as error:
            what = "is a link to nothing" if path.is_symlink() else "cannot be read"
            raise CheckpointError(
                f"{path}: {what} ({error.strerror}); download the checkpoint again"
            ) from error
        if not stat.S_ISREG(found.st_mode):
            kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
            raise CheckpointError(
                f"{path}: is {kind}, expected a regular file; move it away, or name another"
            )
        return cls(name, path, found.st_size, found.st_mtime_ns)

    def check_fetched(self) -> None:
        """Raise CheckpointError for what a download left in place of the file: a Git LFS pointer, a page for JSON."""
        with storage_errors(self.path), self.path.open("rb") as opened:
            start = opened.read(len(_LFS_POINTER))
        is_pointer = self.nbytes <= _MAX_LFS_POINTER_NBYTES and start == _LFS_POINTER
        if is_pointer or (self.name.endswith(".json") and _is_page(start)):
            raise wrong_magic(self.path, start, "JSON")


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """A tensor's place: bytes [offset, offset + nbytes) of files[file]; shape in numpy order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: int
    offset: int
    nbytes: int


class Checkpoint(Protocol):
    """A complete, checked source: every tensor lies inside its file and overlaps no other."""

    @property
    def kind(self) -> Literal["gguf", "safetensors"]:
        """The container, as the manifest names it."""

    @property
    def path(self) -> Path:
        """What the user gave."""

    @property
    def files(self) -> tuple[CheckpointFile, ...]:
        """All files a pack keeps, in the order in which they are read."""

    @property
    def tensors(self) -> tuple[CheckpointTensor, ...]:
        """All tensors, by file, then by offset."""

    @property
    def left_out(self) -> tuple[str, ...]:
        """Files of the folder that are no part of the checkpoint and are not kept."""

    @property
    def missing(self) -> tuple[str, ...]:
        """What a pack can be made without, but not run without."""

    def roles(self) -> Sequence[TensorRole]:
        """Say for each tensor what it is; raises CheckpointError for one that no rule claims."""

    def describe(self) -> ModelDescription:
        """Return the architecture and the config in Hugging Face's words."""


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Open a GGUF file, any shard of a set, a safetensors file, or a folder with one checkpoint.

    Raises CheckpointError (broken, incomplete) or UsageError (no checkpoint there, or several).
    """
    from converters.gguf_checkpoint import GGUFCheckpoint
    from converters.safetensors_checkpoint import SafetensorsCheckpoint

    path = Path(path)
    with storage_errors(path):
        is_folder = path.is_dir()
    if is_folder:
        has_safetensors = any(path.glob("*.safetensors")) or any(path.glob("*.safetensors.index.json"))
        has_gguf = any(path.glob("*.gguf"))
        if has_safetensors and has_gguf:
            raise UsageError(f"{path}: holds GGUF and safetensors files; name the file to convert")
        if has_gguf:
            return GGUFCheckpoint.open(path)
        if has_safetensors:
            return SafetensorsCheckpoint.open(path)
        if (path / MANIFEST_FILE).exists():
            raise UsageError(
                f"{path}: is a pack already; lmpack export gives its source back, lmpack unpack makes a pack of plain "
                "files from a compressed or reference pack"
            )
        raise UsageError(f"{path}: no *.gguf or *.safetensors in this folder")
    if not path.exists():
        raise UsageError(f"{path}: no such file or folder")
    if path.name.endswith((".safetensors", ".safetensors.index.json")):
        return SafetensorsCheckpoint.open(path)
    return GGUFCheckpoint.open(path)


def wrong_magic(where: Path | str, start: bytes, expected: str) -> CheckpointError:
    """Explain a file that does not start as its container must, naming the usual mistakes."""
    if start.startswith(_LFS_POINTER):
        return CheckpointError(f"{where}: is a Git LFS pointer, not the file itself; run: git lfs pull")
    if _is_page(start):
        return CheckpointError(f"{where}: is a web page (HTML), not {expected}; download the file itself")
    if not start:
        return CheckpointError(f"{where}: is empty, expected {expected}; download it again")
    return CheckpointError(f"{where}: starts with {start[:8]!r}, expected {expected}")


def _is_page(start: bytes) -> bool:
    return start.lstrip()[:1] == b"<"


def check_name(name: str, where: Path | str) -> None:
    """Raise CheckpointError for a tensor name that no manifest can hold, before it is repeated in messages."""
    try:
        check_tensor_name(name, "tensor")
    except JsonError as error:
        raise CheckpointError(f"{where}: {error} (a pack cannot hold this)") from None


def check_no_overlap(tensors: Sequence[CheckpointTensor], files: Sequence[CheckpointFile]) -> None:
    """Raise CheckpointError when two tensors of one file (sorted by offset) share bytes."""
    for before, after in itertools.pairwise(tensors):
        if before.file == after.file and before.offset + before.nbytes > after.offset:
            raise CheckpointError(
                f"{files[after.file].path}: tensor {after.name} starts at byte {after.offset}, inside "
                f"{before.name} (bytes {before.offset} to {before.offset + before.nbytes}); the file is damaged"
            )


def check_no_duplicates(tensors: Sequence[CheckpointTensor], files: Sequence[CheckpointFile]) -> None:
    """Raise CheckpointError when two tensors have one name."""
    seen: dict[str, CheckpointTensor] = {}
    for tensor in tensors:
        first = seen.setdefault(tensor.name, tensor)
        if first is not tensor:
            also = "there twice" if first.file == tensor.file else f"also in {files[first.file].path}"
            raise CheckpointError(f"{files[tensor.file].path}: tensor {tensor.name} is {also}")

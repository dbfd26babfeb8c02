"""Pack: an lmpack folder opened for reading."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lmpack.decompression import Decompressor
from lmpack.errors import ManifestError, PackError, StorageError, UsageError
from lmpack.manifest import MANIFEST_FILE, MAX_MANIFEST_NBYTES, PROFILES_FOLDER, SHARED_FILE, Manifest
from lmpack.pack_files import expected_files, found_files, read_regular_file, wrong_files
from lmpack.reference import FileExtent, Reference

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from lmpack.expert_key import ExpertKey
    from lmpack.manifest import ExpertEntry, SourceFile, TensorInfo


def read_manifest(path: Path) -> Manifest:
    """Parse the manifest of the pack at path; raise ManifestError when there is none or it cannot be trusted."""
    if not path.is_dir():
        raise PackError(f"{path}: not a folder; a pack is a folder with a {MANIFEST_FILE}")
    where = path / MANIFEST_FILE
    if not os.path.lexists(where):
        hint = "; a command that was interrupted left it: run that again" if path.suffix == ".partial" else ""
        raise ManifestError(f"{path}: no {MANIFEST_FILE}, so it is not a pack{hint}")
    try:
        raw = read_regular_file(where, most=MAX_MANIFEST_NBYTES)
    except PackError as error:
        raise ManifestError(str(error)) from None
    return Manifest.parse(raw, where)


def refuse_inside_pack(path: Path, *, is_profile: bool = False) -> None:
    """Raise UsageError when path is a pack or inside of one, unless it is a profile's, in the folder for these."""
    resolved = path.resolve()
    for folder in (resolved, *resolved.parents):
        if not os.path.lexists(folder / MANIFEST_FILE):
            continue
        with suppress(ManifestError):  # other programs have files of this name
            read_manifest(folder)
            if not is_profile:
                raise UsageError(f"{path}: would damage the pack {folder}; write outside of it")
            if not resolved.parent.is_relative_to(folder / PROFILES_FOLDER):
                raise UsageError(
                    f"{path}: would damage the pack {folder}; write outside of it, or into its {PROFILES_FOLDER} folder"
                )


@dataclass(frozen=True, slots=True)
class Pack:
    """A pack whose manifest is sound and whose files exist with the right sizes; checksums are validate's job."""

    path: Path
    manifest: Manifest
    _shared: NDArray[np.uint8] = field(repr=False, compare=False)
    reference: Reference | None = field(default=None, repr=False, compare=False)  # in place of weights

    @classmethod
    def open(cls, path: Path | str) -> Pack:
        """Open a pack: parse its manifest, check every file's presence and size, map shared.bin.

        The files that a reference pack refers to are among them. Raises ManifestError or PackError with the first
        problem.
        """
        folder = Path(path)
        manifest = read_manifest(folder)
        reference = Reference(folder, manifest.source) if manifest.is_reference else None
        problems = wrong_files(expected_files(manifest), found_files(folder))
        problem = next(chain(problems, reference.problems() if reference else ()), None)
        if problem is not None:
            raise PackError(f"{folder}: {problem}; run: lmpack validate {folder}")
        shared_nbytes = 0 if reference else manifest.shared_file_nbytes
        return cls(folder, manifest, map_file(folder / SHARED_FILE, shared_nbytes), reference)

    def expert_extents(self, key: ExpertKey) -> tuple[FileExtent, ...]:
        """Return where an expert lies: in one file, which identical experts share, or part by part in the source."""
        entry = self._entry(key)
        if self.reference is not None:
            return self.reference.expert(key, self.manifest.layer(key.layer))
        nbytes = entry.file_nbytes
        return (FileExtent(self.path / entry.file, 0, nbytes, 0, nbytes),)

    def shared_extents(self) -> tuple[FileExtent, ...]:
        """Return where the shared tensors lie: all of shared.bin, or tensor by tensor in the source."""
        if self.reference is not None:
            return tuple(self.reference.tensor(tensor) for tensor in self.manifest.shared if tensor.nbytes)
        nbytes = self.manifest.shared_file_nbytes
        return (FileExtent(self.path / SHARED_FILE, 0, nbytes, 0, nbytes),)

    def tensor_extent(self, tensor: TensorInfo) -> FileExtent:
        """Return where a shared tensor that is neither compressed nor empty lies."""
        if self.reference is not None:
            return self.reference.tensor(tensor)
        nbytes = self.manifest.shared_file_nbytes
        return FileExtent(self.path / SHARED_FILE, tensor.offset, tensor.nbytes, 0, nbytes)

    def expert_path(self, key: ExpertKey) -> Path:
        """Return the file that an expert, or its first part, is in."""
        return self.expert_extents(key)[0].path

    def read_expert(self, key: ExpertKey) -> bytes:
        """Return a whole expert, padding included, decompressed where the pack is compressed.

        Raises StorageError when the drive gives less than the file, PackError when it cannot be decompressed.
        """
        entry = self._entry(key)
        if self.reference is not None:
            return self.reference.read_expert(key, self.manifest.layer(key.layer))
        path = self.path / entry.file
        raw = read_regular_file(path, most=entry.file_nbytes)
        if len(raw) != entry.file_nbytes:
            raise StorageError(f"expert {key}: {path} gave {len(raw)} of {entry.file_nbytes} bytes")
        if entry.stored is None:
            return raw
        try:
            pieces = Decompressor().expert_pieces(
                memoryview(raw), entry, self.manifest.layer(key.layer).parts
            )
            return b"".join(bytes(piece) for piece in pieces)
        except PackError as error:
            raise PackError(f"expert {key}: {path}: {error}; run: lmpack validate {self.path}") from None

    def read_tensor(self, name: str) -> NDArray[np.uint8]:
        """Return a shared tensor's bytes, 1-D: a read-only view of the mapped file, or decompressed.

        Raises PackError when it cannot be decompressed.
        """
        tensor = self.manifest.tensor(name)
        if self.reference is not None and tensor.nbytes:
            place = self.reference.tensor(tensor)
            return map_file(place.path, place.offset + place.nbytes)[place.offset :]
        if tensor.stored is None:
            return self._shared[tensor.offset : tensor.offset + tensor.nbytes]
        raw = np.empty(tensor.nbytes, np.uint8)
        try:
            Decompressor().restore(self.stored_tensor(tensor), tensor.stored.encoding, tensor.dtype, raw.data)
        except PackError as error:
            raise PackError(
                f"{self.path / SHARED_FILE}: {name}: {error}; run: lmpack validate {self.path}"
            ) from None
        return raw

    def stored_tensor(self, tensor: TensorInfo) -> memoryview:
        """Return a shared tensor's bytes as they lie in the file."""
        place = tensor if tensor.stored is None else tensor.stored
        return self._shared[place.offset : place.offset + place.nbytes].data

    def kept_path(self, source_file: SourceFile) -> Path:
        """Return the file that holds a source file, or what no segment of it covers."""
        return self.path / source_file.kept

    def kept_file(self, name: str) -> Path | None:
        """Return the whole copy of a small source file such as tokenizer.json; None when the pack has none."""
        for source_file in self.manifest.source.files:
            if source_file.name == name and not source_file.segments:
                return self.path / source_file.kept
        return None

    def _entry(self, key: ExpertKey) -> ExpertEntry:
        layer = self.manifest.layer(key.layer)
        if not 0 <= key.expert < layer.num_experts:
            raise PackError(f"expert {key}: layer {key.layer} has only {layer.num_experts} experts")
        return layer.experts[key.expert]


def map_file(path: Path, nbytes: int) -> NDArray[np.uint8]:
    """Return a read-only view of the first nbytes of a file; raise StorageError when it cannot be mapped."""
    if nbytes == 0:  # an empty file cannot be mapped
        empty: NDArray[np.uint8] = np.empty(0, np.uint8)
        empty.flags.writeable = False
        return empty
    try:
        return np.asarray(np.memmap(path, np.uint8, mode="r", shape=(nbytes,)))
    except OSError as error:
        raise StorageError(f"{path}: cannot be mapped: {error.strerror}") from None

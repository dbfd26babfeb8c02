"""Pack: an lmpack folder opened for reading."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lmpack.errors import ManifestError, PackError, StorageError
from lmpack.manifest import MANIFEST_FILE, MAX_MANIFEST_NBYTES, SHARED_FILE, Manifest
from lmpack.pack_files import found_files, read_regular_file, wrong_files

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from lmpack.expert_key import ExpertKey
    from lmpack.manifest import ExpertEntry, SourceFile


def read_manifest(path: Path) -> Manifest:
    """Parse the manifest of the pack at path; raise ManifestError when there is none or it cannot be trusted."""
    if not path.is_dir():
        raise PackError(f"{path}: not a folder; a pack is a folder with a {MANIFEST_FILE}")
    where = path / MANIFEST_FILE
    if not os.path.lexists(where):
        hint = "; an interrupted conversion leaves such folders" if path.suffix == ".partial" else ""
        raise ManifestError(f"{path}: no {MANIFEST_FILE}, so it is not a pack{hint}")
    try:
        raw = read_regular_file(where, most=MAX_MANIFEST_NBYTES)
    except PackError as error:
        raise ManifestError(str(error)) from None
    return Manifest.parse(raw, where)


@dataclass(frozen=True, slots=True)
class Pack:
    """A pack whose manifest is sound and whose files exist with the right sizes; checksums are validate's job."""

    path: Path
    manifest: Manifest
    _shared: NDArray[np.uint8] = field(repr=False, compare=False)

    @classmethod
    def open(cls, path: Path | str) -> Pack:
        """Open a pack: parse its manifest, check every file's presence and size, map shared.bin.

        Raises ManifestError or PackError with the first problem.
        """
        folder = Path(path)
        manifest = read_manifest(folder)
        problem = next(wrong_files(manifest, found_files(folder)), None)
        if problem is not None:
            raise PackError(f"{folder}: {problem}; run: lmpack validate {folder}")
        return cls(folder, manifest, _map_shared(folder / SHARED_FILE, manifest.shared_nbytes))

    def expert_path(self, key: ExpertKey) -> Path:
        """Return the file that holds an expert; identical experts share one."""
        return self.path / self._entry(key).file

    def read_expert(self, key: ExpertKey) -> bytes:
        """Return an expert's whole file, padding included; raise StorageError when the drive gives less."""
        entry = self._entry(key)
        path = self.path / entry.file
        raw = read_regular_file(path, most=entry.nbytes)
        if len(raw) != entry.nbytes:
            raise StorageError(f"expert {key}: {path} gave {len(raw)} of {entry.nbytes} bytes")
        return raw

    def read_tensor(self, name: str) -> NDArray[np.uint8]:
        """Return a shared tensor's bytes: a read-only view of the mapped file, 1-D."""
        tensor = self.manifest.tensor(name)
        return self._shared[tensor.offset : tensor.offset + tensor.nbytes]

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


def _map_shared(path: Path, nbytes: int) -> NDArray[np.uint8]:
    if nbytes == 0:  # an empty file cannot be mapped
        empty: NDArray[np.uint8] = np.empty(0, np.uint8)
        empty.flags.writeable = False
        return empty
    try:
        return np.asarray(np.memmap(path, np.uint8, mode="r", shape=(nbytes,)))
    except OSError as error:
        raise StorageError(f"{path}: cannot be mapped: {error.strerror}") from None

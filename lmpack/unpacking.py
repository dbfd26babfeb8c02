"""Unpacking: a compressed pack, or one that refers to its source, becomes a pack of plain files."""

from __future__ import annotations

import hashlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lmpack.decompression import Decompressor
from lmpack.drive import check_space, storage_errors
from lmpack.errors import PackError, UsageError
from lmpack.expert_key import ExpertKey
from lmpack.manifest import PROFILES_FOLDER, SHARED_FILE
from lmpack.pack import Pack, map_file
from lmpack.pack_files import FOLDER, expected_files, found_files, open_regular
from lmpack.partial_folder import PartialFolder
from lmpack.reference_check import referenced_nbytes
from lmpack.storage import RAW_STORAGE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from lmpack.manifest import SourceFile, TensorInfo

_COPY_NBYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class UnpackReport:
    """What unpack() wrote."""

    path: Path
    pack_id: str
    compressed_nbytes: int  # of all files the manifest names, and of what it refers to
    nbytes: int  # of the same, unpacked
    seconds: float


def unpack(
    pack: Pack | Path | str, dst: Path | str, *, progress: Callable[[int], None] | None = None
) -> UnpackReport:
    """Write the pack that a plain conversion makes as dst, with its pack id; progress gets bytes just written.

    Every file's SHA-256 is compared with the manifest's before the pack takes its name. Raises UsageError when pack
    is plain already or dst exists, PackError for a file that is damaged, StorageError when the drive refuses.
    """
    started = time.perf_counter()
    pack = pack if isinstance(pack, Pack) else Pack.open(pack)
    if pack.manifest.storage == RAW_STORAGE:
        raise UsageError(f"{pack.path}: is not compressed; its files can be mapped as they are")
    manifest = pack.manifest.uncompressed()
    files = expected_files(manifest)
    nbytes = sum(file.nbytes for file in files.values())
    folder = PartialFolder(Path(dst), resume=False)
    check_space(Path(dst), nbytes, len(files) + len(manifest.layers))
    folder.create()
    with folder.discarded_on_failure():
        _Unpacking(pack, folder, progress or (lambda _: None)).run()
        folder.publish(manifest.to_bytes(), manifest)
    compressed_nbytes = sum(file.nbytes for file in expected_files(pack.manifest).values())
    if pack.manifest.is_reference:
        compressed_nbytes += referenced_nbytes(pack.manifest)
    return UnpackReport(Path(dst), manifest.pack_id, compressed_nbytes, nbytes, time.perf_counter() - started)


class _Unpacking:
    """Restores the files of one pack, several at once."""

    def __init__(self, pack: Pack, folder: PartialFolder, progress: Callable[[int], None]) -> None:
        self.pack = pack
        self.folder = folder
        self.progress = progress

    def run(self) -> None:
        """Write every file but the manifest."""
        manifest = self.pack.manifest
        keepers: dict[str, ExpertKey] = {}  # of identical experts, the first
        for layer in manifest.layers:
            for number, expert in enumerate(layer.experts):
                keepers.setdefault(expert.sha256, ExpertKey(layer.layer, number))
        experts = {manifest.layer(key.layer).experts[key.expert].file: key for key in keepers.values()}
        found = found_files(self.pack.path).items()
        profiles = [file for file, nbytes in found if file.startswith(PROFILES_FOLDER) and nbytes != FOLDER]
        kept = [file.kept for file in manifest.source.files]
        for file in (*experts, *kept, *profiles):
            path = self.folder.path / file
            with storage_errors(path):
                path.parent.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            for done in (
                pool.map(self._expert, experts.values()),
                pool.map(self._tensor, manifest.shared),
                pool.map(self._kept_file, manifest.source.files),
                pool.map(self._copy, profiles),
            ):
                for _ in done:
                    pass
        self.folder.write(SHARED_FILE, 0, b"", file_nbytes=manifest.shared_nbytes)

    def _expert(self, key: ExpertKey) -> None:
        layer = self.pack.manifest.layer(key.layer)
        expert = layer.experts[key.expert]
        pieces: Iterable[memoryview]
        if expert.stored is None:
            pieces = [memoryview(self.pack.read_expert(key))]
        else:
            stored = map_file(self.pack.path / expert.file, expert.file_nbytes).data
            pieces = Decompressor().expert_pieces(stored, expert, layer.parts)
        what = f"expert {key}" if self.pack.reference is not None else expert.file
        self._write(expert.file, what, 0, pieces, expert.sha256)

    def _tensor(self, tensor: TensorInfo) -> None:
        pieces: Iterable[memoryview]
        if tensor.stored is None:
            pieces = [self.pack.read_tensor(tensor.name).data]
        else:
            stored = self.pack.stored_tensor(tensor)
            pieces = Decompressor().pieces(stored, tensor.stored.encoding, tensor.dtype, tensor.nbytes)
        what = f"tensor {tensor.name!r}"
        if self.pack.reference is None:
            what = f"{SHARED_FILE}: {what}"
        self._write(SHARED_FILE, what, tensor.offset, pieces, tensor.sha256)

    def _kept_file(self, file: SourceFile) -> None:
        self._copy(file.kept, file.kept_sha256)

    def _copy(self, file: str, sha256: str | None = None) -> None:
        path = self.pack.path / file
        with storage_errors(path), open(open_regular(path), "rb") as opened:
            blocks = iter(lambda: memoryview(opened.read(_COPY_NBYTES)), b"")
            self._write(file, file, 0, blocks, sha256)

    def _write(
        self, file: str, what: str, offset: int, pieces: Iterable[memoryview], sha256: str | None
    ) -> None:
        """Write pieces one after the other; PackError says what they are when they do not have this SHA-256."""
        digest, where = hashlib.sha256(), f"{self.pack.path}: {what}"
        try:
            for piece in pieces:
                self.folder.write(file, offset, piece)
                digest.update(piece)
                offset += piece.nbytes
                self.progress(piece.nbytes)
        except PackError as error:
            raise PackError(f"{where}: {error}; run: lmpack validate {self.pack.path}") from None
        if sha256 not in (None, digest.hexdigest()):
            raise PackError(
                f"{where}: sha256 is {digest.hexdigest()[:12]}…, the manifest says {sha256:.12}…; "
                f"run: lmpack validate {self.pack.path}"
            )

"""PackWriter: builds a pack beside its destination and renames it when it is whole.

The bytes depend on what is written, never on the order, the number of threads or the machine.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Self

from lmpack.alignment import DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE, MIN_PAGE_SIZE, align_up, is_page_size
from lmpack.drive import storage_errors, sync_path, sync_tree
from lmpack.errors import PackError, StorageError, UnsupportedError, UsageError
from lmpack.expert_key import ExpertKey
from lmpack.layer_entry import check_role, lay_out_parts, parse_dtype_and_shape
from lmpack.manifest import (
    MANIFEST_FILE,
    SHARED_FILE,
    ExpertEntry,
    LayerEntry,
    Manifest,
    TensorInfo,
    check_description,
)
from lmpack.source_file import KEPT_FOLDER, check_relative_path
from lmpack.strict_json import JsonError
from lmpack.tensor_info import check_tensor_name
from lmpack.write_progress import LayerProgress, TensorProgress

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import TracebackType

    from lmpack.manifest import ConfigValue, Source

    Buffer = bytes | bytearray | memoryview

PARTIAL_SUFFIX = ".partial"
COPY_NBYTES = 8 * 1024 * 1024


class PackWriter:
    """Builds the pack `path` in `path.partial`; nothing that looks like a pack exists until finish() returns.

    First add every layer and shared tensor (this fixes the layout), then write their bytes, then finish().
    Parts and different shared tensors may be written by different threads, which must have ended before the
    writer is closed. After an error the `.partial` folder stays for inspection. Wrong calls raise ValueError:
    they are bugs of the caller.
    """

    def __init__(self, path: Path | str, *, page_size: int = DEFAULT_PAGE_SIZE) -> None:
        """Refuse (UsageError) a destination that exists; nothing is created before the first byte is written."""
        if not is_page_size(page_size):
            raise UsageError(
                f"page size {page_size}: expected a power of two from {MIN_PAGE_SIZE} to {MAX_PAGE_SIZE}"
            )
        named = Path(path).name not in ("", "..")
        self.path = Path(path) if named else Path(os.path.abspath(path))
        self.page_size = page_size
        self.partial = self.path.with_name(self.path.name + PARTIAL_SUFFIX)
        _refuse_existing(self.path, "choose another name, or delete it first")
        _refuse_existing(self.partial, "an interrupted conversion left it; delete it first")
        self._layers: dict[int, LayerProgress] = {}
        self._shared: dict[str, TensorProgress] = {}
        self._shared_end = 0
        self._kept: dict[str, tuple[int, str]] = {}
        self._lock = Lock()
        self._shared_file: int | None = None  # open from the first byte written to the end
        self._closed = False

    def __enter__(self) -> Self:
        """Return the writer itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close what is open; without finish() the `.partial` folder stays as it is."""
        self.close()

    def close(self) -> None:
        """Close shared.bin; calling it twice does no harm."""
        with self._lock:
            self._closed = True
            if self._shared_file is not None:
                os.close(self._shared_file)
                self._shared_file = None

    @property
    def planned_nbytes(self) -> int:
        """The bytes of all layers and shared tensors added so far, padding included, without kept files."""
        experts = sum(layer.stride * len(layer.experts) for layer in self._layers.values())
        return experts + align_up(self._shared_end, self.page_size)

    @property
    def planned_num_files(self) -> int:
        """The files and folders of all layers added so far, with shared.bin and the manifest."""
        return sum(len(layer.experts) + 1 for layer in self._layers.values()) + 5

    def add_layer(
        self, layer: int, num_experts: int, parts: Sequence[tuple[str, str, tuple[int, ...]]]
    ) -> None:
        """Fix the layout of a layer's experts: (role, dtype, shape) in file order.

        Raises UnsupportedError for what format 1 cannot hold: an unknown dtype, a row of half a block.
        """
        self._refuse_late()
        if layer in self._layers or layer < 0 or num_experts < 1 or not parts:
            raise ValueError(
                f"layer {layer} with {num_experts} experts and {len(parts)} parts cannot be added"
            )
        try:
            for role, dtype, shape in parts:
                check_role(role, f"layer {layer}")
                parse_dtype_and_shape(dtype, list(shape), f"layer {layer} {role}", least_dim=1)
        except JsonError as error:
            raise UnsupportedError(f"a pack cannot hold {error}") from None
        placed, stride = lay_out_parts(parts, self.page_size)
        entry = LayerProgress(placed, stride, num_experts)
        if len(entry.positions) != len(placed):
            raise ValueError(f"layer {layer}: a role stands twice in {[part.role for part in placed]}")
        self._layers[layer] = entry

    def add_shared(self, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        """Give a tensor its place in shared.bin, after those added before it; raises as add_layer does."""
        self._refuse_late()
        if name in self._shared:
            raise ValueError(f"shared tensor {name!r} was added before")
        try:
            check_tensor_name(name, "shared tensor")
            _, _, nbytes = parse_dtype_and_shape(dtype, list(shape), f"shared tensor {name!r}", least_dim=0)
        except JsonError as error:
            raise UnsupportedError(f"a pack cannot hold {error}") from None
        start = align_up(self._shared_end, self.page_size)
        self._shared[name] = TensorProgress(TensorInfo(name, dtype, shape, start, nbytes, ""))
        self._shared_end = start + nbytes

    def write_part(self, layer: int, expert: int, role: str, data: Buffer) -> None:
        """Write one whole part of one expert; parts and experts come in any order, from any thread.

        Parts that come in layout order are hashed as they pass; otherwise the finished file is read back once.
        """
        key, entry, view = ExpertKey(layer, expert), self._layers[layer], memoryview(data).cast("B")
        position = entry.positions[role]
        if not 0 <= expert < len(entry.experts):
            raise ValueError(f"expert {key}: the layer was added with {len(entry.experts)} experts")
        part, progress = entry.parts[position], entry.experts[expert]
        if view.nbytes != part.nbytes:
            raise ValueError(f"expert {key}: {role} takes {part.nbytes} bytes, got {view.nbytes}")
        self._start()
        path = self.partial / key.file
        with progress.lock, storage_errors(path):
            if position in progress.written:
                raise ValueError(f"expert {key}: {role} was written before")
            whole = len(progress.written) + 1 == len(entry.parts)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                _write_all(descriptor, view, part.offset)
                if whole:
                    os.ftruncate(descriptor, entry.stride)
            finally:
                os.close(descriptor)
            progress.add(position, part, view)
            if whole:
                progress.finish(path, entry.stride)

    def write_shared(self, name: str, offset: int, data: Buffer) -> None:
        """Write the next bytes of a shared tensor; offset counts from the tensor's start and leaves no gap."""
        progress, view = self._shared[name], memoryview(data).cast("B")
        tensor = progress.tensor
        if offset != progress.written_nbytes or offset + view.nbytes > tensor.nbytes:
            raise ValueError(
                f"shared tensor {name!r}: bytes {offset}+{view.nbytes} do not follow {progress.written_nbytes} "
                f"of {tensor.nbytes}"
            )
        descriptor = self._start()
        with storage_errors(self.partial / SHARED_FILE):
            _write_all(descriptor, view, tensor.offset + offset)
        progress.digest.update(view)
        progress.written_nbytes += view.nbytes

    def keep(self, kept: str, data: Buffer | Path) -> tuple[int, str]:
        """Store a source file, or the rest of one, at `kept` (source/...); return its size and SHA-256.

        Raises UnsupportedError for a name that would leave the pack or that other systems cannot store.
        """
        try:
            check_relative_path(kept, "kept file")
        except JsonError as error:
            raise UnsupportedError(f"{error}; rename the source file") from None
        if kept in self._kept or not kept.startswith(KEPT_FOLDER):
            raise ValueError(f"kept file {kept!r}: stands twice, or not below {KEPT_FOLDER}")
        self._start()
        path = self.partial / kept
        digest, nbytes = hashlib.sha256(), 0
        with storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "xb") as file:
                for chunk in _chunks(data):
                    file.write(chunk)
                    digest.update(chunk)
                    nbytes += len(chunk)
        self._kept[kept] = (nbytes, digest.hexdigest())
        return self._kept[kept]

    def finish(
        self,
        *,
        architecture: str,
        config: Mapping[str, ConfigValue],
        source: Source,
        reproducible: bool = True,
        reason: str = "",
    ) -> Manifest:
        """Check that everything was written, store identical experts once, put the manifest last, rename.

        Raises PackError when bytes are missing, ManifestError when the manifest would not be readable.
        """
        shared_file = self._start()
        check_description(architecture, config)
        layers = self._finished_layers()
        shared_nbytes = align_up(self._shared_end, self.page_size)
        draft = Manifest(
            page_size=self.page_size,
            architecture=architecture,
            config=config,
            layers=layers,
            shared=self._finished_shared(),
            shared_nbytes=shared_nbytes,
            source=source,
            reproducible=reproducible,
            reason=reason,
            pack_id="",
        )
        self._check_kept(source)
        raw = draft.to_bytes()
        manifest = Manifest.parse(
            raw, self.path / MANIFEST_FILE
        )  # what no reader would take is never written
        with storage_errors(self.partial):
            os.ftruncate(shared_file, shared_nbytes)
            self.close()
            self._drop_duplicates(layers)
            sync_tree(self.partial)
            with open(self.partial / MANIFEST_FILE, "xb") as file:
                file.write(raw)
                file.flush()
                os.fsync(file.fileno())
            sync_path(self.partial)
            _refuse_existing(
                self.path, f"it appeared meanwhile; the pack is whole in {self.partial}, rename it"
            )
            os.rename(self.partial, self.path)
            sync_path(self.path.absolute().parent)
        return manifest

    def _start(self) -> int:
        """Create the folders on the first call; return the descriptor of shared.bin."""
        descriptor = self._shared_file
        if descriptor is not None:
            return descriptor
        with self._lock:
            if self._closed:
                raise ValueError(f"{self.path}: the writer is closed")
            if self._shared_file is None:
                with storage_errors(self.partial):
                    os.makedirs(self.partial)
                    for layer in self._layers:
                        (self.partial / ExpertKey(layer, 0).file).parent.mkdir(parents=True)
                    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                    self._shared_file = os.open(self.partial / SHARED_FILE, flags, 0o666)
            return self._shared_file

    def _refuse_late(self) -> None:
        if self._shared_file is not None or self._closed:
            raise ValueError(f"{self.path}: the layout is fixed once bytes are written")

    def _finished_shared(self) -> tuple[TensorInfo, ...]:
        for progress in self._shared.values():
            tensor, written_nbytes = progress.tensor, progress.written_nbytes
            if written_nbytes != tensor.nbytes:
                raise PackError(
                    f"{self.partial}: shared tensor {tensor.name!r} has {written_nbytes} of {tensor.nbytes} bytes"
                )
        return tuple(replace(p.tensor, sha256=p.digest.hexdigest()) for p in self._shared.values())

    def _finished_layers(self) -> tuple[LayerEntry, ...]:
        first_with: dict[str, str] = {}  # sha256 -> the file of the first expert that has it
        layers: list[LayerEntry] = []
        for layer, entry in sorted(self._layers.items()):
            experts: list[ExpertEntry] = []
            for number, progress in enumerate(entry.experts):
                key = ExpertKey(layer, number)
                if not progress.sha256:
                    missing = [p.role for i, p in enumerate(entry.parts) if i not in progress.written]
                    raise PackError(f"{self.partial}: expert {key} lacks {', '.join(missing)}")
                file = first_with.setdefault(progress.sha256, key.file)
                experts.append(ExpertEntry(file, entry.stride, progress.sha256))
            layers.append(LayerEntry(layer, entry.parts, entry.stride, tuple(experts)))
        return tuple(layers)

    def _check_kept(self, source: Source) -> None:
        claimed = {file.kept: (file.kept_nbytes, file.kept_sha256) for file in source.files}
        wrong = sorted(claimed.items() ^ self._kept.items())
        if wrong:
            raise PackError(f"{self.partial}: the source and the kept files differ in {wrong[0][0]}")

    def _drop_duplicates(self, layers: Sequence[LayerEntry]) -> None:
        for layer in layers:
            files = [ExpertKey(layer.layer, number).file for number in range(layer.num_experts)]
            doubles = [file for file, expert in zip(files, layer.experts, strict=True) if expert.file != file]
            for file in doubles:
                (self.partial / file).unlink()
            if len(doubles) == len(files):
                (self.partial / files[0]).parent.rmdir()


def _refuse_existing(path: Path, advice: str) -> None:
    if os.path.lexists(path):
        raise UsageError(f"{path}: exists; {advice}")


def _write_all(descriptor: int, view: memoryview, offset: int) -> None:
    while view.nbytes:  # one call writes at most 2 GiB on Linux
        written = os.pwrite(descriptor, view, offset)
        if written == 0:
            raise StorageError("the drive took no bytes")
        view, offset = view[written:], offset + written


def _chunks(data: Buffer | Path) -> Iterator[bytes | memoryview]:
    if not isinstance(data, Path):
        yield memoryview(data).cast("B")
        return
    with storage_errors(data), open(data, "rb") as file:
        while chunk := file.read(COPY_NBYTES):
            yield chunk

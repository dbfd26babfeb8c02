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
from lmpack.drive import storage_errors
from lmpack.errors import PackError, UnsupportedError, UsageError
from lmpack.expert_key import ExpertKey
from lmpack.layer_entry import check_role, lay_out_parts, parse_dtype_and_shape
from lmpack.manifest import (
    MANIFEST_FILE,
    SHARED_FILE,
    ConvertedTensor,
    ExpertEntry,
    LayerEntry,
    Manifest,
    TensorInfo,
    check_description,
)
from lmpack.partial_folder import PartialFolder
from lmpack.reference import Reference
from lmpack.source_file import KEPT_FOLDER, check_relative_path
from lmpack.storage import RAW_STORAGE, REFERENCE_STORAGE
from lmpack.strict_json import JsonError
from lmpack.tensor_info import check_tensor_name
from lmpack.write_progress import LayerProgress, StreamProgress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import TracebackType

    from lmpack.manifest import ConfigValue, Source

    Buffer = bytes | bytearray | memoryview

COPY_NBYTES = 8 * 1024 * 1024


class PackWriter:
    """Builds the pack `path` in `path.partial`; nothing that looks like a pack exists until finish() returns.

    First add every layer and shared tensor (this fixes the layout), then write their bytes, then finish().
    Parts and different tensors may be written by different threads, which must have ended before the writer is
    closed. After an error the `.partial` folder stays, and a writer with `resume` can take it over: what
    recall_part() and its siblings give back is handed to write_part() and its siblings as `stored`, which then
    only hash it. The weights of a reference pack are hashed and never stored. Wrong calls raise ValueError: they are
    bugs of the caller.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        page_size: int = DEFAULT_PAGE_SIZE,
        resume: bool = False,
        is_reference: bool = False,
    ) -> None:
        """Refuse (UsageError) a destination that exists; nothing is created before the first byte is written."""
        if not is_page_size(page_size):
            raise UsageError(
                f"page size {page_size}: expected a power of two from {MIN_PAGE_SIZE} to {MAX_PAGE_SIZE}"
            )
        named = Path(path).name not in ("", "..")
        self.path = Path(path) if named else Path(os.path.abspath(path))
        self.page_size = page_size
        self._is_reference = is_reference
        self.folder = PartialFolder(self.path, resume=resume, is_resumable=not is_reference)
        self._layers: dict[int, LayerProgress] = {}
        self._shared: dict[str, tuple[TensorInfo, StreamProgress]] = {}
        self._shared_end = 0
        self._kept: dict[str, StreamProgress] = {}
        self._lock = Lock()
        self._started = False
        self._closed = False

    def __enter__(self) -> Self:
        """Return the writer itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Take no more bytes; without finish() the `.partial` folder stays as it is, for another process to have."""
        self._closed = True
        self.folder.close()

    @property
    def planned_nbytes(self) -> int:
        """The bytes of all layers and shared tensors added so far, padding included, without kept files."""
        if self._is_reference:
            return 0
        experts = sum(layer.stride * len(layer.experts) for layer in self._layers.values())
        return experts + align_up(self._shared_end, self.page_size)

    @property
    def planned_num_files(self) -> int:
        """The files and folders of all layers added so far, with shared.bin and the manifest."""
        layers = () if self._is_reference else self._layers.values()
        return sum(len(layer.experts) + 1 for layer in layers) + 5

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
        self._shared[name] = (TensorInfo(name, dtype, shape, start, nbytes, ""), StreamProgress())
        self._shared_end = start + nbytes

    def write_part(self, layer: int, expert: int, role: str, data: Buffer, *, stored: bool = False) -> None:
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
        with progress.lock:
            if position in progress.written:
                raise ValueError(f"expert {key}: {role} was written before")
            whole = len(progress.written) + 1 == len(entry.parts)
            if whole and self.folder.resume:
                self._clear_padding(key.file, entry)
            if not self._is_reference and (whole or not stored):
                written = view[:0] if stored else view
                self.folder.write(key.file, part.offset, written, file_nbytes=entry.stride if whole else None)
            progress.add(position, part, view)
            if whole:
                path = self.folder.path / key.file
                with storage_errors(path):
                    progress.finish(None if self._is_reference else path, entry.stride)

    def write_shared(self, name: str, offset: int, data: Buffer, *, stored: bool = False) -> None:
        """Write the next bytes of a shared tensor; offset counts from the tensor's start and leaves no gap."""
        (tensor, progress), view = self._shared[name], memoryview(data).cast("B")
        if offset != progress.written_nbytes or offset + view.nbytes > tensor.nbytes:
            raise ValueError(
                f"shared tensor {name!r}: bytes {offset}+{view.nbytes} do not follow {progress.written_nbytes} "
                f"of {tensor.nbytes}"
            )
        self._start()
        if not stored and not self._is_reference:
            self.folder.write(SHARED_FILE, tensor.offset + offset, view)
        progress.add(view)

    def write_kept(self, kept: str, offset: int, data: Buffer, *, stored: bool = False) -> None:
        """Write the next bytes of a source file, or of the rest of one, at `kept` (source/...).

        Raises UnsupportedError for a name that would leave the pack or that other systems cannot store.
        """
        progress, view = self._kept.get(kept), memoryview(data).cast("B")
        if progress is None:
            try:
                check_relative_path(kept, "kept file")
            except JsonError as error:
                raise UnsupportedError(f"{error}; rename the source file") from None
            if not kept.startswith(KEPT_FOLDER):
                raise ValueError(f"kept file {kept!r}: not below {KEPT_FOLDER}")
            progress = self._kept.setdefault(kept, StreamProgress())
        if offset != progress.written_nbytes:
            raise ValueError(f"kept file {kept!r}: byte {offset} does not follow {progress.written_nbytes}")
        self._start()
        if not stored:
            path = self.folder.path / kept
            with storage_errors(path):
                path.parent.mkdir(parents=True, exist_ok=True)
            self.folder.write(kept, offset, view)
        progress.add(view)

    def keep(self, kept: str, data: Buffer | Path) -> tuple[int, str]:
        """Write a whole kept file, from memory or from a file; return its size and SHA-256."""
        if kept in self._kept:
            raise ValueError(f"kept file {kept!r}: stands twice")
        offset = 0
        for chunk in _chunks(data):
            self.write_kept(kept, offset, chunk)
            offset += len(chunk)
        return self.kept(kept)

    def kept(self, kept: str) -> tuple[int, str]:
        """Return the size and the SHA-256 of a kept file so far."""
        progress = self._kept[kept]
        return progress.written_nbytes, progress.digest.hexdigest()

    def recall_part(self, layer: int, expert: int, role: str, view: memoryview) -> bool:
        """Fill view with what an earlier run wrote of a part; False when the drive has less than that.

        Whether these are the right bytes is for the caller to know.
        """
        entry = self._layers[layer]
        offset = entry.parts[entry.positions[role]].offset
        return self.folder.read_back(ExpertKey(layer, expert).file, offset, view)

    def recall_shared(self, name: str, offset: int, view: memoryview) -> bool:
        """Do what recall_part does, for bytes of a shared tensor."""
        return self.folder.read_back(SHARED_FILE, self._shared[name][0].offset + offset, view)

    def recall_kept(self, kept: str, offset: int, view: memoryview) -> bool:
        """Do what recall_part does, for bytes of a kept file."""
        return self.folder.read_back(kept, offset, view)

    def finish(
        self,
        *,
        architecture: str,
        config: Mapping[str, ConfigValue],
        source: Source,
        reproducible: bool = True,
        reason: str = "",
        converted: tuple[ConvertedTensor, ...] = (),
        compress: Callable[[Path, Manifest], Manifest] | None = None,
    ) -> Manifest:
        """Check that everything was written, store identical experts once, put the manifest last, rename.

        compress may give the files in a folder another form once they are whole, and returns the manifest for it.
        Raises PackError when bytes are missing, ManifestError when the manifest would not be readable.
        """
        self._start()
        check_description(architecture, config)
        layers = self._finished_layers(Reference(self.path, source) if self._is_reference else None)
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
            storage=REFERENCE_STORAGE if self._is_reference else RAW_STORAGE,
            converted=converted,
        )
        self._check_kept(source)
        raw = draft.to_bytes()
        manifest = Manifest.parse(
            raw, self.path / MANIFEST_FILE
        )  # what no reader would take is never written
        for kept in self._kept:
            self.folder.write(kept, 0, b"", file_nbytes=self.kept(kept)[0])
        if not self._is_reference:
            self.folder.write(SHARED_FILE, 0, b"", file_nbytes=shared_nbytes)
        if self.folder.resume:
            self._clear_shared_padding(shared_nbytes)
        if compress is not None:
            raw = compress(self.folder.path, draft).to_bytes()
            manifest = Manifest.parse(raw, self.path / MANIFEST_FILE)
        self._closed = True
        self.folder.publish(raw, manifest)
        return manifest

    def _start(self) -> None:
        """Create the folders on the first call."""
        if self._closed:
            raise ValueError(f"{self.path}: the writer is closed")
        with self._lock:
            if not self._started:
                self.folder.create()
                with storage_errors(self.folder.path):
                    for layer in self._layers if not self._is_reference else ():
                        file = self.folder.path / ExpertKey(layer, 0).file
                        file.parent.mkdir(parents=True, exist_ok=self.folder.resume)
                self._started = True

    def _clear_padding(self, file: str, entry: LayerProgress) -> None:
        """An earlier run left zeros between and after the parts; nobody knows what became of them since."""
        for start, nbytes in entry.gaps:
            self.folder.write(file, start, bytes(nbytes))
        self.folder.write(file, 0, b"", file_nbytes=entry.parts[-1].offset + entry.parts[-1].nbytes)

    def _clear_shared_padding(self, shared_nbytes: int) -> None:
        tensors = [tensor for tensor, _ in self._shared.values()]
        ends = [tensor.offset for tensor in tensors[1:]] + [shared_nbytes]
        for tensor, end in zip(tensors, ends, strict=False):
            start = tensor.offset + tensor.nbytes
            self.folder.write(SHARED_FILE, start, bytes(end - start))

    def _refuse_late(self) -> None:
        if self._started or self._closed:
            raise ValueError(f"{self.path}: the layout is fixed once bytes are written")

    def _finished_shared(self) -> tuple[TensorInfo, ...]:
        for tensor, progress in self._shared.values():
            written_nbytes = progress.written_nbytes
            if written_nbytes != tensor.nbytes:
                raise PackError(
                    f"{self.folder.path}: shared tensor {tensor.name!r} has {written_nbytes} of {tensor.nbytes} bytes"
                )
        return tuple(
            replace(tensor, sha256=progress.digest.hexdigest()) for tensor, progress in self._shared.values()
        )

    def _finished_layers(self, reference: Reference | None) -> tuple[LayerEntry, ...]:
        first_with: dict[str, str] = {}  # sha256 -> the file of the first expert that has it
        layers: list[LayerEntry] = []
        for layer, entry in sorted(self._layers.items()):
            experts: list[ExpertEntry] = []
            for number, progress in enumerate(entry.experts):
                key = ExpertKey(layer, number)
                if len(progress.written) < len(entry.parts):
                    missing = [p.role for i, p in enumerate(entry.parts) if i not in progress.written]
                    raise PackError(f"{self.folder.path}: expert {key} lacks {', '.join(missing)}")
                sha256 = progress.sha256
                if not sha256:  # its parts came out of order, and no file of ours has them
                    assert reference is not None
                    whole = LayerEntry(layer, entry.parts, entry.stride, ())
                    sha256 = hashlib.sha256(reference.read_expert(key, whole)).hexdigest()
                experts.append(ExpertEntry(first_with.setdefault(sha256, key.file), entry.stride, sha256))
            layers.append(LayerEntry(layer, entry.parts, entry.stride, tuple(experts)))
        return tuple(layers)

    def _check_kept(self, source: Source) -> None:
        claimed = {file.kept: (file.kept_nbytes, file.kept_sha256) for file in source.files}
        written = {kept: self.kept(kept) for kept in self._kept}
        wrong = sorted(claimed.items() ^ written.items())
        if wrong:
            raise PackError(f"{self.folder.path}: the source and the kept files differ in {wrong[0][0]}")


def _chunks(data: Buffer | Path) -> Iterator[bytes | memoryview]:
    if not isinstance(data, Path):
        yield memoryview(data).cast("B")
        return
    with storage_errors(data), open(data, "rb") as file:
        while chunk := file.read(COPY_NBYTES):
            yield chunk

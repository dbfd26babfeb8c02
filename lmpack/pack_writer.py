"""PackWriter: builds a pack beside its destination and renames it when it is whole.

The bytes depend on what is written, never on the order, the number of threads or the machine.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Self

from lmpack.alignment import DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE, MIN_PAGE_SIZE, align_up, is_page_size
from lmpack.drive import storage_errors, sync_path, sync_tree
from lmpack.errors import PackError, StorageError, UsageError
from lmpack.expert_key import ExpertKey
from lmpack.layer_entry import lay_out_parts
from lmpack.manifest import (
    MANIFEST_FILE,
    SHARED_FILE,
    ExpertEntry,
    LayerEntry,
    Manifest,
    TensorInfo,
    lay_out_shared,
)
from lmpack.source_file import KEPT_FOLDER, check_relative_path

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import TracebackType

    from lmpack.layer_entry import ExpertPart
    from lmpack.manifest import ConfigValue, Source

    Buffer = bytes | bytearray | memoryview

PARTIAL_SUFFIX = ".partial"
COPY_NBYTES = 8 * 1024 * 1024


class _ExpertProgress:
    """What has been written of one expert, and its hash so far."""

    __slots__ = ("digest", "hashed_nbytes", "roles", "sha256")

    def __init__(self) -> None:
        self.roles: set[str] = set()
        self.digest: hashlib._Hash | None = hashlib.sha256()
        self.hashed_nbytes = 0
        self.sha256 = ""


class _LayerProgress:
    """The layout of one layer and its experts' progress."""

    __slots__ = ("experts", "parts", "stride")

    def __init__(self, parts: Sequence[ExpertPart], stride: int, num_experts: int) -> None:
        self.parts = {part.role: part for part in parts}
        self.stride = stride
        self.experts = [_ExpertProgress() for _ in range(num_experts)]


class _TensorProgress:
    """A shared tensor, what has been written of it, and its hash so far."""

    __slots__ = ("digest", "tensor", "written_nbytes")

    def __init__(self, tensor: TensorInfo) -> None:
        self.tensor = tensor
        self.written_nbytes = 0
        self.digest = hashlib.sha256()


class PackWriter:
    """Builds the pack `path` in `path.partial`; nothing that looks like a pack exists until finish() returns.

    First add every layer and shared tensor (this fixes the layout), then write their bytes, then finish().
    Different experts and different shared tensors may be written by different threads. After an error the
    `.partial` folder stays for inspection. Wrong calls raise ValueError: they are bugs of the caller.
    """

    def __init__(self, path: Path | str, *, page_size: int = DEFAULT_PAGE_SIZE) -> None:
        """Refuse (UsageError) a destination that exists; nothing is created before the first byte is written."""
        if not is_page_size(page_size):
            raise UsageError(
                f"page size {page_size}: expected a power of two from {MIN_PAGE_SIZE} to {MAX_PAGE_SIZE}"
            )
        self.path = Path(path)
        self.page_size = page_size
        self.partial = self.path.with_name(self.path.name + PARTIAL_SUFFIX)
        self._refuse_existing(self.path, "choose another name, or delete it first")
        self._refuse_existing(self.partial, "an interrupted conversion left it; delete it first")
        self._layers: dict[int, _LayerProgress] = {}
        self._shared: dict[str, _TensorProgress] = {}
        self._shared_nbytes = 0
        self._kept: dict[str, tuple[int, str]] = {}
        self._lock = Lock()
        self._shared_file: int | None = None
        self._finished = False

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
            if self._shared_file is not None:
                os.close(self._shared_file)
                self._shared_file = None

    @property
    def planned_nbytes(self) -> int:
        """The bytes of all layers and shared tensors added so far, padding included, without kept files."""
        experts = sum(layer.stride * len(layer.experts) for layer in self._layers.values())
        return experts + align_up(self._shared_nbytes, self.page_size)

    @property
    def planned_num_files(self) -> int:
        """The files and folders of all layers added so far, with shared.bin and the manifest."""
        return sum(len(layer.experts) + 1 for layer in self._layers.values()) + 5

    def add_layer(
        self, layer: int, num_experts: int, parts: Sequence[tuple[str, str, tuple[int, ...]]]
    ) -> None:
        """Fix the layout of a layer's experts: (role, dtype, shape) in file order.

        Raises UnsupportedError for a dtype or a row length without a size.
        """
        self._refuse_late()
        if layer in self._layers or layer < 0 or num_experts < 1 or not parts:
            raise ValueError(
                f"layer {layer} with {num_experts} experts and {len(parts)} parts cannot be added"
            )
        placed, stride = lay_out_parts(parts, self.page_size)
        if len({part.role for part in placed}) != len(placed):
            raise ValueError(f"layer {layer}: a role stands twice in {[part.role for part in placed]}")
        self._layers[layer] = _LayerProgress(placed, stride, num_experts)

    def add_shared(self, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        """Give a tensor its place in shared.bin: after those added before it."""
        self._refuse_late()
        if name in self._shared:
            raise ValueError(f"shared tensor {name!r} was added before")
        start = align_up(self._shared_nbytes, self.page_size)
        ((tensor,), _) = lay_out_shared([(name, dtype, shape)], self.page_size)
        tensor = TensorInfo(name, dtype, shape, start, tensor.nbytes, "")
        self._shared[name] = _TensorProgress(tensor)
        self._shared_nbytes = start + tensor.nbytes

    def write_part(self, layer: int, expert: int, role: str, data: Buffer) -> None:
        """Write one whole part of one expert; experts come in any order, one thread at a time for each.

        Parts that come in layout order are hashed as they pass; otherwise the finished file is read back once.
        """
        key, entry = ExpertKey(layer, expert), self._layers[layer]
        part, progress = entry.parts[role], entry.experts[expert]
        view = memoryview(data).cast("B")
        if view.nbytes != part.nbytes or role in progress.roles:
            state = "again" if role in progress.roles else f"with {view.nbytes} bytes"
            raise ValueError(f"expert {key}: {role} ({part.nbytes} bytes) was written {state}")
        self._start()
        progress.roles.add(role)
        whole = len(progress.roles) == len(entry.parts)
        path = self.partial / key.file
        with storage_errors(path):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                _write_all(descriptor, view, part.offset)
                if whole:
                    os.ftruncate(descriptor, entry.stride)
            finally:
                os.close(descriptor)
            _hash_part(progress, entry, part, view)
            if whole:
                progress.sha256 = _finish_hash(progress, entry, path)
                progress.digest = None

    def write_shared(self, name: str, offset: int, data: Buffer) -> None:
        """Write the next bytes of a shared tensor; offset counts from the tensor's start and leaves no gap."""
        progress = self._shared[name]
        tensor, view = progress.tensor, memoryview(data).cast("B")
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
        """Store a source file, or the rest of one, at `kept` (source/...); return its size and SHA-256."""
        check_relative_path(kept, "kept file")
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
        shared = self._finished_shared()
        layers = self._finished_layers()
        self._check_kept(source)
        shared_nbytes = align_up(self._shared_nbytes, self.page_size)
        draft = Manifest(
            page_size=self.page_size,
            architecture=architecture,
            config=config,
            layers=layers,
            shared=shared,
            shared_nbytes=shared_nbytes,
            source=source,
            reproducible=reproducible,
            reason=reason,
            pack_id="",
        )
        raw = draft.to_bytes()
        manifest = Manifest.parse(
            raw, self.path / MANIFEST_FILE
        )  # what the reader would refuse is never written
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
            self._refuse_existing(self.path, "it appeared during the conversion; move it away, then rename")
            os.rename(self.partial, self.path)
            sync_path(self.path.absolute().parent)
        self._finished = True
        return manifest

    def _start(self) -> int:
        """Create the folders on the first call; return the descriptor of shared.bin."""
        descriptor = self._shared_file
        if descriptor is not None:
            return descriptor
        with self._lock:
            if self._shared_file is None:
                if self._finished or self.partial.exists():
                    raise ValueError(f"{self.path}: the writer is closed")
                with storage_errors(self.partial):
                    os.makedirs(self.partial)
                    for layer in self._layers:
                        (self.partial / ExpertKey(layer, 0).file).parent.mkdir(parents=True)
                    self._shared_file = os.open(
                        self.partial / SHARED_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666
                    )
            return self._shared_file

    def _refuse_late(self) -> None:
        if self._shared_file is not None or self._finished:
            raise ValueError(f"{self.path}: the layout is fixed once bytes are written")

    def _refuse_existing(self, path: Path, advice: str) -> None:
        if os.path.lexists(path):
            raise UsageError(f"{path}: exists; {advice}")

    def _finished_shared(self) -> tuple[TensorInfo, ...]:
        tensors: list[TensorInfo] = []
        for progress in self._shared.values():
            tensor = progress.tensor
            if progress.written_nbytes != tensor.nbytes:
                raise PackError(
                    f"{self.partial}: shared tensor {tensor.name!r} has {progress.written_nbytes} of {tensor.nbytes} bytes"
                )
            tensors.append(
                TensorInfo(
                    tensor.name,
                    tensor.dtype,
                    tensor.shape,
                    tensor.offset,
                    tensor.nbytes,
                    progress.digest.hexdigest(),
                )
            )
        return tuple(tensors)

    def _finished_layers(self) -> tuple[LayerEntry, ...]:
        first_with: dict[str, str] = {}  # sha256 -> the file of the first expert that has it
        layers: list[LayerEntry] = []
        for layer, entry in sorted(self._layers.items()):
            experts: list[ExpertEntry] = []
            for number, progress in enumerate(entry.experts):
                key = ExpertKey(layer, number)
                if not progress.sha256:
                    missing = [role for role in entry.parts if role not in progress.roles]
                    raise PackError(f"{self.partial}: expert {key} lacks {', '.join(missing)}")
                file = first_with.setdefault(progress.sha256, key.file)
                experts.append(ExpertEntry(file, entry.stride, progress.sha256))
            layers.append(LayerEntry(layer, tuple(entry.parts.values()), entry.stride, tuple(experts)))
        return tuple(layers)

    def _check_kept(self, source: Source) -> None:
        claimed = {file.kept: (file.kept_nbytes, file.kept_sha256) for file in source.files}
        if claimed != self._kept:
            wrong = sorted(claimed.items() ^ self._kept.items())
            raise PackError(f"{self.partial}: the source and the kept files differ: {wrong[0][0]}")

    def _drop_duplicates(self, layers: Sequence[LayerEntry]) -> None:
        for layer in layers:
            for number, expert in enumerate(layer.experts):
                own = ExpertKey(layer.layer, number).file
                if expert.file != own:
                    (self.partial / own).unlink()


def _write_all(descriptor: int, view: memoryview, offset: int) -> None:
    while view.nbytes:  # one call writes at most 2 GiB on Linux
        written = os.pwrite(descriptor, view, offset)
        if written == 0:
            raise StorageError("the drive took no bytes")
        view, offset = view[written:], offset + written


def _hash_part(progress: _ExpertProgress, entry: _LayerProgress, part: ExpertPart, view: memoryview) -> None:
    """Continue the running hash when this part follows the last one; otherwise give it up."""
    following = len(progress.roles) - 1
    if progress.digest is None or list(entry.parts)[following] != part.role:
        progress.digest = None
        return
    progress.digest.update(bytes(part.offset - progress.hashed_nbytes))
    progress.digest.update(view)
    progress.hashed_nbytes = part.offset + part.nbytes


def _finish_hash(progress: _ExpertProgress, entry: _LayerProgress, path: Path) -> str:
    if progress.digest is not None:
        progress.digest.update(bytes(entry.stride - progress.hashed_nbytes))
        return progress.digest.hexdigest()
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _chunks(data: Buffer | Path) -> Iterator[bytes | memoryview]:
    if not isinstance(data, Path):
        yield memoryview(data).cast("B")
        return
    with open(data, "rb") as file:
        while chunk := file.read(COPY_NBYTES):
            yield chunk

"""FileCopy: one source file into a pack, read once from front to back.

The bytes go through in batches of whole pieces. One lane hashes the file, the others write and hash the experts, each
expert always in the same lane, so that its parts stay in order. A batch that the journal knows comes from the pack
itself when what lies there is what the source had; what was quantized is not quantized again.
"""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING
from zlib import crc32

from converters.conversion_plan import FilePlan, PartPiece, Piece, RestPiece, SharedPiece
from converters.source_reader import SourceReader
from lmpack.errors import CheckpointError, SourceChangedError, StorageError
from lmpack.manifest import SourceFile
from lmpack.source_file import kept_path_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from converters.checkpoint import CheckpointFile
    from converters.copy_lanes import CopyLanes, LentBuffer
    from converters.journal import Converted, Journal
    from converters.quantization import QuantizationPlan, TensorConversion
    from converters.source_files import SourceFiles
    from lmpack.pack_writer import PackWriter

_HASH_LANE = 0  # the writing lanes follow it


@dataclass(slots=True)
class _Batch:
    """Pieces that follow each other: bytes [offset, offset + nbytes) of the source file."""

    offset: int
    nbytes: int
    pieces: list[Piece]
    known: str | None = None  # what the journal says sha256 was
    recalled: bool = False  # it came from the pack
    sha256: str = ""  # of the source file up to the batch's end


@dataclass(frozen=True, slots=True)
class CopyTools:
    """What the copies of all files of a conversion share."""

    writer: PackWriter
    journal: Journal
    files: SourceFiles
    jobs: int  # writing lanes, beside the hashing one
    buffer_nbytes: int
    progress: Callable[[int], None]
    quantized: QuantizationPlan | None = None


class FileCopy:
    """The copy of one source file; run() does it."""

    def __init__(
        self, tools: CopyTools, lanes: CopyLanes, number: int, file: CheckpointFile, plan: FilePlan
    ) -> None:
        """Prepare; number is the file's place in the checkpoint."""
        self.recalled_nbytes = 0  # taken over from an interrupted conversion
        self._recalled_lock = Lock()
        self._converted: Converted = {}  # what that one noted of the pieces that it had converted
        self._tools = tools
        self._lanes = lanes
        self._number = number
        self._file = file
        self._plan = plan
        self._kept = kept_path_of(file.name, has_segments=bool(plan.segments))
        self._digest = hashlib.sha256()

    def run(self) -> SourceFile:
        """Copy the file and return what the manifest says of it.

        Raises SourceChangedError when it changes meanwhile, StorageError when a drive refuses.
        """
        tools, file = self._tools, self._file
        identity = tools.files.identity(file)
        known, self._converted = tools.journal.begin_file(self._number, identity)
        tools.writer.write_kept(self._kept, 0, b"")
        with ExitStack() as stack:
            reader: SourceReader | None = None
            for batch in self._batches():
                batch.known = known.get((batch.offset, batch.nbytes))
                buffer = self._lanes.lend(partial(self._note, batch))
                view = buffer.view[: batch.nbytes]
                if batch.known is not None and self._recall(batch, view):
                    batch.recalled = True
                    self.recalled_nbytes += batch.nbytes
                else:
                    if reader is None:
                        reader = stack.enter_context(SourceReader(tools.files.fetch(file)))
                    view = reader.read(buffer.view, batch.offset, batch.nbytes)
                    self._lanes.give(_HASH_LANE, buffer, partial(self._hash, batch, view))
                self._distribute(batch, buffer, view)
                buffer.release()
                tools.progress(batch.nbytes)
            self._lanes.drain()
            if reader is not None:
                reader.check_unchanged()
        if tools.files.identity(file) != identity:
            raise SourceChangedError(
                f"{file.path}: changed while it was being converted; wait until it is complete"
            )
        if tools.files.discards:
            self._prove()
            tools.files.release(file)
        kept_nbytes, kept_sha256 = tools.writer.kept(self._kept)
        sha256 = self._digest.hexdigest()
        return SourceFile(
            file.name, file.nbytes, sha256, self._kept, kept_nbytes, kept_sha256, self._plan.segments
        )

    def _batches(self) -> Iterator[_Batch]:
        """Group the file's pieces into batches that fit a buffer."""
        batch = _Batch(0, 0, [])
        for piece in self._plan.pieces(self._tools.buffer_nbytes):
            if batch.pieces and batch.nbytes + piece.nbytes > self._tools.buffer_nbytes:
                yield batch
                batch = _Batch(batch.offset + batch.nbytes, 0, [])
            batch.pieces.append(piece)
            batch.nbytes += piece.nbytes
        if batch.pieces:
            yield batch

    def _hash(self, batch: _Batch, view: memoryview) -> None:
        self._digest.update(view)
        batch.sha256 = self._digest.copy().hexdigest()
        if batch.known not in (None, batch.sha256):
            raise CheckpointError(
                f"{self._file.path}: its first {batch.offset + batch.nbytes} bytes are not those that the interrupted "
                f"conversion has read; delete {self._tools.writer.folder.path} and begin again"
            )

    def _note(self, batch: _Batch) -> None:
        if not batch.recalled:
            self._tools.journal.note(self._number, batch.offset, batch.nbytes, batch.sha256)

    def _recall(self, batch: _Batch, view: memoryview) -> bool:
        """Fill view from the pack; tell whether it, and everything before it, is what the source had."""
        if not self._read_back(batch, view):
            return False
        self._lanes.drain(_HASH_LANE)  # a batch before this one may have come from the source
        digest = self._digest.copy()
        digest.update(view)
        if digest.hexdigest() != batch.known:
            return False
        self._digest = digest
        return True

    def _read_back(self, batch: _Batch, view: memoryview) -> bool:
        writer, start = self._tools.writer, 0
        for piece in batch.pieces:
            place = view[start : start + piece.nbytes]
            start += piece.nbytes
            if self._conversion(piece) is not None:
                return False  # the pack does not have the source's bytes
            if isinstance(piece, PartPiece):
                there = writer.recall_part(piece.layer, piece.expert, piece.role, place)
            elif isinstance(piece, SharedPiece):
                there = writer.recall_shared(piece.name, piece.start, place)
            else:
                there = writer.recall_kept(self._kept, piece.start, place)
            if not there:
                return False
        return True

    def _distribute(self, batch: _Batch, buffer: LentBuffer, view: memoryview) -> None:
        """Give each writing lane its pieces of a batch."""
        writer, stored, start = self._tools.writer, batch.recalled, 0
        todo: dict[int, list[Callable[[], None]]] = {}
        for piece in batch.pieces:
            raw, offset = view[start : start + piece.nbytes], batch.offset + start
            start += piece.nbytes
            conversion = self._conversion(piece)
            if isinstance(piece, PartPiece):
                lane = piece.expert
                work = partial(writer.write_part, piece.layer, piece.expert, piece.role, raw, stored=stored)
            elif isinstance(piece, SharedPiece):
                lane = crc32(piece.name.encode())
                work = partial(writer.write_shared, piece.name, piece.start, raw, stored=stored)
            else:
                lane = crc32(self._kept.encode())
                work = partial(writer.write_kept, self._kept, piece.start, raw, stored=stored)
            if conversion is not None and not isinstance(piece, RestPiece):
                # the batch's hash says whether the source is what it was; if not, the conversion fails
                known = self._converted.get(offset) if batch.known is not None else None
                work = partial(self._convert, conversion, piece, raw, offset, known)
            todo.setdefault(lane % self._tools.jobs, []).append(work)
        for number, works in todo.items():
            self._lanes.give(_HASH_LANE + 1 + number, buffer, partial(_run_all, works))

    def _conversion(self, piece: Piece) -> TensorConversion | None:
        quantized = self._tools.quantized
        if quantized is None or isinstance(piece, RestPiece):
            return None
        if isinstance(piece, PartPiece):
            return quantized.part(piece.layer, piece.role)
        return quantized.shared(piece.name)

    def _convert(
        self,
        conversion: TensorConversion,
        piece: PartPiece | SharedPiece,
        raw: memoryview,
        offset: int,
        known: tuple[str, float] | None,
    ) -> None:
        """Write what becomes of a piece; when the pack has it, as the journal says, nothing but its hash is needed."""
        recalled = None if known is None else self._recall_converted(conversion, piece, *known)
        if recalled is not None:
            self._write_converted(conversion, piece, recalled, stored=True)
            return
        converted, error = conversion.convert(raw, piece.expert if isinstance(piece, PartPiece) else 0)
        self._write_converted(conversion, piece, converted, stored=False)
        sha256 = hashlib.sha256(converted).hexdigest()
        self._tools.journal.note_converted(self._number, offset, sha256, error)

    def _write_converted(
        self,
        conversion: TensorConversion,
        piece: PartPiece | SharedPiece,
        converted: memoryview,
        *,
        stored: bool,
    ) -> None:
        writer = self._tools.writer
        if isinstance(piece, PartPiece):
            writer.write_part(piece.layer, piece.expert, piece.role, converted, stored=stored)
        else:
            writer.write_shared(piece.name, conversion.offset(piece.start), converted, stored=stored)

    def _recall_converted(
        self, conversion: TensorConversion, piece: PartPiece | SharedPiece, sha256: str, error: float
    ) -> memoryview | None:
        """Return what became of a piece from the pack; None when that is not what the journal says."""
        writer, there = self._tools.writer, memoryview(bytearray(conversion.offset(piece.nbytes)))
        if isinstance(piece, PartPiece):
            found = writer.recall_part(piece.layer, piece.expert, piece.role, there)
        else:
            found = writer.recall_shared(piece.name, conversion.offset(piece.start), there)
        if not found or hashlib.sha256(there).hexdigest() != sha256:
            return None
        conversion.note(error)
        with self._recalled_lock:
            self.recalled_nbytes += piece.nbytes
        return there

    def _prove(self) -> None:
        """Raise StorageError unless the pack's drive gives back what the source had; nobody else will have it soon."""
        self._tools.writer.folder.sync()
        if self.recalled_nbytes == self._file.nbytes:
            return  # it was all read back a moment ago
        digest = hashlib.sha256()
        for batch in self._batches():
            buffer = self._lanes.lend()
            view = buffer.view[: batch.nbytes]
            if self._read_back(batch, view):
                digest.update(view)
            buffer.release()
        if digest.hexdigest() != self._digest.hexdigest():
            raise StorageError(
                f"{self._tools.writer.folder.path}: does not give back the bytes of {self._file.name} that were "
                "written; check the drive before you trust it"
            )


def _run_all(works: list[Callable[[], None]]) -> None:
    for work in works:
        work()

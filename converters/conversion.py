"""Conversion: one sequential pass over each source file, into a pack.

The reader fills buffers with whole pieces; one lane hashes the file, the others write and hash the experts, each
expert always in the same lane, so that its parts stay in order. The result does not depend on the number of lanes.
"""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from zlib import crc32

from converters.checkpoint import Checkpoint, open_checkpoint
from converters.conversion_plan import (
    ConversionPlan,
    FilePlan,
    PartPiece,
    Piece,
    RestPiece,
    check_packable,
    plan_conversion,
)
from converters.copy_lanes import BUFFER_NBYTES, CopyLanes
from converters.source_reader import SLACK_NBYTES, SourceReader
from lmpack.alignment import DEFAULT_PAGE_SIZE
from lmpack.drive import check_space
from lmpack.errors import UsageError
from lmpack.manifest import Source, SourceFile
from lmpack.pack_writer import PackWriter
from lmpack.source_file import kept_path_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from converters.checkpoint import CheckpointFile
    from converters.copy_lanes import LentBuffer

MAX_JOBS = 64
_HASH_LANE = 0  # the writing lanes follow it


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """What a conversion made of what."""

    path: Path
    pack_id: str
    architecture: str
    num_layers: int  # layers with routed experts
    num_experts: int  # of all layers together
    num_files: int  # of the source
    source_nbytes: int
    left_out: tuple[str, ...]
    seconds: float


def convert(
    src: Path | str | Checkpoint,
    dst: Path | str,
    *,
    page_size: int = DEFAULT_PAGE_SIZE,
    jobs: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> ConversionReport:
    """Write the checkpoint at src as the pack dst; progress gets the number of source bytes just read.

    Raises CheckpointError or UnsupportedError for the source, UsageError when dst exists, StorageError when the
    drive refuses. The source's files are read once, memory stays under 300 MB (more only when one part of one expert
    is larger than 100 MB), and the pack is the same whatever jobs is.
    """
    started = time.perf_counter()
    jobs = _default_jobs() if jobs is None else jobs
    if not 1 <= jobs <= MAX_JOBS:
        raise UsageError(f"--jobs {jobs}: expected 1 to {MAX_JOBS}")
    checkpoint = open_checkpoint(src) if isinstance(src, str | Path) else src
    plan = plan_conversion(checkpoint)
    description = checkpoint.describe()
    buffer_nbytes = max(BUFFER_NBYTES, plan.largest_part_nbytes)
    with PackWriter(dst, page_size=page_size) as writer:
        check_packable(checkpoint, plan, description, page_size)
        _fix_layout(writer, plan)
        check_space(
            Path(dst),
            writer.planned_nbytes + plan.kept_nbytes,
            writer.planned_num_files + len(checkpoint.files),
        )
        with CopyLanes(1 + jobs, buffer_nbytes + SLACK_NBYTES) as lanes:
            copy = _FileCopy(writer, lanes, jobs, buffer_nbytes, progress or (lambda _: None))
            files = [copy(file, todo) for file, todo in zip(checkpoint.files, plan.files, strict=True)]
        manifest = writer.finish(
            architecture=description.architecture,
            config=description.config,
            source=Source(checkpoint.kind, tuple(files)),
        )
    return ConversionReport(
        path=Path(dst),
        pack_id=manifest.pack_id,
        architecture=manifest.architecture,
        num_layers=len(manifest.layers),
        num_experts=manifest.num_experts,
        num_files=len(files),
        source_nbytes=sum(file.nbytes for file in files),
        left_out=checkpoint.left_out,
        seconds=time.perf_counter() - started,
    )


def _default_jobs() -> int:
    return min(8, max(2, os.cpu_count() or 2))


def _fix_layout(writer: PackWriter, plan: ConversionPlan) -> None:
    for layer, experts in plan.layers.items():
        writer.add_layer(layer, experts.num_experts, experts.parts)
    for name, dtype, shape in plan.shared:
        writer.add_shared(name, dtype, shape)


class _FileCopy:
    """Copies source files one after the other; the lanes outlive each of them."""

    def __init__(
        self,
        writer: PackWriter,
        lanes: CopyLanes,
        jobs: int,
        buffer_nbytes: int,
        progress: Callable[[int], None],
    ) -> None:
        self.writer = writer
        self.lanes = lanes
        self.jobs = jobs
        self.buffer_nbytes = buffer_nbytes
        self.progress = progress

    def __call__(self, file: CheckpointFile, plan: FilePlan) -> SourceFile:
        kept = kept_path_of(file.name, has_segments=bool(plan.segments))
        if not plan.segments:
            with SourceReader(file) as reader:
                kept_nbytes, sha256 = self.writer.keep(kept, file.path)
                reader.check_unchanged()
            self.progress(kept_nbytes)
            return SourceFile(file.name, kept_nbytes, sha256, kept, kept_nbytes, sha256, ())
        sha256, rest = self._copy_tensors(file, plan)
        kept_nbytes, kept_sha256 = self.writer.keep(kept, rest)
        return SourceFile(file.name, file.nbytes, sha256, kept, kept_nbytes, kept_sha256, plan.segments)

    def _copy_tensors(self, file: CheckpointFile, plan: FilePlan) -> tuple[str, bytearray]:
        digest, rest, offset = hashlib.sha256(), bytearray(), 0
        with SourceReader(file) as reader:
            for pieces in _batches(plan.pieces(BUFFER_NBYTES), self.buffer_nbytes):
                nbytes = sum(piece.nbytes for piece in pieces)
                buffer = self.lanes.lend()
                view = reader.read(buffer.view, offset, nbytes)
                self.lanes.give(_HASH_LANE, buffer, partial(digest.update, view))
                self._distribute(pieces, buffer, view, rest)
                buffer.release()
                offset += nbytes
                self.progress(nbytes)
            self.lanes.drain()
            reader.check_unchanged()
        return digest.hexdigest(), rest

    def _distribute(
        self, pieces: list[Piece], buffer: LentBuffer, batch: memoryview, rest: bytearray
    ) -> None:
        """Give each writing lane its pieces of a batch; what no tensor claims is collected here."""
        todo: dict[int, list[Callable[[], None]]] = {}
        start = 0
        for piece in pieces:
            view = batch[start : start + piece.nbytes]
            start += piece.nbytes
            if isinstance(piece, RestPiece):
                rest += view
            elif isinstance(piece, PartPiece):
                write = partial(self.writer.write_part, piece.layer, piece.expert, piece.role, view)
                todo.setdefault(piece.expert % self.jobs, []).append(write)
            else:
                write = partial(self.writer.write_shared, piece.name, piece.start, view)
                todo.setdefault(crc32(piece.name.encode()) % self.jobs, []).append(write)
        for lane, writes in todo.items():
            self.lanes.give(_HASH_LANE + 1 + lane, buffer, partial(_run_all, writes))


def _run_all(writes: list[Callable[[], None]]) -> None:
    for write in writes:
        write()


def _batches(pieces: Iterator[Piece], max_nbytes: int) -> Iterator[list[Piece]]:
    """Group pieces that follow each other into lists of at most max_nbytes."""
    batch: list[Piece] = []
    nbytes = 0
    for piece in pieces:
        if batch and nbytes + piece.nbytes > max_nbytes:
            yield batch
            batch, nbytes = [], 0
        batch.append(piece)
        nbytes += piece.nbytes
    if batch:
        yield batch

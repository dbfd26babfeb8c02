"""Conversion: one sequential pass over each source file, into a pack.

The result does not depend on the number of threads, nor on how often the conversion was interrupted and resumed.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from converters.checkpoint import Checkpoint, open_checkpoint
from converters.conversion_plan import ConversionPlan, check_packable, plan_conversion
from converters.copy_lanes import BUFFER_NBYTES, CopyLanes
from converters.file_copy import CopyTools, FileCopy
from converters.journal import Journal
from converters.source_files import LocalFiles, SourceFiles
from converters.source_reader import SLACK_NBYTES
from lmpack.alignment import DEFAULT_PAGE_SIZE
from lmpack.compression import compress_files
from lmpack.drive import check_space
from lmpack.errors import SourceChangedError, StorageError, UnsupportedError, UsageError
from lmpack.expert_key import ExpertKey
from lmpack.jobs import writing_jobs
from lmpack.manifest import ExpertEntry, Manifest, pack_id_of
from lmpack.pack_files import expected_files
from lmpack.pack_writer import PackWriter
from lmpack.partial_folder import JOURNAL_FILE, PartialFolder
from lmpack.reference import source_folder
from lmpack.validation import validate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from converters.model_config import ModelDescription
    from converters.quantization import Quantization
    from lmpack.manifest import SourceFile

_NO_HASH = "0" * 64


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
    resumed_nbytes: int  # of those: what an interrupted conversion had in the pack already
    left_out: tuple[str, ...]
    num_converted: int  # tensors that were quantized; a part of all experts of a layer is one
    relative_error: float  # the largest of theirs, as the manifest gives it
    seconds: float


def convert(
    src: Path | str | Checkpoint,
    dst: Path | str,
    *,
    page_size: int = DEFAULT_PAGE_SIZE,
    jobs: int | None = None,
    resume: bool = False,
    compress: bool = False,
    quantization: Quantization | None = None,
    reference: bool = False,
    files: SourceFiles | None = None,
    progress: Callable[[int], None] | None = None,
) -> ConversionReport:
    """Write the checkpoint at src as the pack dst; progress gets the number of source bytes just done.

    With compress, the pack is compressed; progress then gets its bytes as well. A quantization gives
    tensors other dtypes; such a pack cannot give its source back. With reference, the weights stay where they are: the
    source is read once for its checksums, and the pack refers to it. With resume, what an interrupted conversion left
    in `dst.partial` is checked and taken over; where it was quantized, the source is read once more. files hands out
    the checkpoint's files; by default they are where the checkpoint found them. Raises CheckpointError or
    UnsupportedError for the source, UsageError when dst exists or what is to be resumed is about something else,
    StorageError when the drive refuses. The source's files are read once, memory stays under 300 MB (more only when one
    part of one expert is larger than 100 MB), and the pack is the same whatever jobs is.
    """
    started = time.perf_counter()
    jobs = writing_jobs(jobs)
    if reference and (resume or compress or quantization is not None or files is not None):
        raise UsageError(
            "--reference writes no weights and needs a source that stays: there is nothing to resume, to compress or to "
            "quantize; leave out --resume, --compress and --quantize, or --reference"
        )
    checkpoint = open_checkpoint(src) if isinstance(src, str | Path) else src
    plan = plan_conversion(checkpoint)
    description = checkpoint.describe()
    quantized = None
    if quantization is not None:
        _check_quantizable(checkpoint, description, files)
        quantized = quantization.plan(plan, str(checkpoint.path))
        plan = quantized.target()
    with PackWriter(dst, page_size=page_size, resume=resume, is_reference=reference) as writer:
        draft = check_packable(
            checkpoint,
            plan,
            description,
            page_size,
            quantized.converted() if quantized else (),
            source_folder(writer.path, _folder(checkpoint)) if reference else "",
        )
        _fix_layout(writer, plan)
        folder = writer.folder
        _check_room(writer, checkpoint, plan)
        folder.create()
        going_on = "--resume" if files is None else "the same command"
        kept = folder.discarded_on_failure() if reference else _resumable(folder, going_on)
        with kept, Journal(folder.path / JOURNAL_FILE, draft.pack_id) as journal:
            folder.refuse_strangers(draft)
            source_nbytes = resumed_nbytes = sum(file.nbytes for file in checkpoint.files)
            manifest = _complete_interrupted(folder, draft, is_compressed=compress)
            if manifest is None:
                tools = CopyTools(
                    writer,
                    journal,
                    files or LocalFiles(),
                    jobs,
                    max(BUFFER_NBYTES, plan.largest_part_nbytes),
                    progress or _ignore,
                    quantized,
                )
                copied, resumed_nbytes = _copy_files(tools, checkpoint, plan)
                manifest = writer.finish(
                    architecture=description.architecture,
                    config=description.config,
                    source=replace(draft.source, files=copied),
                    reproducible=draft.reproducible,
                    reason=draft.reason,
                    converted=quantized.converted() if quantized else (),
                    compress=partial(compress_files, progress=progress) if compress else None,
                )
    return ConversionReport(
        path=Path(dst),
        pack_id=manifest.pack_id,
        architecture=manifest.architecture,
        num_layers=len(manifest.layers),
        num_experts=manifest.num_experts,
        num_files=len(checkpoint.files),
        source_nbytes=source_nbytes,
        resumed_nbytes=resumed_nbytes,
        left_out=checkpoint.left_out,
        num_converted=len(manifest.converted),
        relative_error=max((entry.relative_error for entry in manifest.converted), default=0.0),
        seconds=time.perf_counter() - started,
    )


def _ignore(_: int) -> None:
    pass


def _fix_layout(writer: PackWriter, plan: ConversionPlan) -> None:
    for layer, experts in plan.layers.items():
        writer.add_layer(layer, experts.num_experts, experts.parts)
    for name, dtype, shape in plan.shared:
        writer.add_shared(name, dtype, shape)


def _check_quantizable(
    checkpoint: Checkpoint, description: ModelDescription, files: SourceFiles | None
) -> None:
    if description.config.get("byte_order") == "big":
        raise UnsupportedError(
            f"{checkpoint.path}: is big-endian, and only little-endian numbers can be quantized"
        )
    if files is not None and files.discards:
        raise UsageError(
            "a source whose files are given up one by one cannot be quantized: convert it, then quantize"
        )


def _check_room(writer: PackWriter, checkpoint: Checkpoint, plan: ConversionPlan) -> None:
    used_nbytes, used_files = writer.folder.used()
    check_space(
        writer.path,
        writer.planned_nbytes + plan.kept_nbytes - used_nbytes,
        writer.planned_num_files + len(checkpoint.files) - used_files,
    )


def _copy_files(
    tools: CopyTools, checkpoint: Checkpoint, plan: ConversionPlan
) -> tuple[tuple[SourceFile, ...], int]:
    """Return what the manifest says of the files, and how many bytes an interrupted conversion had copied."""
    with CopyLanes(1 + tools.jobs, tools.buffer_nbytes + SLACK_NBYTES) as lanes:
        copies = [
            FileCopy(tools, lanes, number, *file)
            for number, file in enumerate(zip(checkpoint.files, plan.files, strict=True))
        ]
        copied = tuple(copy.run() for copy in copies)
    return copied, sum(copy.recalled_nbytes for copy in copies)


@contextmanager
def _resumable(folder: PartialFolder, going_on: str) -> Iterator[None]:
    """Say in the error of a drive, or of a source that is not whole yet, that the work is not lost."""
    try:
        yield
    except (StorageError, SourceChangedError) as error:
        raise type(error)(f"{error} ({going_on} continues with what is in {folder.path})") from error


def _folder(checkpoint: Checkpoint) -> Path:
    """Return the folder that the names of a checkpoint's files are relative to."""
    file = checkpoint.files[0]
    return file.path.absolute().parents[file.name.count("/")]


def _complete_interrupted(folder: PartialFolder, draft: Manifest, *, is_compressed: bool) -> Manifest | None:
    """Finish a pack that was whole but for its name when the conversion ended; None when there is more to do."""
    manifest = folder.manifest()
    if manifest is None:
        return None
    if _layout_id(manifest.uncompressed()) != draft.pack_id or manifest.is_compressed != is_compressed:
        raise UsageError(
            f"{folder.path}: is the pack of another source, or made with other settings; rename it to use it, or "
            "delete it"
        )
    expected = expected_files(manifest)
    if any(problem.file in expected for problem in validate(folder.path).problems):
        folder.drop_manifest()
        return None
    folder.complete(manifest)
    return manifest


def _layout_id(manifest: Manifest) -> str:
    """Return the pack id that the draft of this manifest has: without hashes, every expert in its own file."""
    layers = tuple(
        replace(
            layer,
            experts=tuple(
                ExpertEntry(ExpertKey(layer.layer, number).file, expert.nbytes, _NO_HASH)
                for number, expert in enumerate(layer.experts)
            ),
        )
        for layer in manifest.layers
    )
    files = tuple(replace(file, sha256=_NO_HASH, kept_sha256=_NO_HASH) for file in manifest.source.files)
    draft = replace(
        manifest,
        layers=layers,
        shared=tuple(replace(tensor, sha256=_NO_HASH) for tensor in manifest.shared),
        converted=tuple(replace(entry, relative_error=0.0) for entry in manifest.converted),
        source=replace(manifest.source, files=files),
    )
    return pack_id_of(draft.to_bytes())

"""SourceComparison: does a pack hold the very bytes of a checkpoint?"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from threading import local
from typing import TYPE_CHECKING

import numpy as np

from converters.origin_check import refuse_other_checkpoint
from converters.pack_extent import PIECE_NBYTES, Extent, extent_pieces, source_extents
from lmpack.decompression import Decompressor
from lmpack.errors import PackError, UnsupportedError, UsageError
from lmpack.jobs import reading_jobs
from lmpack.pack_files import Problem, expected_files
from lmpack.source_file import KEPT_FOLDER

if TYPE_CHECKING:
    from collections.abc import Callable

    from converters.byte_origin import ByteOrigin
    from lmpack.expert_key import ExpertKey
    from lmpack.pack import Pack


@dataclass(frozen=True, slots=True)
class _Place:
    """An extent of the pack and where the source has the same bytes."""

    extent: Extent
    file: str
    offset: int


def compare_with_source(
    pack: Pack,
    origin: ByteOrigin,
    *,
    jobs: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> tuple[Problem, ...]:
    """Return where a pack and a checkpoint differ; progress gets, from any thread, the source bytes just compared.

    Raises UsageError when the origin is a pack or the checkpoint of another, UnsupportedError when the pack's tensors
    were converted.
    """
    if origin.is_pack:
        raise UsageError(
            f"{origin.name}: is a pack, not a source; run: lmpack diff {pack.path} {origin.name}"
        )
    if not pack.manifest.reproducible:
        raise UnsupportedError(f"{pack.path}: does not hold its source's bytes: {pack.manifest.reason}")
    refuse_other_checkpoint(origin, pack.manifest.source, pack.path)
    problems: list[Problem] = []
    places: list[_Place] = []
    for file in pack.manifest.source.files:
        try:
            nbytes = origin.nbytes(file.name)
        except PackError as error:
            problems.append(Problem(file.kept, None, str(error)))
            continue
        if nbytes != file.nbytes:
            problems.append(
                Problem(
                    file.kept,
                    None,
                    f"{origin.name}: {file.name} has {nbytes} bytes, the source had {file.nbytes}",
                )
            )
            continue
        offset = 0
        for extent in source_extents(pack, file):
            places.append(_Place(extent, file.name, offset))
            offset += extent.source_nbytes
    keys = {file: expected.key for file, expected in expected_files(pack.manifest).items()}
    check = partial(_compare, pack, origin, keys, local(), progress or (lambda _: None))
    with ThreadPoolExecutor(reading_jobs(jobs)) as pool:
        found = list(pool.map(check, places))
    weights = [
        problem
        for place, problem in zip(places, found, strict=True)
        if pack.path / KEPT_FOLDER not in place.extent.path.parents
    ]
    if weights and None not in weights:
        raise UsageError(
            f"{origin.name}: is not what {pack.path} was made from: its files have the same names and sizes, and none "
            "of the tensors has the same bytes; name that checkpoint"
        )
    return (*problems, *filter(None, found))


def _compare(
    pack: Pack,
    origin: ByteOrigin,
    keys: dict[str, ExpertKey | None],
    buffers: local,
    progress: Callable[[int], None],
    place: _Place,
) -> Problem | None:
    if not hasattr(buffers, "buffer"):
        buffers.buffer = memoryview(bytearray(PIECE_NBYTES))
        buffers.decompressor = Decompressor()
    offset = place.offset
    for piece in extent_pieces(place.extent, buffers.decompressor):
        for start in range(0, piece.nbytes, PIECE_NBYTES):
            packed = piece[start : start + PIECE_NBYTES]
            source: memoryview = buffers.buffer[: packed.nbytes]
            origin.read(place.file, offset, source)
            differing = np.flatnonzero(np.frombuffer(packed, np.uint8) != np.frombuffer(source, np.uint8))
            progress(packed.nbytes)
            if differing.size:
                path = place.extent.path
                file = path.relative_to(pack.path).as_posix() if path.is_relative_to(pack.path) else str(path)
                what = f"{origin.name}: {place.file} has another byte {offset + int(differing[0])}"
                return Problem(
                    file, keys.get(file), f"is what the manifest says, but {what}; the source has changed"
                )
            offset += packed.nbytes
    return None

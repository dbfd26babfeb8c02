"""Compares what a reference pack refers to with its manifest."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from lmpack.errors import PackError, StorageError
from lmpack.expert_key import ExpertKey
from lmpack.jobs import reading_jobs
from lmpack.pack_files import Problem
from lmpack.padded_digest import PaddedDigest
from lmpack.reference import CONVERT_AGAIN, FileExtent, Reference, read_extent

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from pathlib import Path

    from lmpack.manifest import Manifest

_READ_NBYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class _Referenced:
    """What has a checksum of its own: an expert, whose gaps are zeros, or a shared tensor."""

    key: ExpertKey | None
    name: str  # what a message begins with
    extents: tuple[FileExtent, ...]
    nbytes: int
    sha256: str


def check_reference(
    folder: Path,
    manifest: Manifest,
    bad: Collection[str],
    *,
    quick: bool = False,
    jobs: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> tuple[tuple[Problem, ...], int]:
    """Return what is wrong with the files that a reference pack refers to, and the number of bytes compared.

    bad names the pack's own files that are bad. When a file is not the one that it was, or when quick, its bytes are
    not read.
    """
    reference = Reference(folder, manifest.source)
    problems = tuple(reference.problems(bad))
    if problems or quick:
        return problems, 0
    check = partial(_check, progress or (lambda _: None))
    with ThreadPoolExecutor(reading_jobs(jobs)) as pool:
        problems = tuple(filter(None, pool.map(check, _referenced(manifest, reference))))
    return problems, referenced_nbytes(manifest)


def referenced_nbytes(manifest: Manifest) -> int:
    """What a reference pack refers to, in bytes."""
    return sum(segment.nbytes for file in manifest.source.files for segment in file.segments)


def _referenced(manifest: Manifest, reference: Reference) -> Iterator[_Referenced]:
    for layer in manifest.layers:
        for number, expert in enumerate(layer.experts):
            key = ExpertKey(layer.layer, number)
            yield _Referenced(key, "", reference.expert(key, layer), layer.stride, expert.sha256)
    for tensor in manifest.shared:
        if tensor.nbytes:
            extents = (reference.tensor(tensor),)
            yield _Referenced(None, f"tensor {tensor.name!r}: ", extents, tensor.nbytes, tensor.sha256)


def _check(progress: Callable[[int], None], item: _Referenced) -> Problem | None:
    file = " and ".join(sorted({os.fspath(extent.path) for extent in item.extents}))
    try:
        digest = _sha256(item, progress)
    except (PackError, StorageError) as error:
        return Problem(file, item.key, f"{item.name}{error}")
    if digest == item.sha256:
        return None
    message = f"sha256 is {digest[:12]}…, the manifest says {item.sha256[:12]}…; {CONVERT_AGAIN}"
    return Problem(file, item.key, f"{item.name}{message}")


def _sha256(item: _Referenced, progress: Callable[[int], None]) -> str:
    digest = PaddedDigest()
    for extent in item.extents:
        buffer = memoryview(bytearray(min(_READ_NBYTES, extent.nbytes)))
        for start in range(0, extent.nbytes, _READ_NBYTES):
            view = buffer[: extent.nbytes - start]
            piece = replace(extent, offset=extent.offset + start, nbytes=view.nbytes)
            read_extent(piece, view)
            digest.add(extent.at + start, view)
            progress(view.nbytes)
    return digest.finish(item.nbytes)

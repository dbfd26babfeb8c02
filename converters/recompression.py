"""Recompression: the compressed bytes of tensors once more, at the level that the rest of the pack shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import zstandard

from lmpack.compression import MAX_LEVEL, compress_piece, compress_tensors
from lmpack.decompression import Decompressor
from lmpack.errors import PackError
from lmpack.pack import map_file
from lmpack.storage import RAW_ENCODING, num_planes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from pathlib import Path
    from typing import BinaryIO

    from lmpack.compression import TensorPlace
    from lmpack.manifest import Manifest


class Recompression:
    """Compresses as the writer of a pack did; a manifest does not say at which level that was."""

    def __init__(self, folder: Path, manifest: Manifest, bad_files: Collection[str]) -> None:
        """Find the levels that give the bytes of an expert in a good file; without one, all may be meant."""
        self._levels = _levels_of(folder, manifest, bad_files)

    def write(self, plain: BinaryIO, tensors: Sequence[TensorPlace], new: BinaryIO, sha256: str) -> None:
        """Fill the file new with tensors of plain, compressed; raises PackError unless it gets this SHA-256."""
        for level in self._levels:
            new.seek(0)
            new.truncate()
            _, digest = compress_tensors(plain, new, tensors, level, map)
            if digest == sha256:
                self._levels.remove(level)
                self._levels.insert(0, level)
                return
        version = ".".join(map(str, zstandard.ZSTD_VERSION))
        raise PackError(
            f"zstd {version} does not give the compressed bytes that the manifest wants, another version of it wrote "
            "them; name another copy of the pack, or unpack a good one"
        )


def _levels_of(folder: Path, manifest: Manifest, bad_files: Collection[str]) -> list[int]:
    sample = next(_samples(folder, manifest, bad_files), None)
    levels = range(1, MAX_LEVEL + 1)
    if sample is None:
        return list(levels)
    frames, piece, planes = sample
    return [level for level in levels if frames.startswith(compress_piece(piece, planes, level))]


def _samples(
    folder: Path, manifest: Manifest, bad_files: Collection[str]
) -> Iterator[tuple[bytes, memoryview, int]]:
    """Yield compressed parts of good experts: their frames, the first piece that they give, and its planes."""
    for layer in manifest.layers:
        for expert in layer.experts:
            if expert.stored is None or expert.file in bad_files:
                continue
            start = 0
            for form, part in zip(expert.stored.parts, layer.parts, strict=True):
                if form.encoding != RAW_ENCODING:
                    frames = map_file(folder / expert.file, expert.file_nbytes)[start : start + form.nbytes]
                    pieces = Decompressor().pieces(frames.data, form.encoding, part.dtype, part.nbytes)
                    yield frames.tobytes(), next(pieces), num_planes(part.dtype)
                start += form.nbytes

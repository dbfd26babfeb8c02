"""Decompression: the bytes of tensors from zstd frames, with one piece of scratch, whatever their size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import zstandard

from lmpack.errors import PackError
from lmpack.storage import PIECE_NBYTES, RAW_ENCODING, num_planes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from lmpack.layer_entry import ExpertEntry, ExpertPart
    from lmpack.storage import StoredExpert

SCRATCH_NBYTES = PIECE_NBYTES + (256 << 10)
"""What a Decompressor takes: a piece, and zstd's own state."""


class Decompressor:
    """Restores tensors; for one thread at a time. Frames that are damaged or lie about their size are a PackError."""

    def __init__(self) -> None:
        """Allocate the scratch."""
        self._zstd = zstandard.ZstdDecompressor(max_window_size=PIECE_NBYTES)
        self._scratch = np.empty(PIECE_NBYTES, np.uint8)

    def restore_expert(
        self, file: memoryview, stored: StoredExpert, parts: Sequence[ExpertPart], target: memoryview
    ) -> None:
        """Fill the parts of an expert, target being the whole of it, from its compressed file; padding stays."""
        start = 0
        for form, part in zip(stored.parts, parts, strict=True):
            room = target[part.offset : part.offset + part.nbytes]
            self.restore(file[start : start + form.nbytes], form.encoding, part.dtype, room)
            start += form.nbytes

    def expert_pieces(
        self, file: memoryview, expert: ExpertEntry, parts: Sequence[ExpertPart]
    ) -> Iterator[memoryview]:
        """Yield a whole compressed expert piece by piece, padding included; each is valid until the next."""
        assert expert.stored is not None
        start = end = 0
        for form, part in zip(expert.stored.parts, parts, strict=True):
            yield memoryview(bytes(part.offset - end))
            frames = file[start : start + form.nbytes]
            yield from self.pieces(frames, form.encoding, part.dtype, part.nbytes)
            start, end = start + form.nbytes, part.offset + part.nbytes
        yield memoryview(bytes(expert.nbytes - end))

    def restore(self, stored: memoryview, encoding: str, dtype: str, target: memoryview) -> None:
        """Fill target with a whole tensor."""
        whole = np.frombuffer(target, np.uint8)
        targets = (whole[start : start + PIECE_NBYTES] for start in range(0, len(whole), PIECE_NBYTES))
        for _ in self._fill(stored, encoding, dtype, targets):
            pass

    def pieces(self, stored: memoryview, encoding: str, dtype: str, nbytes: int) -> Iterator[memoryview]:
        """Yield a tensor of nbytes piece by piece; each is valid until the next."""
        piece = np.empty(min(nbytes, PIECE_NBYTES), np.uint8)
        targets = (piece[: nbytes - start] for start in range(0, nbytes, PIECE_NBYTES))
        for filled in self._fill(stored, encoding, dtype, targets):
            yield filled.data

    def _fill(
        self, stored: memoryview, encoding: str, dtype: str, targets: Iterable[NDArray[np.uint8]]
    ) -> Iterator[NDArray[np.uint8]]:
        """Yield each target, one for each piece of the tensor in order, when its bytes are there."""
        if encoding == RAW_ENCODING:
            start = 0
            for target in targets:
                target[:] = np.frombuffer(stored[start : start + len(target)], np.uint8)
                start += len(target)
                yield target
            return
        planes = num_planes(dtype)
        try:
            with self._zstd.stream_reader(stored, read_across_frames=True) as frames:
                for target in targets:
                    split = target if planes == 1 else self._scratch[: len(target)]
                    if frames.readinto(split) != len(split):
                        raise PackError("a compressed tensor ends too early")
                    if planes > 1:
                        _join_planes(split.reshape(planes, -1), target)
                    yield target
                if frames.read(1):
                    raise PackError("a compressed tensor is longer than it should be")
        except zstandard.ZstdError as error:
            raise PackError(f"a compressed tensor is damaged ({error})") from None


def _join_planes(planes: NDArray[np.uint8], target: NDArray[np.uint8]) -> None:
    """Write byte i of every element, planes[i], beside its others; strided copies would take twice as long."""
    words = target.view(f"<u{len(planes)}")
    above: NDArray[np.uint8] | NDArray[np.unsignedinteger] = planes[-1]
    for plane in planes[-2::-1]:
        np.left_shift(above, 8, out=words, dtype=words.dtype)
        np.bitwise_or(words, plane, out=words, dtype=words.dtype)
        above = words

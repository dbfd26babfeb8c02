"""Padded digest: the SHA-256 of pieces that lie apart, with zeros between and after them."""

from __future__ import annotations

import hashlib


class PaddedDigest:
    """Hashes a range of bytes of which only the pieces that are not padding are at hand, in their order."""

    __slots__ = ("_end", "_sha256")

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256()
        self._end = 0  # of what is hashed

    def add(self, offset: int, piece: memoryview) -> None:
        """Hash the zeros up to offset, then a piece that begins there."""
        self._pad(offset)
        self._sha256.update(piece)
        self._end = offset + piece.nbytes

    def finish(self, nbytes: int) -> str:
        """Return the SHA-256 of the whole range."""
        self._pad(nbytes)
        return self._sha256.hexdigest()

    def _pad(self, offset: int) -> None:
        self._sha256.update(bytes(offset - self._end))
        self._end = offset

"""Journal: which bytes of the source a conversion has put into its pack, so that an interrupted one can go on.

One line for each batch of source bytes, written when all of them are in the pack's files, with the SHA-256 of the
source file up to the batch's end. A resumed conversion takes such a batch from the pack instead of the source; that
it is the right one, and that everything before it was, is what the hash says, and hashing the source file goes on from
there. A crash may lose or tear lines: what is not in here is read from the source again.

Of a tensor that is quantized the pack does not have the source's bytes: a line before the batch's has the SHA-256 of
what became of each piece, and its error, so that it is read from the source once more and not quantized once more.
"""

from __future__ import annotations

import os
import re
import stat
from typing import TYPE_CHECKING, Self

from lmpack.drive import storage_errors
from lmpack.errors import UsageError
from lmpack.manifest import MANIFEST_FILE

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

_HEADER = "lmpack journal 1, layout "
_LINE = re.compile(
    r"(?:file (\d{1,9}) (\S+)|batch (\d{1,9}) (\d{1,18}) (\d{1,18}) ([0-9a-f]{64})"
    r"|converted (\d{1,9}) (\d{1,18}) ([0-9a-f]{64}) (\d{1,20}\.?\d{0,20}(?:e[+-]\d{1,3})?))\n",
    re.ASCII,
)
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
_LONGEST_LINE = 1024  # bytes

Batches = dict[tuple[int, int], str]  # (offset, nbytes) in a source file -> SHA-256 of the file up to there
Converted = dict[int, tuple[str, float]]  # a piece's offset in it -> its new bytes' SHA-256, relative error


class Journal:
    """The journal of one conversion; notes may come from any thread."""

    def __init__(self, path: Path, layout_id: str) -> None:
        """Open or begin the journal at path.

        Raises UsageError when it is about a pack with another layout, or when there is none beside files that some
        other command must have left.
        """
        self._path = path
        self._files: dict[int, tuple[str, Batches, Converted]] = {}
        with storage_errors(path):
            found = os.listdir(path.parent)
            if found and path.name not in found and MANIFEST_FILE not in found:
                raise UsageError(
                    f"{path.parent}: no conversion left it, for there is no journal in it; delete it, then run it again"
                )
            if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
                raise UsageError(f"{path}: not a regular file; delete {path.parent}, then run it again")
            self._descriptor = os.open(path, _FLAGS, 0o666)
            try:
                self._read(layout_id)
            except BaseException:
                os.close(self._descriptor)
                raise

    def __enter__(self) -> Self:
        """Return the journal itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def begin_file(self, number: int, identity: str) -> tuple[Batches, Converted]:
        """Return what is noted of a source file; nothing when it had another identity (one word) then."""
        known, batches, converted = self._files.get(number, ("", {}, {}))
        if known == identity:
            return batches, converted
        self._append(f"file {number} {identity}\n")
        return {}, {}

    def note(self, number: int, offset: int, nbytes: int, sha256: str) -> None:
        """Note that these bytes of a source file are in the pack."""
        self._append(f"batch {number} {offset} {nbytes} {sha256}\n")

    def note_converted(self, number: int, offset: int, sha256: str, relative_error: float) -> None:
        """Note what became of the piece at offset; it counts once the batch that it lies in is noted."""
        self._append(f"converted {number} {offset} {sha256} {relative_error:.17g}\n")

    def _append(self, line: str) -> None:
        with storage_errors(self._path):
            os.write(self._descriptor, line.encode("ascii"))

    def _read(self, layout_id: str) -> None:
        wanted = f"{_HEADER}{layout_id}\n"
        with open(
            self._descriptor, encoding="ascii", errors="replace", newline="\n", closefd=False
        ) as opened:
            header = opened.readline(_LONGEST_LINE)
            if header.endswith("\n") and header != wanted:
                raise UsageError(
                    f"{self._path.parent}: was begun from another source or with other settings; go on with "
                    "the same ones, or delete it"
                )
            valid_nbytes = len(header) if header == wanted else 0
            while valid_nbytes and (found := _LINE.fullmatch(line := opened.readline(_LONGEST_LINE))):
                self._take(found)
                valid_nbytes += len(line)
        os.ftruncate(self._descriptor, valid_nbytes)  # what follows is torn
        if not valid_nbytes:
            self._append(wanted)

    def _take(self, line: re.Match[str]) -> None:
        file, identity, number, offset, nbytes, sha256, piece_of, piece_offset, piece_sha256, error = (
            line.groups()
        )
        if file is not None:
            self._files[int(file)] = (identity, {}, {})
        elif number is not None and int(number) in self._files:
            self._files[int(number)][1][int(offset), int(nbytes)] = sha256
        elif piece_of is not None and int(piece_of) in self._files:
            self._files[int(piece_of)][2][int(piece_offset)] = (piece_sha256, float(error))

"""The source reader: any range of a file, cached or not, and an error when the file is not what it was."""

from __future__ import annotations

import mmap
import os
import random
from typing import TYPE_CHECKING

import pytest

from converters.checkpoint import CheckpointFile
from converters.source_reader import SLACK_NBYTES, SourceReader
from lmpack.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

NBYTES = 300_001
DATA = random.Random(7).randbytes(NBYTES)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(DATA)
    return path


@pytest.mark.parametrize("is_cold", [False, True])
def test_every_range_is_read_exactly(path: Path, is_cold: bool) -> None:
    if is_cold:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    buffer = memoryview(mmap.mmap(-1, NBYTES + SLACK_NBYTES))
    with SourceReader(CheckpointFile.of(path, "source")) as reader:
        for offset, nbytes in [
            (0, NBYTES),
            (0, 1),
            (4096, 4096),
            (4095, 2),
            (5, 100_000),
            (NBYTES - 1, 1),
            (7, 0),
        ]:
            assert reader.read(buffer, offset, nbytes) == DATA[offset : offset + nbytes]


def test_a_file_that_became_shorter_is_noticed(path: Path) -> None:
    buffer = memoryview(mmap.mmap(-1, NBYTES + SLACK_NBYTES))
    with SourceReader(CheckpointFile.of(path, "source")) as reader:
        os.truncate(path, 200_000)
        with pytest.raises(CheckpointError, match="ends at byte 200000"):
            reader.read(buffer, 0, NBYTES)
        with pytest.raises(CheckpointError, match="changed while"):
            reader.check_unchanged()


def test_a_file_that_changed_since_it_was_looked_at_is_refused(path: Path) -> None:
    file = CheckpointFile.of(path, "source")
    os.utime(path, ns=(1, 1))
    with pytest.raises(CheckpointError, match="changed while"), SourceReader(file):
        pass

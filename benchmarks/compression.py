"""How small --compress makes a model's tensors, and how fast they come back.

    python -m benchmarks.compression MODEL... [--threads 2] [--json]

MODEL is a checkpoint as `lmpack convert` takes it. One row for each dtype: stored size as a share of the tensors' size;
the same if zstd saw the bytes as they lie, without planes; compression in MB/s and decompression in GB/s of tensor
bytes, by all threads together, from memory to memory (the median of five passes). Dtypes that take less than a
hundredth of the model are left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from converters.checkpoint import open_checkpoint
from lmpack.compression import WORTH_PERCENT, compress_piece
from lmpack.decompression import Decompressor
from lmpack.storage import PIECE_NBYTES, RAW_ENCODING, num_planes, zstd_encoding

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST_NBYTES = 1 << 30  # of one dtype: enough to say, and it has to fit in memory
NUM_PASSES = 5


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one dtype of one model."""

    model: str
    dtype: str
    nbytes: int
    stored_share: float
    unsplit_share: float
    compress_mb_per_s: float
    decompress_gb_per_s: float


def tensors_by_dtype(path: Path) -> dict[str, list[bytes]]:
    """Read a checkpoint's tensors, at most MOST_NBYTES of each dtype."""
    checkpoint = open_checkpoint(path)
    found: dict[str, list[bytes]] = defaultdict(list)
    for tensor in checkpoint.tensors:
        if sum(map(len, found[tensor.dtype])) < MOST_NBYTES:
            with checkpoint.files[tensor.file].path.open("rb") as file:
                file.seek(tensor.offset)
                found[tensor.dtype].append(file.read(tensor.nbytes))
    all_nbytes = sum(tensor.nbytes for tensor in checkpoint.tensors)
    return {dtype: tensors for dtype, tensors in found.items() if sum(map(len, tensors)) >= all_nbytes / 100}


def compressed(raw: bytes, planes: int) -> bytes:
    """A whole tensor's frames."""
    pieces = (raw[start : start + PIECE_NBYTES] for start in range(0, len(raw), PIECE_NBYTES))
    return b"".join(compress_piece(memoryview(piece), planes) for piece in pieces)


def kept(stored: bytes, raw: bytes) -> bytes:
    """What the writer keeps: the frames, or the bytes themselves where they save too little."""
    return stored if len(stored) * 100 <= len(raw) * WORTH_PERCENT else raw


def measure(model: str, dtype: str, tensors: Sequence[bytes], num_threads: int) -> Row:
    """Compress and decompress tensors with so many threads."""
    nbytes, planes = sum(map(len, tensors)), num_planes(dtype)
    pool = ThreadPoolExecutor(num_threads)
    started = time.perf_counter()
    split = list(pool.map(lambda raw: compressed(raw, planes), tensors))
    compress_s = time.perf_counter() - started
    stored = [kept(frames, raw) for frames, raw in zip(split, tensors, strict=True)]
    unsplit = [kept(compressed(raw, 1), raw) for raw in tensors] if planes > 1 else stored
    targets = [bytearray(len(raw)) for raw in tensors]

    def restore_share(first: int) -> None:
        decompressor = Decompressor()
        for number in range(first, len(tensors), num_threads):
            is_raw = len(stored[number]) == len(tensors[number])
            encoding = RAW_ENCODING if is_raw else zstd_encoding(dtype)
            view = memoryview(targets[number])
            decompressor.restore(memoryview(stored[number]), encoding, dtype, view)

    passes = []
    for _ in range(NUM_PASSES):
        started = time.perf_counter()
        list(pool.map(restore_share, range(num_threads)))
        passes.append(time.perf_counter() - started)
    pool.shutdown()
    if [bytes(target) for target in targets] != list(tensors):
        raise SystemExit(f"{model}: {dtype} did not come back as it was")
    return Row(
        model,
        dtype,
        nbytes,
        sum(map(len, stored)) / nbytes,
        sum(map(len, unsplit)) / nbytes,
        nbytes / compress_s / 1e6,
        nbytes / statistics.median(passes) / 1e9,
    )


def main() -> None:
    """Print a row for each model, dtype and level."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = [
        measure(path.name, dtype, tensors, arguments.threads)
        for path in arguments.models
        for dtype, tensors in tensors_by_dtype(path).items()
    ]
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    print(f"{arguments.threads} threads")
    print(f"{'model':24}{'dtype':>7}{'MB':>8}{'stored':>9}{'unsplit':>9}{'MB/s in':>9}{'GB/s out':>10}")
    for row in rows:
        print(
            f"{row.model:24.24}{row.dtype:>7}{row.nbytes / 1e6:8.1f}{row.stored_share:9.1%}"
            f"{row.unsplit_share:9.1%}{row.compress_mb_per_s:9.0f}{row.decompress_gb_per_s:10.2f}"
        )


if __name__ == "__main__":
    main()

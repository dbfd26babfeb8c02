"""Measure conversion against `cp -r` of the same bytes with `sha256sum` of the source beside it.

    python benchmarks/convert.py qwen3moe-8g.gguf --work /path/on/the/same/drive

Source pages are dropped from the page cache before each copy, and both copies are timed until they are on the drive
(`sync`). The yardstick runs `cp` and `sha256sum` at the same time, as two processes, and ends with the later one; `cp`
alone and hashing at this machine's SHA-256 speed are printed too. Peak memory is the converting process's. Needs room
for one copy at a time; everything is deleted at the end.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

SHA256_PIECE_NBYTES = 8 << 20
SHA256_NUM_PIECES = 100
TARGET_RATIO = 0.85
TARGET_RSS_NBYTES = 400_000_000


@dataclass(frozen=True, slots=True)
class Copy:
    """How long `cp -r` beside `sha256sum` took: the copy, the hash, and all of it with the flush to the drive."""

    copied_s: float
    hashed_s: float
    synced_s: float


@dataclass(frozen=True, slots=True)
class Conversion:
    """How long `lmpack convert` took as a process, and its peak resident memory."""

    seconds: float
    rss_nbytes: int


def main() -> None:
    """Parse the flags, measure, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="a GGUF file or a folder")
    parser.add_argument("--work", type=Path, required=True, help="an existing folder for the copies")
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--repeat", type=int, default=1)
    arguments = parser.parse_args()
    nbytes = sum(path.stat().st_size for path in files_of(arguments.source))
    sha256_speed = measure_sha256()
    copies, conversions = [], []
    for _ in range(arguments.repeat):  # interleaved, so that a busy minute hits both
        copies.append(measure_copy(arguments.source, arguments.work / "cp-copy"))
        conversions.append(measure_convert(arguments.source, arguments.work / "bench.lmpack", arguments.jobs))
    copy = min(copies, key=lambda one: one.synced_s)
    conversion = min(conversions, key=lambda one: one.seconds)
    print_table(nbytes, sha256_speed, copy, conversion)


def print_table(nbytes: int, sha256_speed: float, copy: Copy, conversion: Conversion) -> None:
    """Print what was measured, and the ratio to the target."""
    hash_s = nbytes / sha256_speed
    rows = [
        ("cp -r", copy.copied_s),
        ("sha256sum beside it", copy.hashed_s),
        ("both, on the drive", copy.synced_s),
        ("sha256 at its speed", hash_s),
        ("lmpack convert, on the drive", conversion.seconds),
    ]
    print(f"{nbytes / 1e9:.2f} GB")
    for name, seconds in rows:
        print(f"{name:<30}{seconds:>8.2f} s{nbytes / 1e6 / seconds:>8.0f} MB/s")
    ratio = copy.synced_s / conversion.seconds
    print(f"throughput / (cp -r and sha256sum in parallel): {ratio:.2f} (target {TARGET_RATIO:.2f})")
    rss = conversion.rss_nbytes
    print(f"peak memory {rss / 1e6:.0f} MB (target {TARGET_RSS_NBYTES / 1e6:.0f} MB)")


def files_of(source: Path) -> list[Path]:
    """Return the file itself, or all files of a folder."""
    return [path for path in sorted(source.rglob("*")) if path.is_file()] if source.is_dir() else [source]


def measure_sha256() -> float:
    """Return bytes per second of one thread hashing in memory: the best of many pieces.

    The best is the machine's speed; a mean would count the moments in which another process had the core, and every
    second lost there makes the conversion look better than it is.
    """
    piece, best_s = os.urandom(SHA256_PIECE_NBYTES), float("inf")
    for _ in range(SHA256_NUM_PIECES):
        started = time.perf_counter()
        hashlib.sha256(piece)
        best_s = min(best_s, time.perf_counter() - started)
    return len(piece) / best_s


def measure_copy(source: Path, destination: Path) -> Copy:
    """Time `cp -r` and `sha256sum` of the same files at the same time, then the flush."""
    forget(source)
    started = time.perf_counter()
    hashing = subprocess.Popen(["sha256sum", *map(os.fspath, files_of(source))], stdout=subprocess.DEVNULL)
    subprocess.run(["cp", "-r", os.fspath(source), os.fspath(destination)], check=True)
    copied_s = time.perf_counter() - started
    if hashing.wait() != 0:
        sys.exit("sha256sum failed")
    hashed_s = time.perf_counter() - started
    subprocess.run(["sync", "-f", os.fspath(destination)], check=True)
    synced_s = time.perf_counter() - started
    remove(destination)
    return Copy(copied_s, hashed_s, synced_s)


def measure_convert(source: Path, destination: Path, jobs: int | None) -> Conversion:
    """Time `lmpack convert` as a process of its own, start of the interpreter included."""
    forget(source)
    command = [sys.executable, "-m", "lmpack", "convert", os.fspath(source), os.fspath(destination), "--json"]
    command += ["--jobs", str(jobs)] if jobs else []
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        report = json.load(process.stdout)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
    print(
        f"converted in {report['seconds']:.2f} s, user {usage.ru_utime:.1f} s, system {usage.ru_stime:.1f} s"
    )
    remove(destination)
    return Conversion(seconds, usage.ru_maxrss * 1024)


def forget(source: Path) -> None:
    """Drop a source's pages from the page cache, as far as the system lets a user do that."""
    for path in files_of(source):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def remove(path: Path) -> None:
    """Delete a file or a folder and wait until the drive is quiet again."""
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    os.sync()


if __name__ == "__main__":
    main()

"""Kill conversions at random moments and resume them: python -m tests.kill_conversions SRC WORK [--kills N].

Every conversion runs in a process of its own. Half of the kills come at the n-th file operation (opening, renaming,
deleting, cutting a file), so that every step has its turn; the other half when a timer runs out. Prints one JSON
document; tests/test_resume.py reads it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from converters import conversion
from converters.conversion import convert
from lmpack.validation import validate
from tests.round_trip import files_below

if TYPE_CHECKING:
    from collections.abc import Callable

    from converters.conversion import ConversionReport

BATCH_NBYTES = 1000
OPERATIONS = {"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate"}
_BATCH = re.compile(rb"batch \d+ \d+ (\d+) [0-9a-f]{64}\n")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one conversion did, as the kernel counts it."""

    pack_id: str
    resumed_nbytes: int
    read_nbytes: int  # of all files, this process's from before the conversion to its end
    written_nbytes: int
    operations: int
    seconds: float


def main() -> None:
    """Convert once whole, then kill and resume."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--batch-nbytes", type=int, default=BATCH_NBYTES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compress", action="store_true")
    arguments = parser.parse_args()
    setattr(conversion, "BUFFER_NBYTES", arguments.batch_nbytes)  # noqa: B010 (it is not ours to export)
    arguments.work.mkdir()
    convert_to = partial(convert, compress=arguments.compress)
    rng = random.Random(arguments.seed)
    print(json.dumps(run(arguments.source, arguments.work, arguments.kills, rng, convert_to)))


def run(
    src: Path, work: Path, kills: int, rng: random.Random, convert_to: Callable[..., ConversionReport]
) -> dict[str, object]:
    """Return what interrupted conversions came to, next to one that was not."""
    converted = partial(converted_in_a_child, convert_to)
    whole, dst = work / "whole.lmpack", work / "killed.lmpack"
    first = converted(src, whole)
    assert first is not None
    source_nbytes = sum(path.stat().st_size for path in ([src] if src.is_file() else src.iterdir()))
    wanted = files_below(whole)
    outcomes, different, repeated = [], 0, []
    num_kills = num_resumed = 0
    while num_kills < kills:
        if converted(src, dst, kill=moment(rng, num_kills, first)) is None:
            num_kills += 1
            if (
                num_kills < kills and rng.random() < 0.3 and not dst.exists()
            ):  # once more, while it is resumed
                num_kills += converted(src, dst, resume=True, kill=moment(rng, num_kills, first)) is None
            if not dst.exists():
                noted = journaled(dst.with_name("killed.lmpack.partial"))
                outcome = converted(src, dst, resume=True)
                assert outcome is not None
                outcomes.append(outcome)
                num_resumed += outcome.resumed_nbytes > 0
                if noted is not None:
                    repeated.append(noted - outcome.resumed_nbytes)
        different += files_below(dst) != wanted or not validate(dst).ok or len(os.listdir(work)) != 2
        shutil.rmtree(dst)
    return {
        "kills": num_kills,
        "whole": asdict(first),
        "pack_ids": sorted({first.pack_id, *(outcome.pack_id for outcome in outcomes)}),
        "different_packs": different,
        "num_resumed": num_resumed,
        "repeated_nbytes": max(repeated),
        "most_read_nbytes": max(outcome.read_nbytes for outcome in outcomes),
        "most_written_or_resumed_nbytes": max(o.written_nbytes + o.resumed_nbytes for o in outcomes),
        "source_nbytes": source_nbytes,
        "pack_nbytes": sum(map(len, wanted.values())),
    }


def moment(rng: random.Random, number: int, whole: Outcome) -> Callable[[], None]:
    """Choose when the next conversion dies, and return what arranges it."""
    if number % 2:
        seconds = rng.uniform(0, whole.seconds)
        return lambda: after_seconds(seconds)
    operation = rng.randrange(whole.operations)
    return lambda: after_operations(operation)


def after_seconds(seconds: float) -> None:
    """Let a timer end this process; the kernel does it, as with SIGKILL, without asking Python."""
    signal.setitimer(signal.ITIMER_REAL, seconds)


def after_operations(number: int) -> None:
    """Kill this process at its file operation of that number."""
    count = 0

    def count_operation(event: str, _: tuple[object, ...]) -> None:
        nonlocal count
        if event in OPERATIONS:
            count += 1
            if count > number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count_operation)


def converted_in_a_child(
    convert_to: Callable[..., ConversionReport],
    src: Path,
    dst: Path,
    *,
    resume: bool = False,
    kill: Callable[[], None] | None = None,
) -> Outcome | None:
    """Convert in a new process; None when it was killed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        convert_and_exit(partial(convert_to, src, dst, resume=resume), kill, writer)
    os.close(writer)
    with open(reader, "rb") as answer:
        raw = answer.read()
    _, status = os.waitpid(child, 0)
    if kill is not None and os.WIFSIGNALED(status):
        return None
    if status != 0:
        raise SystemExit(f"the conversion ended with status {status}")
    return Outcome(**json.loads(raw))


def convert_and_exit(
    convert_it: Callable[[], ConversionReport], kill: Callable[[], None] | None, answer: int
) -> NoReturn:
    """Convert and report what it came to."""
    code = 1
    try:
        operations = [0]
        if kill is None:
            sys.addaudithook(lambda event, _: operations.append(1) if event in OPERATIONS else None)
        else:
            kill()
        started, before = time.perf_counter(), io_nbytes()
        report = convert_it()
        read_nbytes, written_nbytes = (
            after - first for after, first in zip(io_nbytes(), before, strict=True)
        )
        outcome = Outcome(
            report.pack_id,
            report.resumed_nbytes,
            read_nbytes,
            written_nbytes,
            len(operations) - 1,
            time.perf_counter() - started,
        )
        os.write(answer, json.dumps(asdict(outcome)).encode())
        code = 0
    finally:
        sys.stderr.flush()
        os._exit(code)


def io_nbytes() -> tuple[int, int]:
    """What this process has read and written so far, by the kernel's count."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text("ascii").splitlines())
    return int(counts["rchar"]), int(counts["wchar"])


def journaled(partial: Path) -> int | None:
    """The source bytes that an interrupted conversion has noted as packed; None when its pack is whole."""
    if (partial / "manifest.json").exists():
        return None
    journal = partial / "journal"
    return sum(map(int, _BATCH.findall(journal.read_bytes()))) if journal.exists() else 0


if __name__ == "__main__":
    main()

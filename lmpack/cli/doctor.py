"""lmpack doctor: what this machine offers to a model that does not fit in memory.

The document of --json:

    path                 what was given
    processors           how many this process may use
    free_memory_nbytes   what this process may have, cgroup limits included; a run without --ram takes 90 % of it
    max_map_count        vm.max_map_count: experts and holes that can be mapped
    max_open_files       ulimit -n
    device               the drive, as it is remembered
    reads[]              request_nbytes, in_flight, direct, gigabytes_per_s (null: O_DIRECT is refused)
    io                   store, num_readers, reason: what --io auto does in a run without other options; null for a
                         folder, for a dense model, and where such a run is refused
    refusal              why it is refused; null where it is not
    remembered_in        the file that keeps what --io auto measured; null for a user without a home
"""

from __future__ import annotations

import os
import resource
import tempfile
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lmpack.byte_size import format_nbytes
from lmpack.cli.path_argument import ExistingPath
from lmpack.cli.report import one_line, print_json
from lmpack.drive import check_space, storage_errors
from lmpack.errors import BudgetError, ManifestError, StorageError, UnsupportedError
from lmpack.manifest import MANIFEST_FILE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from lmpack.pack import Pack
    from runtime.drive_speed import ReadRate
    from runtime.io_choice import IoChoice

_PAGE_NBYTES = 4096
_EXPERT_NBYTES = 2 << 20  # where there is no pack to ask
_LARGE_NBYTES = 8 << 20
_IN_FLIGHT = (1, 8)
_LIMIT_S = 0.3  # of each of the twelve measurements
_ENOUGH_NBYTES = 256 << 20  # to read at random for so long
_SCRATCH_NBYTES = 512 << 20


@click.command(
    epilog="""Examples:

\b
  lmpack doctor qwen3.lmpack
  lmpack doctor /mnt/nvme
  lmpack doctor qwen3.lmpack --json
"""
)
@click.argument("path", metavar="PACK_OR_FOLDER", type=ExistingPath(file_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def command(path: Path, as_json: bool) -> None:
    """Measure the drive that PACK_OR_FOLDER is on, and say what a run would do with it.

    Reads of 4 KiB, of one expert and of 8 MiB, one and eight at a time, past the page cache and through it. Where
    the files there are too few or too small, a file of 512 MiB is written beside them and removed afterwards.
    For a pack that does not fit, the choice of --io auto is measured anew and remembered.
    """
    from lmpack.pack import Pack
    from runtime.drive_memory import device_name
    from runtime.free_memory import free_memory_nbytes

    pack = Pack.open(path) if (path / MANIFEST_FILE).exists() else None
    reads = _measure(path, pack)
    choice: IoChoice | None = None
    refusal: str | None = None
    if pack is not None and pack.manifest.layers:
        try:
            choice = _choice(pack)
        except (BudgetError, ManifestError, UnsupportedError) as error:
            refusal = str(error)
    max_map_count = int(Path("/proc/sys/vm/max_map_count").read_text(encoding="ascii"))
    document = {
        "path": str(path),
        "processors": len(os.sched_getaffinity(0)),
        "free_memory_nbytes": free_memory_nbytes(),
        "max_map_count": max_map_count,
        "max_open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "device": device_name(path),
        "reads": [asdict(rate) for rate in reads],
        "io": asdict(choice) if choice is not None else None,
        "refusal": refusal,
        "remembered_in": _remembered_in(),
    }
    if as_json:
        print_json(document)
        return
    click.echo(f"processors  {document['processors']}")
    click.echo(f"memory      {format_nbytes(free_memory_nbytes())} free for this process")
    click.echo(f"limits      {max_map_count} mappings, {document['max_open_files']} open files")
    click.echo(f"drive       {document['device']}")
    click.echo(_table(reads))
    if choice is not None:
        click.echo(f"--io auto   {choice.store}, {choice.num_readers} reads in flight ({choice.reason})")
    if refusal is not None:
        click.echo(f"lmpack run  is refused: {one_line(refusal)}")


def _remembered_in() -> str | None:
    from runtime.drive_memory import drive_memory_file

    try:
        return str(drive_memory_file())
    except StorageError:  # the choice's reason says it
        return None


def _measure(path: Path, pack: Pack | None) -> list[ReadRate]:
    from runtime.drive_speed import measure_reads

    expert_nbytes = max((entry.stride for entry in pack.manifest.layers), default=0) if pack else 0
    rates = []
    referenced = pack.reference.paths.values() if pack and pack.reference else ()
    with _files_to_read(path, referenced) as files:
        for request_nbytes in sorted({_PAGE_NBYTES, expert_nbytes or _EXPERT_NBYTES, _LARGE_NBYTES}):
            long_enough = [file for file, nbytes in files.items() if nbytes >= request_nbytes]
            for seed, in_flight in enumerate(_IN_FLIGHT):
                for direct in (True, False):
                    rates.append(
                        measure_reads(
                            long_enough,
                            request_nbytes,
                            in_flight=in_flight,
                            direct=direct,
                            limit_s=_LIMIT_S,
                            seed=2 * seed + direct,
                        )
                    )
    return rates


@contextmanager
def _files_to_read(path: Path, referenced: Iterable[Path]) -> Iterator[dict[Path, int]]:
    """Files below path with their sizes, and one of our own when they hold too few large requests."""
    paths = [Path(folder, name) for folder, _, names in os.walk(path) for name in names]
    paths += referenced
    files = {file: file.stat().st_size for file in paths if file.is_file() and not file.is_symlink()}
    if sum(nbytes for nbytes in files.values() if nbytes >= _LARGE_NBYTES) >= _ENOUGH_NBYTES:
        yield files
        return
    # beside a pack, not in it: a pack must hold nothing but what its manifest names
    folder = path.absolute().parent if (path / MANIFEST_FILE).exists() else path
    check_space(folder, _SCRATCH_NBYTES, 1)
    with storage_errors(folder), tempfile.NamedTemporaryFile(dir=folder, prefix=".lmpack-doctor-") as scratch:
        for _ in range(_SCRATCH_NBYTES // _LARGE_NBYTES):
            scratch.write(os.urandom(_LARGE_NBYTES))
        scratch.flush()
        os.fsync(scratch.fileno())
        yield {Path(scratch.name): _SCRATCH_NBYTES}


def _choice(pack: Pack) -> IoChoice:
    """What a run without options does; raises BudgetError, ManifestError and UnsupportedError as it does."""
    from runtime.io_choice import choose_io
    from runtime.run_plan import RunPlan

    return choose_io("auto", pack, RunPlan.make(pack).tiers.compute, anew=True)


def _table(rates: Sequence[ReadRate]) -> str:
    lines = ["request     in flight    direct  buffered   GB/s"]
    cells = {(rate.request_nbytes, rate.in_flight, rate.direct): rate.gigabytes_per_s for rate in rates}
    for request_nbytes, in_flight in sorted({(rate.request_nbytes, rate.in_flight) for rate in rates}):
        direct, buffered = (cells[request_nbytes, in_flight, way] for way in (True, False))
        lines.append(
            f"{format_nbytes(request_nbytes):>10}  {in_flight:9}  {_cell(direct):>8}  {_cell(buffered):>8}"
        )
    return "\n".join(lines)


def _cell(rate: float | None) -> str:
    return "refused" if rate is None else f"{rate:.3f}"

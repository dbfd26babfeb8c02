"""lmpack validate: is this pack, byte for byte, what its manifest says?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lmpack.byte_size import format_nbytes
from lmpack.cli.hub_options import ModelPathOrRepo, hub_client
from lmpack.cli.path_argument import ModelPath, PackPath
from lmpack.cli.progress import progress_bar
from lmpack.cli.report import one_line, print_json
from lmpack.cli.text_input import Word
from lmpack.errors import ManifestError, UsageError
from lmpack.jobs import MAX_JOBS
from lmpack.manifest import SHARED_FILE
from lmpack.pack import Pack, read_manifest
from lmpack.pack_files import found_files
from lmpack.plural import counted
from lmpack.reference_check import referenced_nbytes
from lmpack.validation import Problem, ValidationReport, validate

if TYPE_CHECKING:
    from converters.byte_origin import ByteOrigin
    from converters.repair import RepairReport


@click.command(
    epilog="""Examples:

\b
  lmpack validate qwen3.lmpack
  lmpack validate qwen3.lmpack --quick
  lmpack validate qwen3.lmpack --jobs 4 --json
  lmpack validate qwen3.lmpack --source qwen3-Q4_K_M.gguf
  lmpack validate qwen3.lmpack --repair qwen3-Q4_K_M.gguf
  lmpack validate qwen3.lmpack --repair /mnt/backup/qwen3.lmpack
  lmpack validate qwen3.lmpack --repair unsloth/Qwen3-30B-A3B-GGUF:Q4_K_M --revision main
  lmpack validate qwen3-iq2.lmpack --repair qwen3-BF16.gguf --imatrix imatrix.gguf
"""
)
@click.argument("pack", type=PackPath())
@click.option("--quick", is_flag=True, help="Check names and sizes only; read nothing but the manifest.")
@click.option("--source", type=ModelPath(), help="Compare every byte with this checkpoint, too.")
@click.option(
    "--repair",
    "origin",
    type=ModelPathOrRepo(),
    help="Replace bad files from the checkpoint or another copy of the pack, here or in a Hugging Face repository.",
)
@click.option(
    "--revision",
    type=Word(),
    help="A branch, tag or commit of the repository to repair from [default: main].",
)
@click.option(
    "--imatrix",
    type=ModelPath(),
    help="The importance matrix that the pack was quantized with, to repair it from the checkpoint.",
)
@click.option(
    "--jobs", type=click.IntRange(1, MAX_JOBS), help="Files read at once [default: one per core, up to 16]."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def command(
    pack: str,
    quick: bool,
    source: str | None,
    origin: str | None,
    revision: str | None,
    imatrix: str | None,
    jobs: int | None,
    as_json: bool,
) -> None:
    """Check every file of PACK against its manifest.

    Names each file that is damaged, truncated, missing, swapped or not in the manifest, with the layer and
    expert it holds. Exit code 1 when there is one. With --repair each bad file, and no other, is replaced once its
    bytes from elsewhere have the right checksum; then the pack is checked again.
    """
    if quick and (source or origin):
        raise UsageError("--quick reads no bytes; leave it out to compare or repair them")
    if imatrix is not None and origin is None:
        raise UsageError("--imatrix: is for --repair, which was not given")
    if revision is not None and (origin is None or not ModelPathOrRepo.is_repo(origin)):
        raise UsageError("--revision: is for --repair with the name of a repository, which was not given")
    report = _validated(pack, quick, jobs)
    repaired: tuple[str, ...] = ()
    failed: tuple[Problem, ...] = ()
    if origin is not None and not report.ok:
        done = _repaired(pack, origin, revision, imatrix, report, jobs)
        repaired, failed, report = done.repaired, done.failed, done.validation
    if source is not None and report.ok:
        report = _compared(pack, source, report, jobs)
    if as_json:
        document = _document(pack, quick, report)
        if origin is not None:
            document |= {
                "repaired": list(repaired),
                "not_repaired": [_problem(problem) for problem in failed],
            }
        print_json(document)
    else:
        for file in repaired:
            click.echo(one_line(f"repaired {file}"))
        for problem in failed:
            click.echo(one_line(f"not repaired: {problem}"))
        for problem in report.problems:
            click.echo(one_line(str(problem)))
        click.echo(one_line(f"{pack}: {_summary(quick, report)}"))
    if not report.ok:
        click.get_current_context().exit(1)


def _repaired(
    pack: str,
    origin: str,
    revision: str | None,
    imatrix: str | None,
    before: ValidationReport,
    jobs: int | None,
) -> RepairReport:
    from converters.importance_matrix import ImportanceMatrix
    from converters.repair import repair

    matrix = ImportanceMatrix.read(imatrix) if imatrix is not None else None
    with progress_bar(before.nbytes, description="repair and validate") as progress:
        bytes_from = _origin(pack, origin, revision)
        return repair(pack, bytes_from, before.problems, imatrix=matrix, jobs=jobs, progress=progress)


def _validated(pack: str, quick: bool, jobs: int | None) -> ValidationReport:
    is_read = not quick and Path(pack).is_dir()
    found = found_files(Path(pack)) if is_read else {}
    total = sum(max(0, nbytes) for nbytes in found.values())
    if is_read and SHARED_FILE not in found:
        total += _referenced_nbytes(pack)
    with progress_bar(total, description="validate") as progress:
        return validate(pack, quick=quick, jobs=jobs, progress=progress)


def _referenced_nbytes(pack: str) -> int:
    try:
        manifest = read_manifest(Path(pack))
    except ManifestError:
        return 0
    return referenced_nbytes(manifest) if manifest.is_reference else 0


def _origin(pack: str, path: str, revision: str | None = None) -> ByteOrigin:
    try:
        source = read_manifest(Path(pack)).source
    except ManifestError:
        source = None
    if not ModelPathOrRepo.is_repo(path):
        from converters.byte_origin import open_local_origin

        return open_local_origin(Path(path), source)
    from converters.hub_origin import open_hub_origin

    return open_hub_origin(hub_client(), path, source, revision)


def _compared(pack: str, path: str, report: ValidationReport, jobs: int | None) -> ValidationReport:
    """Return the report of a good pack with what its source has otherwise."""
    from converters.source_comparison import compare_with_source

    opened, origin = Pack.open(pack), _origin(pack, path)
    total = sum(file.nbytes for file in opened.manifest.source.files)
    with progress_bar(total, description="compare") as progress:
        return replace(report, problems=compare_with_source(opened, origin, jobs=jobs, progress=progress))


def _summary(quick: bool, report: ValidationReport) -> str:
    checked = "names and sizes" if quick else format_nbytes(report.nbytes)
    if not report.ok:
        bad = len({problem.file for problem in report.problems})
        return f"{counted(bad, 'bad file')} of {report.num_files} ({checked} checked)"
    speed = "" if quick else f", {format_nbytes(round(report.nbytes / max(report.seconds, 1e-9)))}/s"
    return f"good, {counted(report.num_files, 'file')}, {checked} checked in {report.seconds:.2f} s{speed}"


def _document(pack: str, quick: bool, report: ValidationReport) -> dict[str, object]:
    return {
        "pack": pack,
        "ok": report.ok,
        "quick": quick,
        "num_files": report.num_files,
        "nbytes": report.nbytes,
        "seconds": round(report.seconds, 3),
        "problems": [_problem(problem) for problem in report.problems],
    }


def _problem(problem: Problem) -> dict[str, object]:
    return {
        "file": problem.file,
        "layer": problem.key.layer if problem.key else None,
        "expert": problem.key.expert if problem.key else None,
        "message": problem.message,
    }

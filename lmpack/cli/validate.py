"""lmpack validate: is this pack, byte for byte, what its manifest says?"""

from __future__ import annotations

from pathlib import Path

import click

from lmpack.byte_size import format_nbytes
from lmpack.cli.path_argument import PackPath
from lmpack.cli.progress import progress_bar
from lmpack.cli.report import one_line, print_json
from lmpack.pack_files import found_files
from lmpack.plural import counted
from lmpack.validation import MAX_JOBS, ValidationReport, validate


@click.command(
    epilog="""Examples:

\b
  lmpack validate qwen3.lmpack
  lmpack validate qwen3.lmpack --quick
  lmpack validate qwen3.lmpack --jobs 4 --json
"""
)
@click.argument("pack", type=PackPath())
@click.option("--quick", is_flag=True, help="Check names and sizes only; read nothing but the manifest.")
@click.option("--jobs", type=click.IntRange(1, MAX_JOBS), help="Files read at once [default: one per core].")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def command(pack: str, quick: bool, jobs: int | None, as_json: bool) -> None:
    """Check every file of PACK against its manifest.

    Names each file that is damaged, truncated, missing, swapped or not in the manifest, with the layer and
    expert it holds. Exit code 1 when there is one.
    """
    total = 0 if quick else sum(max(0, nbytes) for nbytes in found_files(Path(pack)).values())
    with progress_bar(total, description="validate") as progress:
        report = validate(pack, quick=quick, jobs=jobs, progress=progress)
    if as_json:
        print_json(_document(pack, quick, report))
    else:
        for problem in report.problems:
            click.echo(one_line(str(problem)))
        click.echo(one_line(f"{pack}: {_summary(quick, report)}"))
    if not report.ok:
        click.get_current_context().exit(1)


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
        "problems": [
            {
                "file": problem.file,
                "layer": problem.key.layer if problem.key else None,
                "expert": problem.key.expert if problem.key else None,
                "message": problem.message,
            }
            for problem in report.problems
        ],
    }

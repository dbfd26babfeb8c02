"""lmpack export: the source files of a pack again, byte for byte."""

from __future__ import annotations

import click

from lmpack.byte_size import format_nbytes
from lmpack.cli.path_argument import NewPath, PackPath
from lmpack.cli.progress import progress_bar
from lmpack.cli.report import one_line, print_json, told_when_interrupted
from lmpack.plural import counted


@click.command(
    epilog="""Examples:

\b
  lmpack export qwen3.lmpack restored/
  lmpack export qwen3.lmpack restored/ --json
"""
)
@click.argument("pack", type=PackPath())
@click.argument("dst", type=NewPath(file_okay=False))
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def command(pack: str, dst: str, as_json: bool) -> None:
    """Write the files that PACK was made from into the folder DST.

    Each file's SHA-256 is compared with the source's before it takes its name. Nothing is overwritten.
    """
    from converters.export import export
    from lmpack.pack import Pack

    opened = Pack.open(pack)
    total = sum(file.nbytes for file in opened.manifest.source.files)
    advice = f"what has its name in {dst} is whole"
    with told_when_interrupted(advice), progress_bar(total, description="export") as progress:
        report = export(opened, dst, progress=progress)
    if as_json:
        print_json(
            {
                "pack": pack,
                "folder": str(report.path),
                "files": [
                    {"name": file.name, "nbytes": file.nbytes, "sha256": file.sha256}
                    for file in opened.manifest.source.files
                ],
                "nbytes": report.nbytes,
                "seconds": round(report.seconds, 3),
            }
        )
        return
    for name in report.files:
        click.echo(one_line(str(report.path / name)))
    click.echo(
        f"{counted(len(report.files), 'file')}, {format_nbytes(report.nbytes)} in {report.seconds:.2f} s, hashes as the source's"
    )

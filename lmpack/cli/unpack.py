"""lmpack unpack: a pack of plain files, from a compressed one or from one that refers to its source."""

from __future__ import annotations

import click

from lmpack.byte_size import format_nbytes
from lmpack.cli.path_argument import NewPath, PackPath
from lmpack.cli.progress import progress_bar
from lmpack.cli.report import one_line, print_json, told_when_interrupted


@click.command(
    epilog="""Examples:

\b
  lmpack unpack qwen3-zstd.lmpack qwen3.lmpack
  lmpack unpack qwen3-reference.lmpack qwen3.lmpack --json
"""
)
@click.argument("pack", type=PackPath())
@click.argument("dst", type=NewPath())
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def command(pack: str, dst: str, as_json: bool) -> None:
    """Write PACK, made with --compress or --reference, as the pack DST of plain files.

    DST has the pack id that a conversion without either gives. Every checksum is compared on the way.
    """
    from lmpack.pack import Pack
    from lmpack.pack_files import expected_files
    from lmpack.unpacking import unpack

    opened = Pack.open(pack)
    total = sum(file.nbytes for file in expected_files(opened.manifest.uncompressed()).values())
    advice = "nothing of it is kept"
    with told_when_interrupted(advice), progress_bar(total, description="unpack") as progress:
        report = unpack(opened, dst, progress=progress)
    if as_json:
        print_json(
            {
                "pack": pack,
                "unpacked": str(report.path),
                "pack_id": report.pack_id,
                "compressed_nbytes": report.compressed_nbytes,
                "nbytes": report.nbytes,
                "seconds": round(report.seconds, 3),
            }
        )
        return
    click.echo(
        f"{one_line(str(report.path))}: {format_nbytes(report.nbytes)} from {format_nbytes(report.compressed_nbytes)} "
        f"in {report.seconds:.2f} s"
    )
    click.echo(f"pack id {report.pack_id}")

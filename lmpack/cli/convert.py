"""lmpack convert: a GGUF or safetensors checkpoint becomes a pack."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from lmpack.alignment import DEFAULT_PAGE_SIZE
from lmpack.byte_size import format_nbytes, parse_byte_size
from lmpack.cli.path_argument import ExistingPath, ModelPath, NewPath
from lmpack.cli.progress import progress_bar
from lmpack.cli.report import echo_incomplete, one_line, print_json, told_when_interrupted
from lmpack.cli.text_input import Word
from lmpack.errors import UsageError
from lmpack.jobs import MAX_JOBS
from lmpack.plural import counted

if TYPE_CHECKING:
    from converters.conversion import ConversionReport
    from converters.quantization import Quantization


@click.command(
    epilog="""Examples:

\b
  lmpack convert qwen3-Q4_K_M.gguf qwen3.lmpack
  lmpack convert qwen3-00001-of-00003.gguf qwen3.lmpack --jobs 4
  lmpack convert qwen3-Q4_K_M.gguf qwen3.lmpack --resume
  lmpack convert qwen3-Q4_K_M.gguf qwen3-reference.lmpack --reference
  lmpack convert path/to/hf-folder qwen3-zstd.lmpack --compress zstd
  lmpack convert qwen3-BF16.gguf qwen3-q4.lmpack --quantize 'experts=q4_K,experts:*:down=q6_K,shared=q8_0'
  lmpack convert path/to/hf-folder qwen3.lmpack --page-size 64KiB --json
"""
)
@click.argument("src", type=ModelPath())
@click.argument("dst", type=NewPath())
@click.option(
    "--page-size",
    type=Word(),
    default=str(DEFAULT_PAGE_SIZE),
    show_default=True,
    help="Expert files are multiples of it.",
)
@click.option(
    "--jobs", type=click.IntRange(1, MAX_JOBS), help="Writing threads [default: one per core, 2 to 8]."
)
@click.option("--resume", is_flag=True, help="Go on with what an interrupted conversion to DST has left.")
@click.option(
    "--reference",
    is_flag=True,
    help="Write checksums and no weights: the pack refers to SRC, which has to stay. Reads are slower.",
)
@click.option(
    "--compress",
    type=click.Choice(["zstd"]),
    help="Compress the files, to keep or send the pack; lmpack unpack restores them. "
    "16-bit floats shrink by a third, 4-bit blocks hardly.",
)
@click.option(
    "--quantize",
    type=Word(),
    metavar="[NAMES=]TYPE,...",
    help="Give matrices of F32, F16 or BF16 another type. NAMES is experts, shared, experts:LAYER:ROLE or "
    "shared:NAME, with * and ?; the last rule that fits counts, and TYPE may be keep.",
)
@click.option(
    "--imatrix",
    type=ExistingPath(dir_okay=False),
    help="Importance matrix for --quantize, by llama-imatrix.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def command(
    src: str,
    dst: str,
    page_size: str,
    jobs: int | None,
    resume: bool,
    reference: bool,
    compress: str | None,
    quantize: str | None,
    imatrix: str | None,
    as_json: bool,
) -> None:
    """Convert the checkpoint SRC into the pack DST.

    SRC is a GGUF file, any shard of a split set, a safetensors file, or a folder with one model. Every byte is
    copied as it is, so `lmpack export` gives the files back, unless --quantize asks for other bytes. An interrupted
    conversion leaves DST.partial; with --resume its bytes are checked and kept.
    """
    from converters.checkpoint import open_checkpoint
    from converters.conversion import convert
    from lmpack.partial_folder import PARTIAL_SUFFIX

    quantization = _quantization(quantize, imatrix)
    checkpoint = open_checkpoint(Path(src))
    total = sum(file.nbytes for file in checkpoint.files) * (1 if compress is None else 2)
    advice = f"the same command with --resume goes on from what is in {Path(dst)}{PARTIAL_SUFFIX}"
    if reference:
        advice = "nothing of it is kept"
    with told_when_interrupted(advice), progress_bar(total, description="convert") as progress:
        report = convert(
            checkpoint,
            dst,
            page_size=parse_byte_size(page_size),
            jobs=jobs,
            resume=resume,
            compress=compress is not None,
            quantization=quantization,
            reference=reference,
            progress=progress,
        )
    if as_json:
        print_json({**_document(src, report), "missing": list(checkpoint.missing)})
        return
    echo_incomplete(report.left_out, checkpoint.missing)
    if resume:
        found = f"{format_nbytes(report.resumed_nbytes)} were" if report.resumed_nbytes else "nothing was"
        click.echo(f"resumed: {found} in the pack already, and good for this checkpoint", err=True)
    speed = report.source_nbytes / 1e6 / max(report.seconds, 1e-9)
    click.echo(
        f"{one_line(str(report.path))}: {report.architecture}, {counted(report.num_experts, 'expert')} in {counted(report.num_layers, 'layer')}, "
        f"{format_nbytes(report.source_nbytes)} from {counted(report.num_files, 'file')} in {report.seconds:.2f} s "
        f"({speed:.0f} MB/s)"
    )
    if quantization is not None:
        click.echo(
            f"quantized {report.num_converted} tensors, largest relative error of a row {report.relative_error:.3f}"
        )
    click.echo(f"pack id {report.pack_id}")


def _quantization(rules: str | None, imatrix: str | None) -> Quantization | None:
    """Parse --quantize and read --imatrix; only a conversion that quantizes imports the quantizer."""
    if rules is None:
        if imatrix is not None:
            raise UsageError("--imatrix: is for --quantize, which was not given")
        return None
    from converters.importance_matrix import ImportanceMatrix
    from converters.quantization import Quantization

    return Quantization.parse(rules, ImportanceMatrix.read(imatrix) if imatrix else None)


def _document(src: str, report: ConversionReport) -> dict[str, object]:
    return {
        "source": src,
        "pack": str(report.path),
        "pack_id": report.pack_id,
        "architecture": report.architecture,
        "num_layers": report.num_layers,
        "num_experts": report.num_experts,
        "num_files": report.num_files,
        "nbytes": report.source_nbytes,
        "resumed_nbytes": report.resumed_nbytes,
        "left_out": list(report.left_out),
        "num_converted": report.num_converted,
        "relative_error": report.relative_error,
        "seconds": round(report.seconds, 3),
    }

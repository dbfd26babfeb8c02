"""lmpack pull: a model from a Hugging Face repository becomes a pack on this drive."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from lmpack.alignment import DEFAULT_PAGE_SIZE
from lmpack.byte_size import format_nbytes, parse_byte_size
from lmpack.cli.hub_options import hub_client, revision_option, token_option
from lmpack.cli.path_argument import NewPath
from lmpack.cli.progress import progress_bar
from lmpack.cli.report import echo_incomplete, one_line, print_json, told_when_interrupted
from lmpack.cli.text_input import Word
from lmpack.jobs import MAX_JOBS
from lmpack.plural import counted

if TYPE_CHECKING:
    from converters.hub_model import HubModel
    from converters.hub_pull import PullReport


@click.command(
    epilog="""Examples:

\b
  lmpack pull unsloth/Qwen3-30B-A3B-GGUF:Q4_K_M
  lmpack pull allenai/OLMoE-1B-7B-0924 olmoe.lmpack --discard-source
  lmpack pull someone/olmoe-pack --revision v2 --json
"""
)
@click.argument("repo", metavar="REPO[:NAME]")
@click.argument("dst", type=NewPath(), required=False)
@revision_option
@click.option(
    "--discard-source",
    is_flag=True,
    help="Delete each file of the source once it is in the pack; at most two are on the drive.",
)
@click.option(
    "--cache-dir",
    type=NewPath(file_okay=False),
    help="Where the source is kept [default: the cache of huggingface_hub].",
)
@token_option
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
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def command(
    repo: str,
    dst: str | None,
    revision: str,
    discard_source: bool,
    cache_dir: str | None,
    token: str | None,
    page_size: str,
    jobs: int | None,
    as_json: bool,
) -> None:
    """Make the pack DST from a model of REPO [default: the model's name in this folder].

    REPO holds a ready pack, which is fetched and validated, or a checkpoint, which is converted while it comes.
    When it offers several models, name one after a colon: REPO:Q4_K_M. Run it again after an interruption, and it
    goes on where it stopped.
    """
    from converters.hub_model import choose_model
    from converters.hub_pull import download_folder, pull
    from converters.hub_repo import HubRepo, split_model_name

    repo_id, wanted = split_model_name(repo)
    page_nbytes = parse_byte_size(page_size)
    opened = HubRepo.open(hub_client(token), repo_id, revision)
    model = choose_model(opened, wanted)
    path = Path(dst) if dst is not None else Path(_default_name(repo_id, model))
    advice = f"the same command goes on from what is in {download_folder(path)}"
    with told_when_interrupted(advice), progress_bar(model.nbytes, description="pull") as progress:
        report = pull(
            opened,
            model,
            path,
            discard_source=discard_source,
            cache_folder=Path(cache_dir) if cache_dir else None,
            page_size=page_nbytes,
            jobs=jobs,
            progress=progress,
        )
    if as_json:
        print_json(_document(report))
        return
    echo_incomplete(report.left_out, report.missing)
    click.echo(
        f"{one_line(str(report.path))}: {report.architecture}, {counted(report.num_experts, 'expert')}, "
        f"{format_nbytes(report.nbytes)} of {report.kind} from {report.repo_id} at {report.commit[:12]}, "
        f"{format_nbytes(report.downloaded_nbytes)} downloaded in {report.seconds:.2f} s"
    )
    click.echo(f"pack id {report.pack_id}")


def _default_name(repo_id: str, model: HubModel) -> str:
    name = repo_id.rpartition("/")[2]
    if model.kind == "pack":
        name = model.name
    elif model.kind == "gguf":
        name = name.removesuffix("-GGUF")
        name = name if name.lower().endswith(model.name.lower()) else f"{name}-{model.name}"
    return f"{name}.lmpack"


def _document(report: PullReport) -> dict[str, object]:
    return {
        "pack": str(report.path),
        "repo": report.repo_id,
        "commit": report.commit,
        "kind": report.kind,
        "pack_id": report.pack_id,
        "architecture": report.architecture,
        "num_experts": report.num_experts,
        "nbytes": report.nbytes,
        "downloaded_nbytes": report.downloaded_nbytes,
        "left_out": list(report.left_out),
        "missing": list(report.missing),
        "seconds": round(report.seconds, 3),
    }

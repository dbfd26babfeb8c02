"""lmpack push: a pack goes to a Hugging Face repository, with a model card."""

from __future__ import annotations

from pathlib import Path

import click

from lmpack.byte_size import format_nbytes
from lmpack.cli.hub_options import hub_client, revision_option, token_option
from lmpack.cli.path_argument import PackPath
from lmpack.cli.progress import progress_bar
from lmpack.cli.report import print_json, told_when_interrupted
from lmpack.pack_files import found_files
from lmpack.plural import counted


@click.command(
    epilog="""Examples:

\b
  lmpack push olmoe.lmpack someone/olmoe-pack
  lmpack push olmoe.lmpack someone/olmoe-pack --private --revision q4 --json
"""
)
@click.argument("pack", type=PackPath())
@click.argument("repo")
@click.option(
    "--private", is_flag=True, help="Make a new repository private; one that exists stays as it is."
)
@revision_option
@token_option
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def command(pack: str, repo: str, private: bool, revision: str, token: str | None, as_json: bool) -> None:
    """Upload PACK to the repository REPO, made when there is none.

    The pack is validated first. A README.md is made from its manifest unless REPO has one. Files go by Git LFS, which
    every hub takes, and not by Xet. Run it again after an interruption, and it sends only what is missing.
    """
    from converters.hub_push import push

    total = sum(max(0, nbytes) for nbytes in found_files(Path(pack)).values())
    advice = "the same command sends what is missing"
    with told_when_interrupted(advice), progress_bar(total, description="push") as progress:
        report = push(hub_client(token), pack, repo, private=private, revision=revision, progress=progress)
    if as_json:
        print_json(
            {
                "pack": pack,
                "repo": report.repo_id,
                "url": report.url,
                "commit": report.commit,
                "pack_id": report.pack_id,
                "num_files": report.num_files,
                "nbytes": report.nbytes,
                "new_card": report.has_new_card,
                "seconds": round(report.seconds, 3),
            }
        )
        return
    click.echo(
        f"{report.url}: {counted(report.num_files, 'file')}, {format_nbytes(report.nbytes)} in {report.seconds:.2f} s, "
        f"commit {report.commit[:12]}"
    )
    if not report.has_new_card:
        click.echo("kept the README.md that was there", err=True)
    click.echo(f"pack id {report.pack_id}")

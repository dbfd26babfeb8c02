"""lmpack merge: routing profiles of one model become one.

Keys of `--json`:
    profile             the file written
    merged[]            the files whose choices it adds up
    num_tokens          tokens of all of them;
    num_prompt_tokens     of these the prompts', the others were generated
"""

from __future__ import annotations

from pathlib import Path

import click

from lmpack.byte_size import format_nbytes
from lmpack.cli.output_file import check_output
from lmpack.cli.path_argument import ExistingPath, NewPath
from lmpack.cli.report import print_json
from lmpack.errors import ProfileError
from lmpack.plural import counted


@click.command(
    epilog="""Examples:

\b
  lmpack merge code.safetensors prose.safetensors -o both.safetensors
  lmpack merge day1.safetensors day2.safetensors -o both.safetensors --json
"""
)
@click.argument(
    "profiles",
    type=ExistingPath(dir_okay=False, path_type=Path),
    nargs=-1,
    required=True,
    metavar="PROFILE...",
)
@click.option(
    "-o",
    "--output",
    type=NewPath(dir_okay=False, path_type=Path),
    required=True,
    metavar="OUT",
    help="Where the profile of all goes.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def command(profiles: tuple[Path, ...], output: Path, as_json: bool) -> None:
    """Add up routing PROFILEs, as if their prompts had been one set.

    They may come from several quantizations of a model, not from models of another shape.
    """
    from profiles.routing_profile import RoutingProfile

    check_output(output)
    merged = RoutingProfile.load(profiles[0])
    for path in profiles[1:]:
        profile = RoutingProfile.load(path)
        try:
            merged = merged.merge(profile)
        except ProfileError as error:
            raise ProfileError(f"{profiles[0]} and {path}: {error}") from None
    merged.save(output)
    if as_json:
        print_json(
            {
                "profile": str(output),
                "merged": [str(path) for path in profiles],
                "num_tokens": merged.num_tokens,
                "num_prompt_tokens": merged.num_prompt_tokens,
            }
        )
        return
    click.echo(f"{counted(len(profiles), 'profile')} of {counted(merged.num_tokens, 'token')}")
    click.echo(f"wrote {output} ({format_nbytes(output.stat().st_size)})")

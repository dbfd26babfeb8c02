"""lmpack warm: read the hot experts into the page cache ahead of a session.

The document of --json:

    pack            what was given
    num_experts     how many experts were chosen
    nbytes          what their files take
    cached_nbytes   what of it was in the page cache already; null where the kernel does not tell
    seconds         how long the rest took
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lmpack.byte_size import format_nbytes, parse_byte_size
from lmpack.cli.path_argument import ExistingPath, PackPath
from lmpack.cli.progress import progress_bar
from lmpack.cli.report import print_json
from lmpack.cli.text_input import Word
from lmpack.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmpack.expert_key import ExpertKey
    from lmpack.pack import Pack

_HEADROOM = 0.1  # of what is free, left to everybody else


@click.command(
    epilog="""Examples:

\b
  lmpack warm qwen3.lmpack
  lmpack warm qwen3.lmpack --top 30%
  lmpack warm qwen3.lmpack --profile qwen3.profile.safetensors --top 8GiB
"""
)
@click.argument("pack", type=PackPath())
@click.option(
    "--profile",
    type=ExistingPath(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Of lmpack profile: the most used experts come first. Default: every layer alike.",
)
@click.option(
    "--top",
    type=Word(),
    metavar="SIZE",
    help="How much of the experts, such as 30% or 8GiB. Default: what is free, less 10 %.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def command(pack: str, profile: Path | None, top: str | None, as_json: bool) -> None:
    """Read the hottest experts of PACK into the page cache, where the next run finds them.

    The kernel may forget them when others need the memory; lmpack inspect --residency shows what is there. A run
    with --io direct takes what it uses from there; with --io mmap it stays.
    """
    from lmpack.pack import Pack
    from profiles.routing_profile import RoutingProfile
    from runtime.free_memory import free_memory_nbytes
    from runtime.warming import file_nbytes, hottest_first, warm, within

    opened = Pack.open(pack)
    hot = RoutingProfile.load_for(opened.manifest, profile) if profile is not None else None
    keys = hottest_first(opened, hot)
    all_nbytes = sum(file_nbytes(opened, key) for key in keys)
    free_nbytes = int(free_memory_nbytes() * (1 - _HEADROOM))
    most_nbytes = parse_byte_size(top, all_nbytes) if top is not None else min(all_nbytes, free_nbytes)
    if most_nbytes > free_nbytes:
        raise UsageError(
            f"--top {top} is {format_nbytes(most_nbytes)}, the page cache has room for {format_nbytes(free_nbytes)}; "
            "give less"
        )
    keys = within(opened, keys, most_nbytes)
    nbytes = sum(file_nbytes(opened, key) for key in keys)
    cached = _cached(opened, keys)
    started = time.perf_counter()
    with progress_bar(nbytes, description="warm") as progress:
        warm(opened, keys, progress)
    spent_s = time.perf_counter() - started
    if as_json:
        print_json(
            {
                "pack": pack,
                "num_experts": len(keys),
                "nbytes": nbytes,
                "cached_nbytes": cached,
                "seconds": round(spent_s, 3),
            }
        )
        return
    before = f"; {format_nbytes(cached)} of it was there before" if cached is not None else ""
    click.echo(
        f"{pack}: {len(keys)} experts, {format_nbytes(nbytes)} of {format_nbytes(all_nbytes)} are in the page "
        f"cache after {spent_s:.2f} s{before}"
    )


def _cached(pack: Pack, keys: Sequence[ExpertKey]) -> int | None:
    from runtime.page_cache import cached_nbytes

    extents = {extent for key in keys for extent in pack.expert_extents(key)}
    found = [cached_nbytes(extent.path, extent.offset, extent.nbytes) for extent in extents]
    known = [nbytes for nbytes in found if nbytes is not None]
    return sum(known) if len(known) == len(found) else None

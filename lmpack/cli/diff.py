"""lmpack diff: which experts and tensors of two packs differ, and by how much."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from lmpack.cli.path_argument import PackPath
from lmpack.cli.progress import progress_bar
from lmpack.cli.report import one_line, print_json
from lmpack.plural import counted

if TYPE_CHECKING:
    from converters.pack_diff import Form, PackDiff, TensorDifference
    from lmpack.pack import Pack


@click.command(
    epilog="""Examples:

\b
  lmpack diff qwen3-bf16.lmpack qwen3-q4.lmpack
  lmpack diff before.lmpack after.lmpack --json
"""
)
@click.argument("a", type=PackPath())
@click.argument("b", type=PackPath())
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def command(a: str, b: str, as_json: bool) -> None:
    """Say in which experts and tensors the packs A and B differ.

    Quantized tensors are compared as numbers: the largest absolute error of B, and its relative error (the norm of
    the difference over the norm of A's). Page size and compression make no difference. Exit code 0 when the packs are
    equal, 1 when they differ. Checksums are taken from the manifests; `lmpack validate` says whether they are true.
    """
    from converters.pack_diff import diff_packs
    from lmpack.pack import Pack

    pack_a, pack_b = Pack.open(a), Pack.open(b)
    total = max(pack.manifest.num_experts + len(pack.manifest.shared) for pack in (pack_a, pack_b))
    with progress_bar(total, unit=" tensors", description="diff") as progress:
        diff = diff_packs(pack_a, pack_b, progress=progress)
    if as_json:
        print_json(_document(a, b, diff))
    else:
        for difference in diff.tensors:
            click.echo(one_line(_line(difference)))
        for key in diff.config_keys:
            click.echo(one_line(f"config {key}: {_setting(pack_a, key)} and {_setting(pack_b, key)}"))
        for name in diff.source_files:
            click.echo(one_line(f"source file {name}: differs outside its tensors, or is in one pack only"))
        click.echo(_summary(diff))
    if not diff.equal:
        click.get_current_context().exit(1)


def _setting(pack: Pack, key: str) -> str:
    manifest = pack.manifest
    value = manifest.architecture if key == "architecture" else manifest.config.get(key)
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 60 else text[:59] + "…"


def _line(difference: TensorDifference) -> str:
    what = f"expert {difference.key}" if difference.key is not None else "tensor"
    a, b = _form(difference.a), _form(difference.b)
    forms = a if a == b else f"{a} and {b}"
    if difference.max_error is None:
        by = ""
    elif difference.relative_error is None:
        by = f": up to {difference.max_error:.3g}"
    else:
        by = f": up to {difference.max_error:.3g}, relative {difference.relative_error:.3g}"
    return f"{what} {difference.name} ({forms}){by}"


def _form(form: Form | None) -> str:
    return "missing" if form is None else f"{form[0]} {'x'.join(map(str, form[1])) or 'scalar'}"


def _summary(diff: PackDiff) -> str:
    if diff.equal:
        return "equal"
    experts = len({difference.key for difference in diff.tensors if difference.key is not None})
    shared = sum(difference.key is None for difference in diff.tensors)
    return (
        f"different: {counted(experts, 'expert')}, {counted(shared, 'shared tensor')}, "
        f"{counted(len(diff.config_keys), 'config value')}, {counted(len(diff.source_files), 'source file')}"
    )


def _document(a: str, b: str, diff: PackDiff) -> dict[str, object]:
    def form(of: Form | None) -> dict[str, object] | None:
        return None if of is None else {"dtype": of[0], "shape": list(of[1])}

    return {
        "a": a,
        "b": b,
        "equal": diff.equal,
        "tensors": [
            {
                "layer": difference.key.layer if difference.key else None,
                "expert": difference.key.expert if difference.key else None,
                "name": difference.name,
                "a": form(difference.a),
                "b": form(difference.b),
                "max_error": difference.max_error,
                "relative_error": difference.relative_error,
            }
            for difference in diff.tensors
        ],
        "config_keys": list(diff.config_keys),
        "source_files": list(diff.source_files),
    }

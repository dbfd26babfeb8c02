"""lmpack diff: which experts and tensors of two packs differ, and by how much; or how two profiles do.

Keys of `--json`:
    a, b                what was compared
    equal               whether they are: exit code 0
  of packs:
    tensors[]           layer, expert (null: a shared tensor), name, a and b (dtype, shape; null: missing there),
                        max_error, relative_error (null: not comparable)
    config_keys         of values in the config that differ
    source_files        of which more than the tensors differs
  of profiles:
    layers[]            layer, divergence_bits: of the choices there
    mean_divergence_bits
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from lmpack.cli.path_argument import PackOrProfilePath
from lmpack.cli.progress import progress_bar
from lmpack.cli.report import one_line, print_json
from lmpack.errors import ProfileError, UsageError
from lmpack.plural import counted

if TYPE_CHECKING:
    from converters.pack_diff import Form, PackDiff, TensorDifference
    from lmpack.pack import Pack


@click.command(
    epilog="""Examples:

\b
  lmpack diff qwen3-bf16.lmpack qwen3-q4.lmpack
  lmpack diff before.lmpack after.lmpack --json
  lmpack diff code.profile.safetensors prose.profile.safetensors
"""
)
@click.argument("a", type=PackOrProfilePath())
@click.argument("b", type=PackOrProfilePath())
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def command(a: str, b: str, as_json: bool) -> None:
    """Say in which experts and tensors the packs A and B differ, or how much the routing profiles A and B do.

    Quantized tensors are compared as numbers: the largest absolute error of B, and its relative error (the norm of
    the difference over the norm of A's). Page size and compression make no difference. Checksums are taken from the
    manifests; `lmpack validate` says whether they are true.

    Profiles are compared layer by layer, by the Jensen-Shannon divergence of their choices: 0 bits when both spread
    them alike, 1 bit when they have no expert in common. Exit code 0 when A and B are equal, 1 when they differ.
    """
    kinds = {Path(path).is_file() for path in (a, b)}
    if len(kinds) == 2:
        raise UsageError(f"{a} and {b}: a pack and a profile; name two of one kind")
    equal = _diff_profiles(a, b, as_json) if kinds == {True} else _diff_packs(a, b, as_json)
    if not equal:
        click.get_current_context().exit(1)


def _diff_profiles(a: str, b: str, as_json: bool) -> bool:
    """Print how the profiles differ; return whether they are equal."""
    from profiles.routing_profile import RoutingProfile

    profile_a, profile_b = RoutingProfile.load(Path(a)), RoutingProfile.load(Path(b))
    try:
        divergence = profile_a.divergence(profile_b)
    except ProfileError as error:
        raise ProfileError(f"{a} and {b}: {error}") from None
    mean, equal = float(divergence.mean()), not divergence.any()
    layers = [*zip(profile_a.shape.layers, divergence.tolist(), strict=True)]
    if as_json:
        found = [{"layer": layer, "divergence_bits": bits} for layer, bits in layers]
        print_json({"a": a, "b": b, "equal": equal, "layers": found, "mean_divergence_bits": mean})
    else:
        click.echo("layer  divergence, bits")
        for layer, bits in layers:
            click.echo(f"L{layer:03d} {bits:17.4f}")
        click.echo(f"mean {mean:17.4f}")
    return equal


def _diff_packs(a: str, b: str, as_json: bool) -> bool:
    """Print in what the packs differ; return whether they are equal."""
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
    return diff.equal


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

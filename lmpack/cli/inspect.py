"""lmpack inspect: what a pack, or a checkpoint not yet packed, holds."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lmpack.byte_size import format_nbytes
from lmpack.cli.path_argument import ModelPath
from lmpack.cli.report import one_line, print_json
from lmpack.cli.residency import Residency
from lmpack.errors import UsageError
from lmpack.manifest import MANIFEST_FILE
from lmpack.pack import Pack
from lmpack.plural import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from converters.checkpoint import Checkpoint
    from lmpack.manifest import LayerEntry, Manifest


@click.command(
    epilog="""Examples:

\b
  lmpack inspect qwen3.lmpack
  lmpack inspect qwen3.lmpack --json
  lmpack inspect qwen3.lmpack --residency
  lmpack inspect Qwen3-30B-A3B-Q4_K_M.gguf
"""
)
@click.argument("source", metavar="PACK_OR_SRC", type=ModelPath())
@click.option("--residency", is_flag=True, help="Show which experts of a pack are in the page cache now.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document, with every layer and tensor.")
def command(source: str, residency: bool, as_json: bool) -> None:
    """Show a model's architecture, configuration, layers, sizes and dtypes.

    Takes a pack, a GGUF file (any shard of a set) or a folder of safetensors.
    """
    if (Path(source) / MANIFEST_FILE).exists():
        pack = Pack.open(source)
        cached = Residency.of_pack(pack) if residency else None
        if as_json:
            document = _pack_document(source, pack.manifest)
            print_json({**document, "residency": cached.to_json()} if cached else document)
        else:
            lines = _pack_lines(source, pack.manifest)
            click.echo("\n".join([*lines, *cached.lines()] if cached else lines))
        return
    if residency:
        raise UsageError(f"{source}: --residency is for packs; run: lmpack convert")
    from converters.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(source)
    if as_json:
        print_json(_checkpoint_document(source, checkpoint))
    else:
        click.echo("\n".join(_checkpoint_lines(source, checkpoint)))


def _pack_lines(source: str, manifest: Manifest) -> list[str]:
    files = manifest.source.files
    way_back = "export gives it back" if manifest.reproducible else f"no way back: {manifest.reason}"
    return [
        f"{one_line(source)}: lmpack format {manifest.version}, {manifest.architecture}",
        f"pack id    {manifest.pack_id}",
        f"page size  {manifest.page_size}",
        *([f"storage    {manifest.storage}"] if manifest.is_compressed else []),
        *([f"storage    reference, weights in {manifest.source.folder}"] if manifest.is_reference else []),
        (
            f"source     {manifest.source.kind}, {counted(len(files), 'file')}, "
            f"{format_nbytes(sum(file.nbytes for file in files))}, {way_back}"
        ),
        (
            f"experts    {manifest.num_experts} in {counted(len(manifest.layers), 'layer')}, "
            f"{_num_files(manifest)}, {format_nbytes(_experts_nbytes(manifest))}"
        ),
        f"shared     {counted(len(manifest.shared), 'tensor')}, {format_nbytes(manifest.shared_file_nbytes)}",
        *_dtype_lines(_pack_dtypes(manifest)),
        *_config_lines(manifest.config),
        *_layer_lines(manifest.layers),
    ]


def _pack_document(source: str, manifest: Manifest) -> dict[str, object]:
    return {
        "path": source,
        "kind": "lmpack",
        "format_version": manifest.version,
        "pack_id": manifest.pack_id,
        "page_size": manifest.page_size,
        "storage": manifest.storage,
        "converted": [entry.to_json() for entry in manifest.converted],
        "architecture": manifest.architecture,
        "config": dict(manifest.config),
        "reproducible": manifest.reproducible,
        "reason": manifest.reason,
        "source": {
            "kind": manifest.source.kind,
            "folder": manifest.source.folder or None,
            "files": [
                {"name": file.name, "nbytes": file.nbytes, "sha256": file.sha256}
                for file in manifest.source.files
            ],
        },
        "num_experts": manifest.num_experts,
        "num_expert_files": 0 if manifest.is_reference else len(_expert_files(manifest)),
        "experts_nbytes": _experts_nbytes(manifest),
        "shared_nbytes": manifest.shared_file_nbytes,
        "dtypes": dict(_pack_dtypes(manifest)),
        "layers": [{**layer.to_json(), "num_experts": layer.num_experts} for layer in manifest.layers],
        "shared": [
            {"name": tensor.name, "dtype": tensor.dtype, "shape": list(tensor.shape), "nbytes": tensor.nbytes}
            for tensor in manifest.shared
        ],
    }


def _checkpoint_lines(source: str, checkpoint: Checkpoint) -> list[str]:
    model = checkpoint.describe()
    return [
        f"{one_line(source)}: {checkpoint.kind}, {model.architecture}",
        f"files      {len(checkpoint.files)}, {format_nbytes(sum(file.nbytes for file in checkpoint.files))}",
        f"tensors    {len(checkpoint.tensors)}",
        *_dtype_lines(_checkpoint_dtypes(checkpoint)),
        *_config_lines(model.config),
    ]


def _checkpoint_document(source: str, checkpoint: Checkpoint) -> dict[str, object]:
    model = checkpoint.describe()
    return {
        "path": source,
        "kind": checkpoint.kind,
        "architecture": model.architecture,
        "config": dict(model.config),
        "files": [{"name": file.name, "nbytes": file.nbytes} for file in checkpoint.files],
        "dtypes": dict(_checkpoint_dtypes(checkpoint)),
        "tensors": [
            {"name": tensor.name, "dtype": tensor.dtype, "shape": list(tensor.shape), "nbytes": tensor.nbytes}
            for tensor in checkpoint.tensors
        ],
    }


def _num_files(manifest: Manifest) -> str:
    return "in the source" if manifest.is_reference else counted(len(_expert_files(manifest)), "file")


def _expert_files(manifest: Manifest) -> dict[str, int]:
    return {expert.file: expert.file_nbytes for layer in manifest.layers for expert in layer.experts}


def _experts_nbytes(manifest: Manifest) -> int:
    return sum(_expert_files(manifest).values())


def _pack_dtypes(manifest: Manifest) -> Counter[str]:
    """Count the bytes of each dtype over all tensors; identical experts count as often as they occur."""
    nbytes: Counter[str] = Counter()
    for layer in manifest.layers:
        for part in layer.parts:
            nbytes[part.dtype] += part.nbytes * layer.num_experts
    for tensor in manifest.shared:
        nbytes[tensor.dtype] += tensor.nbytes
    return nbytes


def _checkpoint_dtypes(checkpoint: Checkpoint) -> Counter[str]:
    nbytes: Counter[str] = Counter()
    for tensor in checkpoint.tensors:
        nbytes[tensor.dtype] += tensor.nbytes
    return nbytes


def _dtype_lines(nbytes: Counter[str]) -> list[str]:
    return [
        "dtypes     " + ", ".join(f"{dtype} {format_nbytes(count)}" for dtype, count in nbytes.most_common())
    ]


def _config_lines(config: Mapping[str, object]) -> list[str]:
    width = max(map(len, config), default=0)
    return ["", "config", *(f"  {key:{width}}  {_short(config[key])}" for key in sorted(config))]


def _layer_lines(layers: Iterable[LayerEntry]) -> list[str]:
    """Give one block for each run of layers whose experts look the same."""
    lines = []
    for (num_experts, stride, parts), run in groupby(
        layers, lambda entry: (entry.num_experts, entry.stride, entry.parts)
    ):
        numbers = [entry.layer for entry in run]
        lines += [
            "",
            f"{'layer' if len(numbers) == 1 else 'layers'} {_spans(numbers)}: {counted(num_experts, 'expert')} of {format_nbytes(stride)}",
        ]
        width = max(len(part.role) for part in parts)
        lines += [
            f"  {part.role:{width}}  {part.dtype:8} {'x'.join(map(str, part.shape)):16} {format_nbytes(part.nbytes)}"
            for part in parts
        ]
    return lines


def _spans(numbers: list[int]) -> str:
    """Write sorted numbers as 0-3, 5, 7-9."""
    spans = [(numbers[0], numbers[0])]
    for number in numbers[1:]:
        if number == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], number)
        else:
            spans.append((number, number))
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def _short(value: object) -> str:
    text = one_line(str(value)[:100])
    return text if len(text) <= 72 else f"{text[:69]}..."

"""Packs that hold experts and little else, and budgets with a chosen number of slots for them."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from lmpack.expert_key import ExpertKey
from lmpack.layer_entry import ExpertEntry, LayerEntry, lay_out_parts
from lmpack.manifest import Manifest, Source, SourceFile
from lmpack.pack import Pack
from lmpack.pack_writer import PackWriter
from runtime.expert_layout import expert_layouts
from runtime.memory_budget import MemoryBudget

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from runtime.expert_store import ExpertStore

    Parts = Sequence[tuple[str, str, tuple[int, ...]]]

SMALL: Parts = [("gate", "F16", (8, 512)), ("up", "F16", (8, 512)), ("down", "F16", (512, 8))]  # 6 pages
LARGE: Parts = [("gate_up", "BF16", (40, 512)), ("down", "F32", (512, 20)), ("down_bias", "F32", (512,))]
LAYERS: Mapping[int, tuple[int, Parts]] = {0: (5, SMALL), 1: (3, LARGE), 3: (4, SMALL), 4: (2, LARGE)}
CONFIG = b"{}\n"


def write_expert_pack(path: Path, layers: Mapping[int, tuple[int, Parts]] = LAYERS) -> Pack:
    """A pack of random experts (layer -> how many, and their parts); layer 0's first and last are identical."""
    with PackWriter(path) as writer:
        for layer, (num_experts, parts) in layers.items():
            writer.add_layer(layer, num_experts, parts)
        for layer, (num_experts, parts) in layers.items():
            placed, _ = lay_out_parts(parts, writer.page_size)
            for expert in range(num_experts):
                seed = 0 if (layer, expert) == (0, num_experts - 1) else expert
                random = np.random.default_rng([layer, seed])
                for part in placed:
                    writer.write_part(layer, expert, part.role, random.bytes(part.nbytes))
        writer.keep("source/config.json", CONFIG)
        writer.finish(architecture="tinymoe", config={}, source=_source())
    return Pack.open(path)


def write_identical_experts(path: Path, layers: Mapping[int, tuple[int, Parts]]) -> Pack:
    """A pack of any number of experts that all have the bytes of one file; all layers must have one layout."""
    manifest = identical_experts(layers)
    file = path / ExpertKey(manifest.layers[0].layer, 0).file
    file.parent.mkdir(parents=True)
    file.write_bytes(bytes(manifest.layers[0].stride))
    (path / "source").mkdir()
    (path / "source" / "config.json").write_bytes(CONFIG)
    (path / "shared.bin").touch()
    (path / "manifest.json").write_bytes(manifest.to_bytes())
    return Pack.open(path)


def identical_experts(layers: Mapping[int, tuple[int, Parts]]) -> Manifest:
    """The manifest of such a pack; for itself, the layers may differ in layout."""
    entries = []
    for layer, (num_experts, parts) in layers.items():
        placed, stride = lay_out_parts(parts, 4096)
        file = ExpertKey(min(layers), 0).file
        expert = ExpertEntry(file, stride, hashlib.sha256(bytes(stride)).hexdigest())
        entries.append(LayerEntry(layer, placed, stride, (expert,) * num_experts))
    return Manifest(
        page_size=4096,
        architecture="tinymoe",
        config={},
        layers=tuple(entries),
        shared=(),
        shared_nbytes=0,
        source=_source(),
        reproducible=True,
        reason="",
        pack_id="",
    )


def budget_with_slots(manifest: Manifest, *slots: int) -> MemoryBudget:
    """A budget that gives each layout of the manifest so many slots; without any, one for each expert."""
    layouts = expert_layouts(manifest)
    return MemoryBudget(
        total_nbytes=0,
        process_nbytes=0,
        dense_nbytes=0,
        kv_nbytes=0,
        buffers_nbytes=0,
        layouts=layouts,
        slots=slots or tuple(layout.num_experts for layout in layouts),
    )


def load(store: ExpertStore, keys: Sequence[ExpertKey], slots: Sequence[int]) -> None:
    """Read experts into the slots they acquired, in eight threads; raise the first error of all."""
    with ThreadPoolExecutor(8) as threads:
        for _ in threads.map(store.read, keys, slots):
            pass


def all_keys(pack: Pack) -> list[ExpertKey]:
    """Every expert of a pack, in file order."""
    return [
        ExpertKey(entry.layer, expert)
        for entry in pack.manifest.layers
        for expert in range(entry.num_experts)
    ]


def _source() -> Source:
    sha256 = hashlib.sha256(CONFIG).hexdigest()
    file = SourceFile(
        "config.json", len(CONFIG), sha256, "source/config.json", len(CONFIG), sha256, segments=()
    )
    return Source("safetensors", (file,))

"""More experts than a process may have files open or mappings: a pack of 40,000, each in a file of its own."""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from lmpack.expert_key import ExpertKey
from lmpack.pack import Pack
from runtime.expert_cache import ExpertCache
from runtime.expert_store import open_store
from tests.expert_packs import CONFIG, budget_with_slots, identical_experts

if TYPE_CHECKING:
    from collections.abc import Iterator

NUM_LAYERS, NUM_EXPERTS = 40, 1000
MAX_OPEN_FILES = 1024
BATCH = 250


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    """Every file is a hole of one page."""
    folder = tmp_path_factory.mktemp("many") / "many.lmpack"
    manifest = identical_experts(
        {layer: (NUM_EXPERTS, [("down", "F32", (4, 4))]) for layer in range(NUM_LAYERS)}
    )
    layers = []
    for entry in manifest.layers:
        experts = tuple(
            replace(expert, file=ExpertKey(entry.layer, number).file)
            for number, expert in enumerate(entry.experts)
        )
        (folder / experts[0].file).parent.mkdir(parents=True)
        for expert in experts:
            with (folder / expert.file).open("wb") as file:
                file.truncate(expert.nbytes)
        layers.append(replace(entry, experts=experts))
    (folder / "source").mkdir()
    (folder / "source" / "config.json").write_bytes(CONFIG)
    (folder / "shared.bin").touch()
    (folder / "manifest.json").write_bytes(replace(manifest, layers=tuple(layers)).to_bytes())
    return Pack.open(folder)


@pytest.fixture
def few_open_files() -> Iterator[None]:
    """As under `ulimit -n 1024`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_OPEN_FILES, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("few_open_files")
@pytest.mark.parametrize("name", ["direct", "mmap"])
def test_all_of_them_are_read_within_the_limits_of_files_and_mappings(pack: Pack, name: str) -> None:
    budget = budget_with_slots(pack.manifest)
    cache = ExpertCache(open_store(name, pack, budget), budget)
    max_map_count = int(Path("/proc/sys/vm/max_map_count").read_text(encoding="ascii"))
    for first in range(0, NUM_EXPERTS, BATCH):
        for layer in range(NUM_LAYERS):
            # every other one first: no two mappings lie side by side
            experts = [*range(first, first + BATCH, 2), *range(first + 1, first + BATCH, 2)]
            cache.fetch(layer, experts)
        assert Path("/proc/self/maps").read_text(encoding="ascii").count("\n") < max_map_count
    assert (cache.hits, cache.misses) == (0, NUM_LAYERS * NUM_EXPERTS)
    cache.close()

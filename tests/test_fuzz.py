"""The fuzz targets themselves: they take their seeds, and some hundred changed ones, as they do for hours elsewhere."""

from __future__ import annotations

import json
from random import Random
from typing import TYPE_CHECKING

import pytest

from fuzz.json_mutation import mutate_json
from fuzz.target import TARGETS

if TYPE_CHECKING:
    from pathlib import Path

NUM_MUTATIONS = 300


def mutate_bytes(raw: bytes, random: Random) -> bytes:
    """Change some bytes, and now and then the length."""
    changed = bytearray(raw)
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(changed))
        changed[at] = random.choice((0, 1, 0x7F, 0x80, 0xFF, changed[at] ^ (1 << random.randrange(8))))
    return bytes(changed[: random.randrange(len(changed))] if random.random() < 0.1 else changed)


@pytest.mark.parametrize("name", TARGETS)
def test_changed_inputs_are_read_or_refused_with_an_error_of_ours(tmp_path: Path, name: str) -> None:
    target, random = TARGETS[name], Random(name)
    seeds = target.seeds()
    for seed in seeds:
        target(seed, tmp_path)
    for _ in range(NUM_MUTATIONS):
        seed = random.choice(seeds)
        as_json = target.is_json and random.random() < 0.7
        target(mutate_json(seed, random) if as_json else mutate_bytes(seed, random), tmp_path)


def test_a_mutated_document_is_another_document() -> None:
    document = json.dumps({"a": [1, 2, {"b": "text"}], "c": {"d": 0.5}}).encode()
    found = {mutate_json(document, Random(seed)) for seed in range(200)}
    assert len(found) > 100
    for raw in found:
        json.loads(raw)

"""lmpack warm and lmpack inspect --residency: what the page cache holds before a session."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from lmpack.cli.main import run
from lmpack.expert_key import ExpertKey
from profiles.routing_shape import RoutingShape
from runtime.direct_store import DirectStore
from runtime.warming import hottest_first
from tests.expert_packs import SMALL, all_keys, budget_with_slots, load, write_expert_pack
from tests.page_cache import forget, pages_in_cache
from tests.tiny_routing import ORIGIN, record

if TYPE_CHECKING:
    from pathlib import Path

    from lmpack.pack import Pack


@pytest.fixture
def pack(tmp_path: Path) -> Pack:
    """Two layers of ten experts, none of them in the page cache; the first and the last are one file."""
    pack = write_expert_pack(tmp_path / "experts.lmpack", {0: (10, SMALL), 1: (10, SMALL)})
    forget([pack.expert_path(key) for key in all_keys(pack)])
    return pack


def cached(pack: Pack) -> set[ExpertKey]:
    return {key for key in all_keys(pack) if pages_in_cache(pack.expert_path(key))}


def test_everything_is_read_by_default(pack: Pack, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["warm", str(pack.path)]) == 0
    assert "20 experts, 480.0 KiB of 480.0 KiB are in the page cache after " in capsys.readouterr().out
    assert cached(pack) == set(all_keys(pack))


def test_a_share_is_taken_from_every_layer(pack: Pack, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["warm", str(pack.path), "--top", "20%", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["num_experts"], document["nbytes"], document["cached_nbytes"]) == (4, 98304, 0)
    assert cached(pack) == {
        *(ExpertKey(layer, expert) for layer in (0, 1) for expert in (0, 1)),
        ExpertKey(0, 9),  # the same file as expert 0
    }


def test_a_profile_puts_the_most_used_experts_first(pack: Pack) -> None:
    routed = replace(pack.manifest, config={"num_experts_per_tok": 2})
    profile = record([[20, 1, 1]], shape=RoutingShape.of_manifest(routed)).profile(ORIGIN)
    order = hottest_first(pack, profile)
    assert sorted(order) == all_keys(pack)
    uses = [int(profile.counts[key.layer, key.expert]) for key in order]
    assert uses == sorted(profile.counts.flatten().tolist(), reverse=True)


def test_a_profile_of_another_model_is_refused(
    demo_pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record([[20]]).profile(ORIGIN).save(tmp_path / "other.safetensors")
    assert run(["warm", str(demo_pack), "--profile", str(tmp_path / "other.safetensors")]) == 1
    assert "other.safetensors is the profile of another model: " in capsys.readouterr().err


def test_the_direct_store_takes_experts_out_of_the_page_cache(pack: Pack) -> None:
    assert run(["warm", str(pack.path)]) == 0
    store = DirectStore(pack, budget_with_slots(pack.manifest))
    key = ExpertKey(1, 3)
    load(store, [key], [3])
    bank = store.bank(1)
    assert bank.storage[3 * bank.stride : 4 * bank.stride].numpy().tobytes() == pack.read_expert(key)
    store.close()


def test_residency_is_a_map_and_a_document(pack: Pack, capsys: pytest.CaptureFixture[str]) -> None:
    for expert in (1, 3):
        pack.read_expert(ExpertKey(1, expert))
    assert run(["inspect", str(pack.path), "--residency"]) == 0
    out = capsys.readouterr().out
    assert "in the page cache: 10% of the experts, 2 of 20 wholly" in out
    assert "L000    0% |          |\nL001   20% | @ @      |\n" in out
    assert run(["inspect", str(pack.path), "--residency", "--json"]) == 0
    layers = json.loads(capsys.readouterr().out)["residency"]["layers"]
    assert [layer["experts"] for layer in layers] == [[], [1, 3]]
    assert [layer["cached_nbytes"] for layer in layers] == [0, 2 * 24576]


def test_a_failing_expert_is_named(pack: Pack, capsys: pytest.CaptureFixture[str]) -> None:
    path = pack.expert_path(ExpertKey(1, 3))
    path.write_bytes(path.read_bytes()[:-1])
    assert run(["warm", str(pack.path)]) == 1
    assert "L001/E0003" in capsys.readouterr().err


@pytest.mark.parametrize("top", ["8G", "101%", "1000TiB"])
def test_sizes_that_cannot_be_are_refused(pack: Pack, top: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["warm", str(pack.path), "--top", top]) == 2
    assert cached(pack) == set()

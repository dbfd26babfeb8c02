"""Where a run begins changes what it reads, and no bit of what it computes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from lmpack.cli.main import run
from lmpack.errors import ProfileError, StorageError, UsageError
from lmpack.expert_key import ExpertKey
from lmpack.pack import Pack
from profiles.last_session import LastSession
from profiles.policy_choice import ORDERS, PolicyChoice
from profiles.routing_recorder import RoutingRecorder
from profiles.routing_shape import RoutingShape
from profiles.warm_start import WarmStart
from runtime.engine import Engine
from tests.greedy_logits import greedy_logits
from tests.smallest_budget import smallest_budget
from tests.tiny_routing import ORIGIN, record

if TYPE_CHECKING:
    from pathlib import Path

    from lmpack.manifest import Manifest
    from profiles.routing_profile import RoutingProfile


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def manifest(demo_pack: Path) -> Manifest:
    return Pack.open(demo_pack).manifest


@pytest.fixture(scope="module")
def smallest_ram(demo_pack: Path) -> int:
    return smallest_budget(lambda: load(demo_pack, ram=1))


def load(pack: Path, **options: Any) -> Engine:
    return Engine.load(pack, context_length=64, num_threads=1, **options)


@pytest.fixture(scope="module")
def recorded(demo_pack: Path, manifest: Manifest) -> tuple[torch.Tensor, RoutingProfile]:
    """The logits with room for every expert, and the profile of the same tokens."""
    recorder = RoutingRecorder(RoutingShape.of_manifest(manifest))
    with load(demo_pack, recorder=recorder) as engine:
        reference = greedy_logits(engine, 4)
        num_tokens = recorder.num_pending
    recorder.end_prompt(range(num_tokens), 1)
    return reference, recorder.profile(replace(ORIGIN, architecture=manifest.architecture))


@pytest.fixture
def profile_file(recorded: tuple[torch.Tensor, RoutingProfile], tmp_path: Path) -> Path:
    recorded[1].save(tmp_path / "p.safetensors")
    return tmp_path / "p.safetensors"


@pytest.mark.parametrize(
    "policy",
    [PolicyChoice(order, per_layer, per_layer).name for order in ORDERS for per_layer in (False, True)],
)
def test_no_policy_and_no_start_changes_a_bit(
    demo_pack: Path,
    smallest_ram: int,
    recorded: tuple[torch.Tensor, RoutingProfile],
    profile_file: Path,
    policy: str,
) -> None:
    for warm in (profile_file, "last", "last"):
        with load(demo_pack, ram=smallest_ram + (4 << 20), policy=policy, warm=warm) as engine:
            assert torch.equal(greedy_logits(engine, 4), recorded[0])
            assert engine.cache.evictions > 0
            assert engine.cache.policy_name == policy


def test_a_profiles_most_used_experts_are_read_in_before_the_first_token(
    demo_pack: Path, smallest_ram: int, recorded: tuple[torch.Tensor, RoutingProfile], profile_file: Path
) -> None:
    most_used = recorded[1].most_used()
    with load(demo_pack, ram=smallest_ram + (4 << 20), warm=profile_file) as engine:
        assert engine.cache.warmed == sum(engine.budget.slots) < len(most_used)
        assert engine.stats().experts_warmed == engine.cache.warmed
        assert (engine.cache.misses, engine.cache.bytes_read) == (0, 0)
        first = most_used[0]
        engine.cache.fetch(first.layer, [first.expert])
        assert (engine.cache.hits, engine.cache.misses) == (1, 0)


def test_with_room_for_all_the_second_session_misses_nothing_that_the_first_used(demo_pack: Path) -> None:
    with load(demo_pack, warm="last") as engine:
        assert engine.cache.warmed == 0
        greedy_logits(engine, 4)
        used = engine.cache.misses
    with load(demo_pack, warm="last") as engine:
        assert engine.cache.warmed == used
        greedy_logits(engine, 4)
        assert engine.cache.misses == 0


def test_a_session_is_kept_only_when_asked_for_and_when_it_ended_well(
    demo_pack: Path, cache_folder: Path
) -> None:
    with load(demo_pack) as engine:
        engine.cache.fetch(0, [0])
    with (
        pytest.raises(UsageError, match="outside of the vocabulary"),
        load(demo_pack, warm="last") as engine,
    ):
        engine.forward([-1], engine.new_kv())
    assert not cache_folder.exists()


def test_the_session_begins_with_the_expert_to_keep_longest(
    demo_pack: Path, manifest: Manifest, cache_folder: Path
) -> None:
    with load(demo_pack, warm="last", policy="lru") as engine:
        for expert in (4, 2, 7):
            engine.cache.fetch(0, [expert])
    (file,) = cache_folder.rglob("*.json")
    assert file == cache_folder / "lmpack" / "sessions" / f"{manifest.pack_id}.json"
    assert json.loads(file.read_bytes()) == {"version": 1, "experts": [[0, 7], [0, 2], [0, 4]]}
    assert WarmStart.read("last", manifest).keys == (ExpertKey(0, 7), ExpertKey(0, 2), ExpertKey(0, 4))


def test_a_session_that_cannot_be_kept_is_an_error_and_the_engine_is_closed(
    demo_pack: Path, cache_folder: Path
) -> None:
    cache_folder.write_text("a file where a folder should be")
    engine = load(demo_pack)
    engine.session = LastSession(engine.plan.pack.manifest)
    with pytest.raises(StorageError, match="sessions"):
        engine.close()
    with pytest.raises(ValueError, match="closed"):
        engine.cache.fetch(0, [0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ('{"version": 2, "experts": []}', "version"),
        ('{"version": 1}', "misses experts"),
        ('{"version": 1, "experts": [[0, 32]]}', "from 0 to 31"),
        ('{"version": 1, "experts": [[9, 0]]}', "from 0 to -1"),
        ('{"version": 1, "experts": [[0, true]]}', "whole number"),
        ('{"version": 1, "experts": [[[], 0]]}', "whole number"),
        ('{"version": 1, "experts": [[0, 1, 2]]}', "a list of 2 to 2"),
        ('{"version": 1, "experts": [[0, 1], [0, 1]]}', "twice"),
    ],
)
def test_a_broken_session_is_refused_by_name_with_what_to_do(
    manifest: Manifest, text: str, message: str
) -> None:
    session = LastSession(manifest)
    session.path.parent.mkdir(parents=True)
    session.path.write_text(text, encoding="utf-8")
    with pytest.raises(ProfileError, match=message) as caught:
        session.load()
    assert str(session.path) in str(caught.value)
    assert "delete the file" in str(caught.value)


@pytest.mark.usefixtures("a_user_without_a_home")
def test_a_user_without_a_home_has_no_last_session(
    demo_pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["run", str(demo_pack), "-p", "One day", "-n", "1", "--warm", "last"]) == 1
    assert "has no home folder to keep a cache in; set HOME or XDG_CACHE_HOME" in capsys.readouterr().err


def test_a_profile_of_another_model_is_refused(demo_pack: Path, tmp_path: Path) -> None:
    record([[3, 1]]).profile(ORIGIN).save(tmp_path / "other.safetensors")
    with pytest.raises(ProfileError, match=r"other\.safetensors is the profile of another model.*layers"):
        load(demo_pack, warm=tmp_path / "other.safetensors")


def test_pins_without_a_start_are_refused(demo_pack: Path) -> None:
    with pytest.raises(UsageError, match=r"pin\+lru.*--warm"):
        load(demo_pack, policy="pin+lru")


def test_the_command_line_names_policy_and_start(demo_pack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stats = []
    for _ in range(2):
        options = ["--policy", "layer+lru", "--warm", "last", "--threads", "1", "--context", "64"]
        assert run(["run", str(demo_pack), "-p", "One day", "-n", "2", "--json", *options]) == 0
        printed = capsys.readouterr()
        stats.append(json.loads(printed.out)["stats"])
        assert f"policy layer+lru, {stats[-1]['experts_warmed']} experts read in" in printed.err
    assert stats[0]["experts_warmed"] == 0
    assert stats[1]["experts_warmed"] == stats[0]["misses"] > 0
    assert [figures["policy"] for figures in stats] == ["layer+lru"] * 2
    assert stats[1]["misses"] == 0


def test_loading_tells_of_the_memory_it_provides_and_of_what_it_reads(
    demo_pack: Path, manifest: Manifest, smallest_ram: int, profile_file: Path
) -> None:
    told: list[int] = []
    with load(
        demo_pack, ram=smallest_ram + (1 << 20), io="direct", warm=str(profile_file), progress=told.append
    ) as engine:
        strides = {entry.layer: entry.stride for entry in manifest.layers}
        provided = sum(
            num_slots * strides[layout.layers[0]]
            for layout, num_slots in zip(engine.budget.layouts, engine.budget.slots, strict=True)
        )
        warmed = [key.layer for key in engine.cache.retire()]
    assert 0 < len(warmed) < manifest.num_experts
    dense = sum(info.nbytes for info in manifest.shared)
    assert sum(told) == provided + dense + sum(strides[layer] for layer in warmed)

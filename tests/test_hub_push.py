"""Pushing to a local hub: what is there afterwards is the pack, with a card that says what it is."""

from __future__ import annotations

import json
import re
import time
from typing import TYPE_CHECKING

import pytest
from huggingface_hub import ModelCard
from huggingface_hub.utils import get_session
from huggingface_hub.utils._runtime import is_xet_available

import converters.hub_push
from converters.conversion import convert
from converters.hub_client import HubClient
from converters.hub_push import push
from lmpack.cli.main import run
from lmpack.errors import HubError, PackError
from lmpack.pack import Pack
from tests.gguf_fixtures import METADATA, gguf_bytes, moe_tensors
from tests.hub_server import Fault, HubServer
from tests.round_trip import files_below
from tests.safetensors_fixtures import SMALL_FILES, write_hf_folder
from tests.safetensors_fixtures import moe_tensors as hf_moe_tensors

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import TinyPack

REPO = "owner/tiny-pack"
# huggingface_hub uploads in a way that its HTTP library would like to see changed
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture
def hub(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    monkeypatch.setenv("HF_TOKEN", hub.token)
    return hub


def front_matter(card: bytes) -> dict[str, object]:
    found: dict[str, object] = ModelCard(card.decode()).data.to_dict()  # type: ignore[no-untyped-call]
    return found


def card_of(hub: HubServer, path: Path) -> bytes:
    push(HubClient(), path, REPO)
    return hub.repos[REPO].branches["main"].files["README.md"]


def test_a_pushed_pack_comes_back_the_same(hub: HubServer, tmp_path: Path, tiny_pack: TinyPack) -> None:
    assert run(["push", str(tiny_pack.path), REPO]) == 0
    there = hub.repos[REPO].branches["main"].files
    assert there.keys() - files_below(tiny_pack.path).keys() == {"README.md", ".gitattributes"}
    assert run(["pull", REPO, str(tmp_path / "back.lmpack")]) == 0
    assert files_below(tmp_path / "back.lmpack") == files_below(tiny_pack.path)


def test_no_request_waits_for_ever(hub: HubServer, tiny_pack: TinyPack) -> None:
    before = get_session().timeout
    limits: list[float | None] = []
    push(HubClient(), tiny_pack.path, REPO, progress=lambda _: limits.append(get_session().timeout.read))
    assert set(limits) == {converters.hub_push.SILENCE_S}
    assert get_session().timeout == before


def test_the_command_prints_where_the_pack_is(
    hub: HubServer, tiny_pack: TinyPack, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["push", str(tiny_pack.path), REPO, "--private", "--revision", "v2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    repo = hub.repos[REPO]
    assert repo.private
    assert document["url"] == f"{hub.url}/{REPO}"
    assert document["commit"] == repo.branches["v2"].commit
    assert document["pack_id"] == tiny_pack.manifest.pack_id
    assert document["new_card"] is True
    assert "manifest.json" not in repo.branches["main"].files


def test_a_second_push_sends_nothing_twice(hub: HubServer, tiny_pack: TinyPack) -> None:
    push(HubClient(), tiny_pack.path, REPO)
    sent = len(hub.asked("/upload/", "PUT"))
    assert sent > 0
    first = hub.repos[REPO].branches["main"].commit
    assert push(HubClient(), tiny_pack.path, REPO).commit == first
    assert len(hub.asked("/upload/", "PUT")) == sent


def test_another_pack_replaces_the_first_and_leaves_foreign_files(
    hub: HubServer, tmp_path: Path, tiny_pack: TinyPack, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(HubClient(), tiny_pack.path, REPO)
    hub.set_branch(
        REPO, "main", hub.repos[REPO].branches["main"].files | {"README.md": b"mine", "notes.txt": b"x"}
    )
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(moe_tensors(), METADATA))
    convert(tmp_path / "m.gguf", tmp_path / "m.lmpack")
    monkeypatch.setattr(converters.hub_push, "COMMIT_NUM_FILES", 3)
    report = push(HubClient(), tmp_path / "m.lmpack", REPO)
    foreign = {"README.md": b"mine", "notes.txt": b"x", ".gitattributes": b"*.bin lfs\n"}
    assert hub.repos[REPO].branches["main"].files == files_below(tmp_path / "m.lmpack") | foreign
    assert not report.has_new_card
    assert hub.repos[REPO].messages[1].startswith("Replace the pack")


def test_an_interrupted_push_leaves_no_manifest_and_goes_on(
    hub: HubServer, tiny_pack: TinyPack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(converters.hub_push, "COMMIT_NUM_FILES", 3)
    hub.fail(f"/api/models/{REPO}/commit/main", Fault(), Fault(status=418))
    with pytest.raises(HubError, match="answered 418"):
        push(HubClient(), tiny_pack.path, REPO)
    there = hub.repos[REPO].branches["main"].files
    assert len(there) == 4
    assert "manifest.json" not in there
    push(HubClient(), tiny_pack.path, REPO)
    assert hub.repos[REPO].branches["main"].files.items() >= files_below(tiny_pack.path).items()
    uploads = [request.path for request in hub.asked("/upload/", "PUT")]
    assert len(uploads) == len(set(uploads))


def test_an_upload_that_fails_is_one_error(hub: HubServer, tiny_pack: TinyPack) -> None:
    hub.fail("upload", *[Fault(status=403)] * 20)
    with pytest.raises(HubError, match=rf"{REPO}: .* forbids it"):
        push(HubClient(), tiny_pack.path, REPO)


def test_an_upload_is_tried_again_when_huggingface_hub_gave_it_up(
    hub: HubServer, tiny_pack: TinyPack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)  # between its own six tries
    hub.fail(f"/api/models/{REPO}/preupload/main", *[Fault(status=503)] * 6)
    waited: list[float] = []
    push(HubClient(wait=waited.append), tiny_pack.path, REPO)
    assert waited == [0]
    assert hub.repos[REPO].branches["main"].files.items() >= files_below(tiny_pack.path).items()


def test_a_hub_that_stays_busy_is_given_up_within_a_minute(
    hub: HubServer, tiny_pack: TinyPack, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)  # between huggingface_hub's own tries
    hub.fail(f"/api/models/{REPO}/preupload/main", *[Fault(status=503)] * 100)
    with pytest.raises(HubError, match="answered 503 again and again; try again later"):
        push(HubClient(wait=slept.append), tiny_pack.path, REPO)
    assert 20 < sum(slept) < 60


def test_a_hub_that_takes_no_more_files_is_one_error(
    hub: HubServer, tiny_pack: TinyPack, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.fail("batch", Fault(status=507))
    assert run(["push", str(tiny_pack.path), REPO]) == 1
    said = capsys.readouterr().err
    assert re.fullmatch(
        rf"lmpack: error: {REPO}: {hub.url} did not take files \(LFS batch .*no room.*\); run it again.*\n",
        said,
    )


def test_a_hub_without_xet_is_pushed_to_where_hf_xet_is_installed(
    hub: HubServer, tiny_pack: TinyPack
) -> None:
    pytest.importorskip("hf_xet")
    assert is_xet_available()
    push(HubClient(), tiny_pack.path, REPO)
    assert not [request.path for request in hub.requests if "xet" in request.path]
    assert is_xet_available()  # for what else the process does


def test_a_busy_hub_is_waited_for(hub: HubServer, tiny_pack: TinyPack) -> None:
    hub.fail(f"/api/models/{REPO}/commit/main", Fault(status=429, headers={"Retry-After": "33"}))
    waited: list[float] = []
    push(HubClient(wait=waited.append), tiny_pack.path, REPO)
    assert waited == [33]


def test_a_pack_that_does_not_validate_is_not_pushed(
    hub: HubServer, tiny_pack: TinyPack, capsys: pytest.CaptureFixture[str]
) -> None:
    expert = tiny_pack.path / "experts/L001/E0001.bin"
    raw = bytearray(expert.read_bytes())
    raw[7] ^= 0xFF
    expert.write_bytes(raw)
    with pytest.raises(PackError, match=r"expert L001/E0001 .*sha256 is .*; only a whole pack is pushed"):
        push(HubClient(), tiny_pack.path, REPO)
    assert not hub.requests


def test_somebody_elses_name_is_refused(
    hub: HubServer, tiny_pack: TinyPack, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["push", str(tiny_pack.path), "somebody-else/x"]) == 1
    said = capsys.readouterr().err
    assert "somebody-else/x: " in said
    assert "forbids it (You don't have the rights to create a model under the namespace)" in said
    assert said.count("\n") == 1


def test_the_card_of_a_gguf_says_what_its_metadata_says(hub: HubServer, tmp_path: Path) -> None:
    metadata = METADATA | {
        "general.license": "apache-2.0",
        "general.base_model.0.repo_url": "https://huggingface.co/owner/base",
        "general.name": "Tiny <b>| MoE",
    }
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(moe_tensors(), metadata))
    convert(tmp_path / "m.gguf", tmp_path / "m.lmpack")
    card = card_of(hub, tmp_path / "m.lmpack")
    assert front_matter(card) == {
        "library_name": "lmpack",
        "pipeline_tag": "text-generation",
        "tags": ["lmpack", "moe"],
        "license": "apache-2.0",
        "base_model": "owner/base",
    }
    manifest = Pack.open(tmp_path / "m.lmpack").manifest
    for fact in (
        "# Tiny  b   MoE",
        "| architecture | `tinymoe` |",
        "4 in each of 2 layers, 2 of them chosen for a token",
        manifest.pack_id,
        manifest.source.files[0].sha256,
        f"lmpack pull {REPO} tiny-pack.lmpack",
        'lmpack run tiny-pack.lmpack -p "',
    ):
        assert fact in card.decode()


def test_the_card_of_safetensors_says_what_the_sources_card_says(hub: HubServer, tmp_path: Path) -> None:
    source_card = (
        b"---\nlicense: other\nlicense_name: tiny\nbase_model: 'owner/base'\ntags: [x]\n---\n# A model\n"
    )
    folder = write_hf_folder(
        tmp_path / "hf", [hf_moe_tensors()], small_files=SMALL_FILES | {"README.md": source_card}
    )
    convert(folder, tmp_path / "m.lmpack")
    found = front_matter(card_of(hub, tmp_path / "m.lmpack"))
    assert (found["license"], found["license_name"], found["base_model"]) == ("other", "tiny", "owner/base")


@pytest.mark.parametrize("claim", ["x\n- injected: yes", "[a, b]", "a: b", "owner/base/else", "../..", ""])
def test_a_claim_that_is_no_plain_word_is_left_out(hub: HubServer, tmp_path: Path, claim: str) -> None:
    metadata = METADATA | {"general.license": claim, "general.base_model.0.repo_url": claim}
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(moe_tensors(), metadata))
    convert(tmp_path / "m.gguf", tmp_path / "m.lmpack")
    found = front_matter(card_of(hub, tmp_path / "m.lmpack"))
    assert found.keys() <= {"library_name", "pipeline_tag", "tags", "license"}
    assert found.get("license") in (None, claim)

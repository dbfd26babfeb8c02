"""What goes wrong with a hub is one line each, says what to do, and never shows the token."""

from __future__ import annotations

import re
import socket
from typing import TYPE_CHECKING

import pytest
from huggingface_hub import constants

import converters.hub_repo
from lmpack.cli.main import run
from tests.gguf_fixtures import METADATA, gguf_bytes, moe_tensors
from tests.hub_server import Fault, HubServer
from tests.safetensors_fixtures import moe_tensors as hf_moe_tensors
from tests.safetensors_fixtures import write_hf_folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

REPO = "owner/model"


def error_of(args: list[str], capsys: pytest.CaptureFixture[str], code: int = 1) -> str:
    assert run(args) == code
    shown = capsys.readouterr()
    assert not shown.out
    assert re.fullmatch(r"lmpack: error: .+\n", shown.err)
    return shown.err


def test_no_network(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
    said = error_of(["pull", REPO], capsys)
    assert f"owner/model: http://127.0.0.1:{port} cannot be reached" in said
    assert "check the network, the proxy and HF_ENDPOINT" in said


def test_offline_mode(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in error_of(["pull", REPO], capsys)
    assert not hub.requests


def test_an_endpoint_that_is_no_hub(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.fail(f"/api/models/{REPO}/revision/main", Fault(no_ranges=True))
    assert "gives a malformed list of files" in error_of(["pull", REPO], capsys)
    monkeypatch.setenv("HF_ENDPOINT", "hub.example")
    assert "HF_ENDPOINT is 'hub.example', expected https://" in error_of(["pull", REPO], capsys, 2)


@pytest.mark.parametrize("step", [0, 1], ids=["the same page", "one more page"])
def test_a_list_of_files_without_an_end(
    hub: HubServer, step: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(converters.hub_repo, "MAX_PAGES", 20)
    hub.add(REPO, {"m.gguf": gguf_bytes(moe_tensors(), METADATA)})
    commit = hub.repos[REPO].branches["main"].commit
    hub.next_page = lambda start: f"{hub.url}/api/models/{REPO}/tree/{commit}?cursor={start + step}"
    assert "gives a malformed list of files (its pages have no end)" in error_of(["pull", REPO], capsys)


def test_no_other_server_gets_the_token_by_a_next_page(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(converters.hub_repo, "MAX_PAGES", 20)
    hub.add(REPO, {"m.gguf": gguf_bytes(moe_tensors(), METADATA)})
    commit = hub.repos[REPO].branches["main"].commit
    host = hub.url.replace("127.0.0.1", "localhost")
    hub.next_page = lambda start: f"{host}/api/models/{REPO}/tree/{commit}?cursor={start + 1}"
    error_of(["pull", REPO, "--token", "hf_secret"], capsys)
    first, *others = [request for request in hub.requests if "/tree/" in request.path]
    assert first.has_token
    assert others
    assert not any(request.has_token for request in others)


INCOMPLETE: dict[str, tuple[Callable[[dict[str, bytes]], object], str]] = {
    "a shard is missing": (
        lambda files: files.pop("model-00002-of-00002.safetensors"),
        "error: owner/model: shard model-00002-of-00002.safetensors is missing",
    ),
    "a page": (
        lambda files: files.update({"config.json": b"<html>"}),
        "error: owner/model: config.json: is a web page",
    ),
    "two files of one name in a pack": (
        lambda files: files.update({"model-00001-of-00002.safetensors.rest": b""}),
        "error: owner/model: source file 'model-00001-of-00002.safetensors.rest': its name or",
    ),
}


@pytest.mark.parametrize("what", INCOMPLETE)
def test_what_is_wrong_with_a_repository_is_not_blamed_on_the_local_folder(
    hub: HubServer, tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change, message = INCOMPLETE[what]
    tensors = hf_moe_tensors()
    folder = write_hf_folder(tmp_path / "hf", [tensors[:9], tensors[9:]])
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    change(files)
    hub.add(REPO, files)
    said = error_of(["pull", REPO], capsys)
    assert message in said
    assert said.endswith("(so it is in the repository: tell its owner, or pull another)\n")


@pytest.mark.parametrize("token", [None, "hf_secret"])
def test_no_such_repository(hub: HubServer, token: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    said = error_of(["pull", REPO, *(["--token", token] if token else [])], capsys)
    assert f"owner/model: no such repository on {hub.url}; if it is private: " in said
    assert ("your token may not see it" if token else "set HF_TOKEN, or run: hf auth login") in said


@pytest.mark.parametrize("name", ["a/b/c", "../x", "-x/y", "", "a b/c", "x" * 200, "a/..b"])
def test_a_name_that_is_none_asks_nobody(
    hub: HubServer, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "is no repository; expected OWNER/NAME" in error_of(["pull", "--", name], capsys, 2)
    assert not hub.requests


def test_the_address_of_a_page_is_no_name(hub: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    said = error_of(["pull", f"{hub.url}/{REPO}"], capsys, 2)
    assert f"{REPO}' is an address; name what follows the host in it: OWNER/NAME" in said
    assert not hub.requests


@pytest.mark.parametrize(
    "raw", [b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", b"<html></html>"]
)
def test_what_was_uploaded_in_place_of_weights_is_the_owners_to_mend(
    hub: HubServer, raw: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add(REPO, {"m-Q8_0.gguf": raw})
    said = error_of(["pull", REPO], capsys)
    assert said.startswith(f"lmpack: error: {REPO}: m-Q8_0.gguf: is a ")
    assert said.endswith("(so it is in the repository: tell its owner, or pull another)\n")


def test_no_such_revision(hub: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    hub.add(REPO, {"m.gguf": b"x"})
    said = error_of(["pull", REPO, "--revision", "v9"], capsys)
    assert "owner/model at v9: no such revision; name a branch, a tag or a commit" in said


def test_a_gated_repository_without_a_token(hub: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    hub.add(REPO, {"m.gguf": gguf_bytes(moe_tensors(), METADATA)}, gated=True)
    said = error_of(["pull", REPO], capsys)
    assert f"is gated: accept its terms on {hub.url}, then set HF_TOKEN, or run: hf auth login" in said


def test_a_repository_without_weights(hub: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    hub.add(REPO, {"README.md": b"# words", "pytorch_model.bin": b"pickle", "mmproj-F16.gguf": b"eyes"})
    said = error_of(["pull", REPO], capsys)
    assert "owner/model: holds no pack, no *.gguf and no *.safetensors (README.md, " in said


@pytest.mark.parametrize("path", ["../evil.gguf", "/etc/evil.gguf", "a/../../evil.gguf", "a\\evil.gguf"])
def test_a_path_that_leaves_the_folder(hub: HubServer, path: str, capsys: pytest.CaptureFixture[str]) -> None:
    hub.add(REPO, {path: gguf_bytes(moe_tensors(), METADATA)})
    assert "gives a malformed list of files (path: expected a relative path" in error_of(
        ["pull", REPO], capsys
    )


@pytest.mark.parametrize(
    ("start", "says"),
    [
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0",
            "is a Git LFS pointer, not the file itself",
        ),
        (b"<!doctype html>", "is a web page (HTML)"),
        (b"GGUF" + bytes(3000), "GGUF version 0"),
        (gguf_bytes(moe_tensors(), METADATA)[:-5000], "ends at byte"),
    ],
    ids=["pointer", "page", "version", "truncated"],
)
def test_a_broken_header_is_found_before_the_file_comes(
    hub: HubServer, start: bytes, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add(REPO, {"m.gguf": start})
    assert says in error_of(["pull", REPO], capsys)


@pytest.mark.parametrize("command", ["pull", "push"])
def test_a_token_that_a_hub_repeats_is_not_shown(
    hub: HubServer, command: str, demo_pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add(REPO, {})
    hub.fail(
        f"/api/models/{REPO}/revision/main", Fault(status=418, headers={"X-Error-Message": "no hf_abcdef"})
    )
    args = ["pull", REPO] if command == "pull" else ["push", str(demo_pack), REPO]
    assert "hf_abcdef" not in error_of([*args, "--token", "hf_abcdef"], capsys)
    assert "hf_secret" not in error_of([*args, "--token", "hf_abcdef"], capsys)

"""Pulling from a local hub: which files come, how often, and that a pulled model is the pack `convert` makes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from converters.conversion import convert
from converters.hub_client import HubClient
from converters.hub_model import choose_model
from converters.hub_pull import download_folder, pull
from converters.hub_repo import HubRepo
from lmpack.cli.main import run
from lmpack.errors import HubError, PackError, StorageError, UsageError
from lmpack.pack import Pack
from lmpack.validation import validate
from tests.gguf_fixtures import METADATA, gguf_bytes, moe_tensors, write_shards
from tests.hub_server import Fault, HubServer
from tests.round_trip import files_below
from tests.safetensors_fixtures import moe_tensors as hf_moe_tensors
from tests.safetensors_fixtures import write_hf_folder

if TYPE_CHECKING:
    from pathlib import Path

    from converters.hub_pull import PullReport
    from tests.conftest import TinyPack

REPO = "owner/model-GGUF"
MODES = pytest.mark.parametrize("discard_source", [False, True], ids=["kept", "discarded"])


def split_set(folder: Path, stem: str = "model-Q4_K_M", dtype: str = "F16") -> list[Path]:
    """Three shards; experts of one layer lie in two of them."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = moe_tensors(dtype=dtype)
    third = len(tensors) // 3
    return write_shards(
        folder, [tensors[:third], tensors[third : 2 * third], tensors[2 * third :]], stem=stem
    )


def pulled(dst: Path, repo_id: str = REPO, wanted: str | None = None, **options: object) -> PullReport:
    repo = HubRepo.open(HubClient(), repo_id)
    return pull(repo, choose_model(repo, wanted), dst, **options)  # type: ignore[arg-type]


def pack_id(path: Path) -> str:
    assert validate(path).ok
    return Pack.open(path).manifest.pack_id


@MODES
def test_a_split_gguf_becomes_the_pack_that_converting_it_gives(
    hub: HubServer, tmp_path: Path, discard_source: bool
) -> None:
    shards = split_set(tmp_path / "source")
    hub.add(REPO, {f"Q4_K_M/{path.name}": path.read_bytes() for path in shards})
    convert(shards[0], tmp_path / "wanted.lmpack")
    report = pulled(tmp_path / "m.lmpack", discard_source=discard_source)
    assert pack_id(tmp_path / "m.lmpack") == pack_id(tmp_path / "wanted.lmpack") == report.pack_id
    assert report.downloaded_nbytes == report.nbytes == sum(path.stat().st_size for path in shards)
    assert not download_folder(tmp_path / "m.lmpack").exists()


@MODES
def test_safetensors_come_with_their_small_files_and_without_other_weights(
    hub: HubServer, tmp_path: Path, discard_source: bool
) -> None:
    tensors = hf_moe_tensors()
    third = len(tensors) // 3
    folder = write_hf_folder(
        tmp_path / "source", [tensors[:third], tensors[third : 2 * third], tensors[2 * third :]]
    )
    convert(folder, tmp_path / "wanted.lmpack")
    unwanted = {"pytorch_model.bin": bytes(3000), "consolidated.safetensors": b"x" * 3000, ".cache/x": b"x"}
    hub.add("owner/model", files_below(folder) | unwanted)
    pulled(tmp_path / "m.lmpack", "owner/model", discard_source=discard_source)
    assert pack_id(tmp_path / "m.lmpack") == pack_id(tmp_path / "wanted.lmpack")
    assert not [name for name in unwanted if hub.asked(f"/{name}")]


def test_what_is_no_part_of_the_checkpoint_is_named_as_convert_names_it(
    hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_hf_folder(tmp_path / "source", [hf_moe_tensors()[:6], hf_moe_tensors()[6:]])
    (folder / "tokenizer.json").unlink(missing_ok=True)
    files = files_below(folder) | {"pytorch_model.bin": b"x", "consolidated.safetensors": b"x" * 99}
    for name, raw in files.items():
        (folder / name).write_bytes(raw)
    hub.add("owner/model", files | {".cache/x.bin": b"x"})
    assert run(["convert", str(folder), str(tmp_path / "c.lmpack"), "--json"]) == 0
    converted = json.loads(capsys.readouterr().out)
    assert converted["left_out"] == ["consolidated.safetensors", "pytorch_model.bin"]
    assert converted["missing"] == ["a tokenizer.json or tokenizer.model"]
    assert run(["pull", "owner/model", str(tmp_path / "a.lmpack"), "--json"]) == 0
    pulled_too = json.loads(capsys.readouterr().out)
    assert [pulled_too[key] for key in ("left_out", "missing")] == [
        converted[key] for key in ("left_out", "missing")
    ]
    assert run(["pull", "owner/model", str(tmp_path / "b.lmpack")]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "left out, no part of the checkpoint: consolidated.safetensors",
        "left out, no part of the checkpoint: pytorch_model.bin",
        "lmpack run will need what this checkpoint lacks: a tokenizer.json or tokenizer.model",
    ]


def test_a_ready_pack_is_fetched_and_validated(hub: HubServer, tmp_path: Path, tiny_pack: TinyPack) -> None:
    files = files_below(tiny_pack.path)
    hub.add("owner/tiny.lmpack", files | {"README.md": b"# a card\n", ".gitattributes": b"*"})
    report = pulled(tmp_path / "m.lmpack", "owner/tiny.lmpack")
    assert report.kind == "pack"
    assert files_below(tmp_path / "m.lmpack") == files
    assert not download_folder(tmp_path / "m.lmpack").exists()


def test_a_pack_with_a_damaged_file_is_refused_and_fetched_again_next_time(
    hub: HubServer, tmp_path: Path, tiny_pack: TinyPack
) -> None:
    files = files_below(tiny_pack.path)
    damaged = files["experts/L001/E0001.bin"]
    hub.add("owner/tiny", files | {"experts/L001/E0001.bin": damaged[:-1] + b"\x01"})
    with pytest.raises(
        HubError, match=r"1 file\(s\) do not fit the manifest: expert L001/E0001 .*run it again"
    ):
        pulled(tmp_path / "m.lmpack", "owner/tiny")
    assert not (tmp_path / "m.lmpack").exists()
    hub.set_branch("owner/tiny", "main", files)
    hub.requests.clear()
    left = download_folder(tmp_path / "m.lmpack") / "experts" / "L009"
    left.mkdir()
    (left / "E0000.bin").write_bytes(b"of another revision")
    pulled(tmp_path / "m.lmpack", "owner/tiny")
    assert files_below(tmp_path / "m.lmpack") == files
    assert len(hub.asked("/resolve/")) == 2  # the manifest and the one bad file


def test_a_pack_that_lacks_a_file_is_refused_before_anything_large_comes(
    hub: HubServer, tmp_path: Path, tiny_pack: TinyPack
) -> None:
    files = files_below(tiny_pack.path)
    del files["experts/L003/E0001.bin"]
    hub.add("owner/tiny", files)
    with pytest.raises(
        PackError, match=r"owner/tiny: experts/L003/E0001\.bin: is missing.*upload is not complete"
    ):
        pulled(tmp_path / "m.lmpack", "owner/tiny")
    assert len(hub.asked("/resolve/")) == 1


@pytest.mark.parametrize(
    "wanted", ["q4_k_m", "Q4_K_M", "model-Q4_K_M-00001-of-00003.gguf", "Q8_0", "big-F16"]
)
def test_a_quantization_is_found_by_its_name_in_any_case(hub: HubServer, tmp_path: Path, wanted: str) -> None:
    shards = split_set(tmp_path / "source")
    single = {
        name: gguf_bytes(moe_tensors(), METADATA)
        for name in ("sub/model-UD-Q8_0.gguf", "big-F16.gguf", "small-F16.gguf")
    }
    extra = {"mmproj-F16.gguf": b"x", "imatrix.gguf": b"x"}
    hub.add(REPO, {path.name: path.read_bytes() for path in shards} | single | extra)
    model = choose_model(HubRepo.open(HubClient(), REPO), wanted)
    expected = {"q4_k_m": 3, "model-q4_k_m-00001-of-00003.gguf": 3}.get(wanted.lower(), 1)
    assert len(model.weights) == expected


@pytest.mark.parametrize(
    ("name", "says"), [("", "offers 4 models"), (":Q2_K", "has no 'Q2_K'"), (":F16", "offers 2 models")]
)
def test_what_is_ambiguous_or_missing_is_answered_with_the_list(
    hub: HubServer, tmp_path: Path, name: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {
        f"{stem}.gguf": gguf_bytes(moe_tensors(), METADATA)
        for stem in ("m-Q4_K_M", "m-Q8_0", "a-F16", "b-F16")
    }
    hub.add(REPO, files)
    assert run(["pull", REPO + name, str(tmp_path / "m.lmpack")]) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert says in shown
    assert "a-F16 (gguf, " in shown
    assert f"name one as {REPO}:NAME" in shown


def test_the_command_prints_what_it_made_and_names_it_after_the_model(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add(REPO, {"model-Q8_0.gguf": gguf_bytes(moe_tensors(), METADATA)})
    monkeypatch.chdir(tmp_path)
    assert run(["pull", f"{REPO}:q8_0", "--discard-source", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["pack"] == "model-Q8_0.lmpack"
    assert document["commit"] == hub.repos[REPO].branches["main"].commit
    assert pack_id(tmp_path / "model-Q8_0.lmpack") == document["pack_id"]


def test_another_revision_is_pulled_by_its_name(hub: HubServer, tmp_path: Path) -> None:
    hub.add(REPO, {"m-Q8_0.gguf": b"not this one"})
    hub.set_branch(REPO, "v2", {"m-Q8_0.gguf": gguf_bytes(moe_tensors(), METADATA)})
    assert run(["pull", REPO, str(tmp_path / "m.lmpack"), "--revision", "v2"]) == 0
    assert validate(tmp_path / "m.lmpack").ok


def test_a_cut_connection_is_taken_up_where_it_broke(hub: HubServer, tmp_path: Path) -> None:
    raw = gguf_bytes(moe_tensors(), METADATA)
    hub.add(REPO, {"m-Q8_0.gguf": raw})
    hub.fail("m-Q8_0.gguf", Fault(), Fault(cut_after=5000), Fault(cut_after=0), Fault(cut_after=7000))
    pulled(tmp_path / "m.lmpack")
    ranges = [request.range for request in hub.requests if request.server == "store"]
    whole = f"-{len(raw) - 1}"
    assert ranges[1:] == [f"bytes={start}{whole}" for start in (0, 5000, 5000, 12000)]


def test_a_broken_pull_goes_on_at_the_byte_where_it_stopped(hub: HubServer, tmp_path: Path) -> None:
    raw = gguf_bytes(moe_tensors(), METADATA)
    hub.add(REPO, {"m-Q8_0.gguf": raw})
    hub.fail("m-Q8_0.gguf", Fault(), Fault(cut_after=9000), Fault(status=404))
    with pytest.raises(HubError):
        pulled(tmp_path / "m.lmpack", discard_source=True)
    report = pulled(tmp_path / "m.lmpack", discard_source=True)
    assert report.downloaded_nbytes == len(raw) - 9000
    assert hub.requests[-1].range == f"bytes=9000-{len(raw) - 1}"
    assert pack_id(tmp_path / "m.lmpack") == report.pack_id


@pytest.mark.parametrize(
    ("fault", "waits"),
    [
        (Fault(status=429, headers={"Retry-After": "55"}), [55, 55]),
        (Fault(status=429, headers={"RateLimit": '"resolvers";r=0;t=42'}), [42, 42]),
        (Fault(status=503, headers={"Retry-After": "7"}), [7, 7]),
        (Fault(status=503), [0, 1]),
        (Fault(status=500), [0, 1]),
    ],
    ids=["429", "429 by its rate limit", "503 with a time", "503", "500"],
)
@pytest.mark.parametrize("path", [f"/api/models/{REPO}/revision/main", "m-Q8_0.gguf"])
def test_a_busy_hub_is_waited_for_as_long_as_it_asks(
    hub: HubServer, tmp_path: Path, fault: Fault, waits: list[float], path: str
) -> None:
    hub.add(REPO, {"m-Q8_0.gguf": gguf_bytes(moe_tensors(), METADATA)})
    hub.fail(path, fault, fault)
    waited: list[float] = []
    told: list[str] = []
    repo = HubRepo.open(HubClient(wait=waited.append, notice=told.append), REPO)
    pull(repo, choose_model(repo, None), tmp_path / "m.lmpack")
    assert waited == waits
    noticed = [seconds for seconds in waits if seconds >= 10]
    assert len(told) == len(noticed)
    assert all(
        f"{hub.url} answered 429; asking again in {seconds} s" in text
        for text, seconds in zip(told, noticed, strict=True)
    )


def test_a_hub_that_stays_busy_is_given_up(hub: HubServer) -> None:
    hub.add(REPO, {"m-Q8_0.gguf": b"x"})
    hub.fail(f"/api/models/{REPO}/revision/main", *[Fault(status=503)] * 6)
    waited: list[float] = []
    with pytest.raises(HubError, match=r"answered 503 again and again; try again later"):
        HubRepo.open(HubClient(wait=waited.append), REPO)
    assert waited == [0, 1, 2, 4, 8]


def test_wrong_bytes_are_fetched_again_once_and_never_kept(hub: HubServer, tmp_path: Path) -> None:
    raw = gguf_bytes(moe_tensors(), METADATA)
    hub.add(REPO, {"m-Q8_0.gguf": raw})
    hub.fail("m-Q8_0.gguf", Fault(), Fault(flip=len(raw) - 40))
    report = pulled(tmp_path / "good.lmpack", discard_source=True)
    assert report.downloaded_nbytes == 2 * len(raw)
    hub.fail("m-Q8_0.gguf", Fault(), Fault(flip=len(raw) - 40), Fault(flip=len(raw) - 40))
    with pytest.raises(
        HubError, match=r"m-Q8_0\.gguf: the bytes that came hash to [0-9a-f]{12}…, the hub says"
    ):
        pulled(tmp_path / "m.lmpack", discard_source=True)
    assert not (tmp_path / "m.lmpack").exists()
    assert not list(download_folder(tmp_path / "m.lmpack").rglob("files/*"))


def test_a_header_that_is_not_the_files_is_noticed(hub: HubServer, tmp_path: Path) -> None:
    raw = gguf_bytes(moe_tensors(), METADATA)
    hub.add(REPO, {"m-Q8_0.gguf": raw})
    hub.fail("m-Q8_0.gguf", Fault(flip=raw.index(b"a test")))
    with pytest.raises(HubError, match="the header that came first is not the file's"):
        pulled(tmp_path / "m.lmpack")


def test_a_server_without_ranges_is_refused_when_they_are_needed(hub: HubServer, tmp_path: Path) -> None:
    hub.add(REPO, {"m-Q8_0.gguf": gguf_bytes(moe_tensors(), METADATA)})
    hub.fail("m-Q8_0.gguf", Fault(), Fault(cut_after=5000), Fault(no_ranges=True))
    with pytest.raises(HubError, match=r"asked for bytes from 5000 on.*use another HF_ENDPOINT"):
        pulled(tmp_path / "m.lmpack")


@MODES
def test_a_drive_without_room_is_noticed_before_the_first_large_download(
    hub: HubServer, tmp_path: Path, discard_source: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = split_set(tmp_path / "source")
    hub.add(REPO, {path.name: path.read_bytes() for path in shards})
    real = os.statvfs(tmp_path)
    total = sum(path.stat().st_size for path in shards)

    class NearlyFull:
        f_bavail, f_frsize, f_flag = 2 * total // 4096, 4096, real.f_flag
        f_files, f_favail = real.f_files, real.f_favail

    monkeypatch.setattr("os.statvfs", lambda _: NearlyFull)
    with pytest.raises(StorageError, match=r"m\.lmpack: needs .* free"):
        pulled(tmp_path / "m.lmpack", discard_source=discard_source)
    assert len([request for request in hub.requests if request.server == "store"]) == len(shards)  # headers
    assert not (tmp_path / "m.lmpack.download").exists()


def test_the_store_of_large_files_never_sees_the_token(hub: HubServer, tmp_path: Path) -> None:
    hub.add(REPO, {"m-Q8_0.gguf": gguf_bytes(moe_tensors(), METADATA)}, gated=True)
    assert run(["pull", REPO, str(tmp_path / "m.lmpack"), "--token", hub.token]) == 0
    assert {(request.server, request.has_token) for request in hub.requests} == {
        ("hub", True),
        ("store", False),
    }


def test_a_destination_that_exists_or_is_inside_of_a_pack_is_refused_first(
    hub: HubServer, tmp_path: Path, demo_gguf: Path
) -> None:
    hub.add(REPO, {"m-Q8_0.gguf": gguf_bytes(moe_tensors(), METADATA)})
    (tmp_path / "m.lmpack").mkdir()
    with pytest.raises(UsageError, match="exists; choose another name"):
        pulled(tmp_path / "m.lmpack")
    convert(demo_gguf, tmp_path / "pack")
    with pytest.raises(UsageError, match=r"x: would damage the pack .*; write outside of it"):
        pulled(tmp_path / "pack" / "x")
    assert validate(tmp_path / "pack").ok


def test_ctrl_c_says_how_to_go_on_and_the_same_command_does(hub: HubServer, tmp_path: Path) -> None:
    raw = gguf_bytes(moe_tensors(), METADATA)
    hub.add(REPO, {"m-Q8_0.gguf": raw})
    command = [sys.executable, "-m", "lmpack", "pull", REPO, str(tmp_path / "m.lmpack"), "--discard-source"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    signal.signal(signal.SIGINT, before)

    incomplete = tmp_path / "m.lmpack.download" / "files" / "m-Q8_0.gguf.incomplete"

    def interrupt() -> None:
        give_up = time.monotonic() + 60
        while not (incomplete.exists() and incomplete.stat().st_size) and time.monotonic() < give_up:
            os.sched_yield()
        process.send_signal(signal.SIGINT)
        process.wait()  # the connection stays open and silent until then

    hub.fail("m-Q8_0.gguf", Fault(), Fault(cut_after=9000, then=interrupt))
    with process:
        _, errors = process.communicate()
    assert process.returncode == 130
    assert errors.rstrip() == (
        f"lmpack: interrupted; the same command goes on from what is in {tmp_path}/m.lmpack.download"
    )
    left = incomplete.stat().st_size
    assert 0 < left <= 9000
    subprocess.run(command, check=True, capture_output=True)
    assert hub.requests[-1].range == f"bytes={left}-{len(raw) - 1}"
    assert validate(tmp_path / "m.lmpack").ok

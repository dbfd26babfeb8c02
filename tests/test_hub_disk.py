"""How much of the drive a pull takes at its worst moment, and what an interrupted one does not fetch twice."""

from __future__ import annotations

import os
import threading
from functools import partial
from typing import TYPE_CHECKING, Self

import pytest

from converters.hub_client import HubClient
from converters.hub_model import choose_model
from converters.hub_pull import download_folder, pull
from converters.hub_repo import HubRepo
from lmpack.errors import HubError, UsageError
from lmpack.validation import validate
from tests.hub_server import Fault, HubServer
from tests.safetensors_fixtures import moe_tensors, safetensors_bytes

if TYPE_CHECKING:
    from pathlib import Path

REPO = "owner/model"
SLACK_NBYTES = 256 << 10  # headers of the stand-ins, the journal, folders


@pytest.fixture(scope="module")
def shards() -> dict[str, bytes]:
    """Three shards of one layer each, 4 MB."""
    tensors = moe_tensors(num_layers=3, num_experts=8, hidden=256, width=336)
    number_of = {
        tensor.name: int(tensor.name.split(".")[2]) if ".layers." in tensor.name else 0 for tensor in tensors
    }
    return {
        f"model-{n + 1:05}-of-00003.safetensors": safetensors_bytes(
            [tensor for tensor in tensors if number_of[tensor.name] == n]
        )
        for n in range(3)
    }


def used_nbytes(folder: Path) -> int:
    """What the files below a folder take on the drive, counting no name twice and no hole at all."""
    used = 0
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                used += os.lstat(os.path.join(where, name)).st_blocks * 512
            except FileNotFoundError:  # it has its final name now
                continue
    return used


class Watch:
    """Looks at a folder as often as it can, in a thread of its own and whenever bytes have come."""

    def __init__(self, folder: Path) -> None:
        self.peak_nbytes = 0
        self._folder = folder
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def look(self, _: int = 0) -> None:
        self.peak_nbytes = max(self.peak_nbytes, used_nbytes(self._folder))

    def _run(self) -> None:
        while not self._ended.is_set():
            self.look()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


@pytest.mark.parametrize("discard_source", [True, False], ids=["discarded", "kept"])
def test_a_discarded_source_takes_the_pack_and_two_shards_at_most(
    hub: HubServer, tmp_path: Path, shards: dict[str, bytes], discard_source: bool
) -> None:
    hub.add(REPO, {**shards, "config.json": b'{"model_type": "tinymoe", "num_hidden_layers": 3}'})
    repo = HubRepo.open(HubClient(), REPO)
    drive = tmp_path / "drive"
    drive.mkdir()
    with Watch(drive) as watch:
        pull(
            repo,
            choose_model(repo, None),
            drive / "m.lmpack",
            discard_source=discard_source,
            cache_folder=drive / "cache",
            progress=watch.look,
        )
    pack_nbytes, largest = used_nbytes(drive / "m.lmpack"), max(map(len, shards.values()))
    assert validate(drive / "m.lmpack").ok
    shards_nbytes = watch.peak_nbytes - pack_nbytes
    if discard_source:
        assert shards_nbytes <= 2 * largest + SLACK_NBYTES
        assert used_nbytes(drive) == pack_nbytes
    else:
        assert shards_nbytes >= sum(map(len, shards.values()))


def test_a_discarded_shard_that_is_in_the_pack_is_not_fetched_again(
    hub: HubServer, tmp_path: Path, shards: dict[str, bytes]
) -> None:
    hub.add(REPO, {**shards, "config.json": b'{"model_type": "tinymoe", "num_hidden_layers": 3}'})
    third = sorted(shards)[2]
    hub.fail(third, Fault(), Fault(), Fault(status=404))  # the header takes two requests
    repo = HubRepo.open(HubClient(), REPO)
    with pytest.raises(HubError, match="is no longer there"):
        pull(repo, choose_model(repo, None), tmp_path / "m.lmpack", discard_source=True)
    repo = HubRepo.open(HubClient(), REPO)
    report = pull(repo, choose_model(repo, None), tmp_path / "m.lmpack", discard_source=True)
    assert report.downloaded_nbytes == len(shards[third])
    assert validate(tmp_path / "m.lmpack").ok


@pytest.mark.parametrize("discard_source", [True, False], ids=["discarded", "kept"])
def test_two_pulls_to_one_name_do_not_mix(
    hub: HubServer, tmp_path: Path, shards: dict[str, bytes], discard_source: bool
) -> None:
    hub.add(REPO, shards)
    repo = HubRepo.open(HubClient(), REPO)
    again = partial(
        pull,
        repo,
        choose_model(repo, None),
        tmp_path / "m.lmpack",
        discard_source=discard_source,
        cache_folder=tmp_path / "cache",
    )
    refused = []

    def second(_: int) -> None:
        with pytest.raises(UsageError, match=r"m\.lmpack\.download: another pull is fetching into it; wait"):
            again()
        refused.append(1)

    again(progress=second)
    assert refused
    assert validate(tmp_path / "m.lmpack").ok
    assert not download_folder(tmp_path / "m.lmpack").exists()

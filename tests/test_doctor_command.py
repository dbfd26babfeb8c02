"""lmpack doctor: figures of the drive, of a pack's or of a folder's."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from lmpack.cli import doctor
from lmpack.cli.main import run
from tests.expert_packs import write_expert_pack

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Less to read than on a real drive, and no figures of the user's."""
    monkeypatch.setattr(doctor, "_LIMIT_S", 0.01)
    monkeypatch.setattr(doctor, "_SCRATCH_NBYTES", 32 << 20)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_folder_is_measured_with_a_file_that_goes_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    assert run(["doctor", str(folder), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert list(folder.iterdir()) == []
    cells = [(rate["request_nbytes"], rate["in_flight"], rate["direct"]) for rate in document["reads"]]
    assert sorted(cells) == [
        (nbytes, in_flight, direct)
        for nbytes in (4096, 2 << 20, 8 << 20)
        for in_flight in (1, 8)
        for direct in (False, True)
    ]
    for rate in document["reads"]:
        is_refused = rate["direct"] and rate["gigabytes_per_s"] is None
        assert is_refused or rate["gigabytes_per_s"] > 0
    assert document["io"] is None


def test_a_pack_is_left_as_it_is_and_the_choice_for_it_is_said(
    demo_pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    beside = {path.name for path in demo_pack.parent.iterdir()}
    assert run(["doctor", str(demo_pack)]) == 0
    out = capsys.readouterr().out
    assert "request     in flight    direct  buffered   GB/s\n   4.0 KiB          1" in out
    assert "--io auto   direct, 8 reads in flight (below 256.0 MiB it is not measured)\n" in out
    assert run(["validate", str(demo_pack)]) == 0
    assert {path.name for path in demo_pack.parent.iterdir()} == beside


def test_a_run_that_would_be_refused_is_said_beside_the_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pack = write_expert_pack(tmp_path / "experts.lmpack")
    assert run(["doctor", str(pack.path)]) == 0
    out = capsys.readouterr().out
    assert "request     in flight    direct  buffered   GB/s\n" in out
    assert "lmpack run  is refused: architecture 'tinymoe' can be packed but not run yet" in out
    assert "--io auto" not in out


@pytest.mark.usefixtures("a_user_without_a_home")
def test_a_user_without_a_home_gets_the_figures(demo_pack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", str(demo_pack), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["remembered_in"] is None
    assert document["io"]["store"] == "direct"


def test_a_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert run(["doctor", str(tmp_path / "file")]) == 2
    assert "is a file" in capsys.readouterr().err

"""lmpack validate, as a person or a script meets it."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from lmpack.cli.main import run

if TYPE_CHECKING:
    import pytest

    from tests.conftest import TinyPack


def test_a_good_pack_gives_one_line_and_exit_code_0(
    tiny_pack: TinyPack, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["validate", str(tiny_pack.path)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"{tiny_pack.path}: good, 9 files, ")
    assert out.count("\n") == 1
    assert err == ""


def test_quick_reads_names_and_sizes_only(tiny_pack: TinyPack, capsys: pytest.CaptureFixture[str]) -> None:
    (tiny_pack.path / "shared.bin").write_bytes(bytes(16384))
    assert run(["validate", str(tiny_pack.path), "--quick"]) == 0
    assert "names and sizes checked" in capsys.readouterr().out
    assert run(["validate", str(tiny_pack.path)]) == 1


def test_each_bad_file_has_a_line_and_the_exit_code_is_1(
    tiny_pack: TinyPack, capsys: pytest.CaptureFixture[str]
) -> None:
    os.truncate(tiny_pack.path / "experts/L003/E0001.bin", 100)
    (tiny_pack.path / "source/config.json").unlink()
    assert run(["validate", str(tiny_pack.path), "--jobs", "2"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "expert L003/E0001 (experts/L003/E0001.bin): truncated: 100 bytes, expected 16384"
    assert lines[1] == "source/config.json: missing, expected 26 bytes"
    assert lines[2].startswith(f"{tiny_pack.path}: 2 bad files of 9 (")


def test_json_has_every_problem_in_one_document(
    tiny_pack: TinyPack, capsys: pytest.CaptureFixture[str]
) -> None:
    os.truncate(tiny_pack.path / "experts/L003/E0001.bin", 100)
    assert run(["validate", str(tiny_pack.path), "--json", "--quick"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is False
    assert document["quick"] is True
    assert document["num_files"] == 9
    assert document["problems"] == [
        {
            "file": "experts/L003/E0001.bin",
            "layer": 3,
            "expert": 1,
            "message": "truncated: 100 bytes, expected 16384",
        }
    ]
    assert document.keys() == {"pack", "ok", "quick", "num_files", "nbytes", "seconds", "problems"}


def test_wrong_usage_is_exit_code_2(tiny_pack: TinyPack) -> None:
    assert run(["validate", str(tiny_pack.path / "nothing")]) == 2
    assert run(["validate", str(tiny_pack.path), "--jobs", "0"]) == 2


def test_the_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["validate", "--help"]) == 0
    assert "lmpack validate qwen3.lmpack --quick" in capsys.readouterr().out

"""Exit codes: 2 when what the user gave cannot work, 1 when a model, a pack or a drive fails; one line either way."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

import pytest

from lmpack.cli.main import run

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import TinyPack

TAKE_A_PACK = {
    "validate": [],
    "export": ["restored"],
    "profile": ["--prompts", "prompts.txt", "-o", "profile.safetensors"],
    "run": ["-p", "x"],
    "chat": [],
    "perplexity": ["prompts.txt"],
    "bench": [],
    "unpack": ["plain.lmpack"],
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, demo_gguf: Path, demo_pack: Path) -> Path:
    """The current folder, with what the command lines below name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text("Hello\n", encoding="utf-8")
    (tmp_path / "m.gguf").symlink_to(demo_gguf)
    (tmp_path / "m.lmpack").symlink_to(demo_pack)
    (tmp_path / "hf model").mkdir()
    (tmp_path / "hf model" / "model.safetensors").write_bytes(b"")
    (tmp_path / "split").mkdir()
    (tmp_path / "split" / "big-00001-of-00002.gguf").write_bytes(b"GGUF")
    (tmp_path / "empty").mkdir()
    return tmp_path


def refusal(args: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit code and the one line of a command that must fail, and print nothing."""
    exit_code = run(args)
    shown = capsys.readouterr()
    assert not shown.out
    (line,) = shown.err.splitlines()
    assert line.startswith("lmpack: error: ")
    return exit_code, line


@pytest.mark.parametrize("command", TAKE_A_PACK)
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("m.gguf", "m.gguf is a GGUF checkpoint, not a pack; make one first: lmpack convert m.gguf m.lmpack"),
        ("hf model", "make one first: lmpack convert 'hf model' 'hf model.lmpack'"),
        ("split/big-00001-of-00002.gguf", "lmpack convert split/big-00001-of-00002.gguf big.lmpack"),
        ("split", "lmpack convert split split.lmpack"),
        ("prompts.txt", "is not a folder; a pack is a folder that lmpack convert made"),
        ("m.lmpack/shared.bin", "give the pack itself: m.lmpack"),
        ("none.lmpack", "'none.lmpack' does not exist"),
        ("/dev/null", "is not a folder"),
        ("", "'' does not exist"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_what_is_no_pack_is_wrong_usage_everywhere(
    command: str, given: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    exit_code, line = refusal([command, given, *TAKE_A_PACK[command]], capsys)
    assert exit_code == 2
    assert expected in line


@pytest.mark.parametrize("command", [name for name in TAKE_A_PACK if name != "validate"])
@pytest.mark.usefixtures("folder")
def test_a_folder_that_lost_its_manifest_is_a_failure(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    exit_code, line = refusal([command, "empty", *TAKE_A_PACK[command]], capsys)
    assert exit_code == 1
    assert "empty: no manifest.json" in line


@pytest.mark.parametrize(
    "line",
    [
        "convert '' m2.lmpack",
        "convert none.gguf m2.lmpack",
        "convert empty m2.lmpack",
        "convert m.gguf ''",
        "convert m.gguf prompts.txt/m2.lmpack",
        "convert m.gguf m.lmpack",
        "convert m.gguf /",
        "convert m.gguf m2.lmpack --jobs 0",
        "convert m.gguf m2.lmpack --quantize ,",
        "convert m.gguf m2.lmpack --quantize ''",
        "convert m.gguf m2.lmpack --quantize experts=",
        "convert m.gguf m2.lmpack --quantize =q8_0",
        "convert m.gguf m2.lmpack --quantize experts=q8_0,",
        "pull owner/model --jobs 65",
        "validate m.lmpack --jobs 65",
        "export m.lmpack ''",
        "export m.lmpack prompts.txt",
        "export m.lmpack prompts.txt/x",
        "inspect ''",
        "tokenize '' -p x",
        "tokenize m.gguf",
        "tokenize m.gguf -p x -f prompts.txt",
        "profile m.lmpack --prompts prompts.txt -o ''",
        "profile m.lmpack --prompts prompts.txt -o empty",
        "profile m.lmpack --prompts prompts.txt -o prompts.txt/x",
        "profile m.lmpack --prompts prompts.txt -o p --context 999999",
        "run m.lmpack -p x --ram 1MiB",
        "run m.lmpack -p x --ram 8G",
        "run m.lmpack -p x --ram 101%",
        "run m.lmpack -p x --context 999999",
        "run m.lmpack -p 'much too long' --context 2",
        "run m.lmpack -p x --logprobs 3",
        "run m.lmpack -p x --stop ''",
        "run m.lmpack -p x --temperature nan",
        "run m.lmpack -p x --temperature -1",
        "run m.lmpack -p x --seed 99999999999999999999",
        "run m.lmpack -p x --top-p 0",
        "run m.lmpack -p x --threads 0",
        "chat m.lmpack --ram 1MiB",
        "perplexity m.lmpack prompts.txt",
        "perplexity m.lmpack prompts.txt --context 2",
        "bench m.lmpack --ram 1GiB,",
        "bench m.lmpack --ram 1MiB",
        "demo --keep prompts.txt",
        "demo --keep ''",
    ],
)
@pytest.mark.usefixtures("folder")
def test_what_cannot_work_is_wrong_usage(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    exit_code = run(shlex.split(line))
    shown = capsys.readouterr()
    assert exit_code == 2
    assert not shown.out
    assert re.fullmatch(r"(.+: budget .+\n)?lmpack: error: .+\n", shown.err)


@pytest.mark.parametrize("option", ["-p", "--stop", "--system"])
@pytest.mark.usefixtures("folder")
def test_a_text_that_is_not_utf8_is_refused_with_the_place(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "chat" if option == "--system" else "run"
    exit_code, line = refusal([command, "m.lmpack", option, "caf\udce9"], capsys)
    assert exit_code == 2
    assert option in line
    assert "byte 0xE9 after 3 characters is not UTF-8" in line


@pytest.mark.parametrize(
    "line",
    [
        "run m.lmpack -f /dev/zero",
        "tokenize m.gguf -f /dev/zero",
        "perplexity m.lmpack /dev/zero",
        "bench m.lmpack -f /dev/zero",
        "profile m.lmpack --prompts zero.txt -o profile.safetensors",
    ],
)
def test_a_text_without_an_end_is_refused(
    folder: Path, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "zero.txt").symlink_to("/dev/zero")
    exit_code, told = refusal(shlex.split(line), capsys)
    assert exit_code == 2
    assert "zero" in told
    assert "larger than 64.0 MiB" in told


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (300, "do not fit a context of 200; use --context "),
        (2000, "do not fit a context of 200; use a shorter prompt: this model's longest context is 1024"),
    ],
)
def test_the_advice_for_a_long_prompt_can_help(
    folder: Path, words: int, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = folder / "long.txt"
    prompts.write_text("fox " * words, encoding="utf-8")
    for line in ("run m.lmpack -f long.txt", "profile m.lmpack --prompts long.txt -o profile.safetensors"):
        assert run([*shlex.split(line), "--context", "200", "--threads", "1"]) == 2
        told = capsys.readouterr().err.splitlines()[-1]
        assert expected in told
        assert ("long.txt:1: " in told) == line.startswith("profile")


def test_a_damaged_pack_is_a_failure(tiny_pack: TinyPack, capsys: pytest.CaptureFixture[str]) -> None:
    shared = tiny_pack.path / "shared.bin"
    shared.write_bytes(bytes([shared.read_bytes()[0] ^ 0xFF]) + shared.read_bytes()[1:])
    assert run(["validate", str(tiny_pack.path)]) == 1
    assert "shared.bin" in capsys.readouterr().out


def test_a_model_that_cannot_run_is_a_failure(
    tiny_pack: TinyPack, capsys: pytest.CaptureFixture[str]
) -> None:
    exit_code, line = refusal(["run", str(tiny_pack.path), "-p", "x"], capsys)
    assert exit_code == 1
    assert "tinymoe" in line


def test_a_pack_whose_name_has_two_lines_is_reported_in_one(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "two\nlines.lmpack"
    shown = "two lines.lmpack: "
    assert run(["convert", "m.gguf", name]) == 0
    assert capsys.readouterr().out.splitlines()[0].startswith(shown)
    assert run(["inspect", name]) == 0
    assert capsys.readouterr().out.splitlines()[0].startswith(shown)
    assert run(["export", name, "back"]) == 0
    assert run(["run", name, "-p", "One day", "-n", "1", "--threads", "1"]) == 0
    assert capsys.readouterr().err.splitlines()[0].startswith(shown)

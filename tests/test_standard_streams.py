"""Standard streams: closed, full or left by their reader; names and locales that are not UTF-8."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from lmpack.validation import validate

if TYPE_CHECKING:
    from pathlib import Path

LMPACK = [sys.executable, "-m", "lmpack"]
ASCII_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def shell(line: str) -> subprocess.CompletedProcess[str]:
    """Run `lmpack LINE`, in which a shell understands the redirections."""
    command = f"{shlex.join(LMPACK)} {line}"
    return subprocess.run(command, shell=True, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("closed", ["<&-", ">&-", ">&- 2>&-"])
def test_closed_streams_change_no_verdict(demo_pack: Path, closed: str) -> None:
    ended = shell(f"validate {shlex.quote(str(demo_pack))} {closed}")
    assert ended.returncode == 0
    assert "Traceback" not in ended.stderr


def test_input_that_is_not_utf8_is_named_with_the_place(demo_pack: Path, tmp_path: Path) -> None:
    latin1 = tmp_path / "latin1.txt"
    latin1.write_bytes(b"caf\xe9\nHello\n")
    pack, given = shlex.quote(str(demo_pack)), shlex.quote(str(latin1))
    ended = shell(f"chat {pack} --threads 1 -n 4 < {given}")
    assert ended.returncode == 0
    assert (
        "\nbyte 0xE9 after 3 characters is not UTF-8; give it as UTF-8 text; this turn is dropped"
        in ended.stderr
    )
    assert ended.stdout.strip()
    ended = shell(f"run {pack} -f - < {given}")
    assert ended.returncode == 2
    assert ended.stderr == "lmpack: error: standard input: byte 3 is not UTF-8; give it as UTF-8 text\n"


@pytest.mark.parametrize("args", ["--help", "inspect {}", "inspect {} --json", "tokenize {} -p x", "-h"])
def test_a_reader_that_went_away_is_no_error(demo_gguf: Path, args: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    words = [word.format(demo_gguf) for word in args.split()]
    ended = subprocess.run([*LMPACK, *words], stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert ended.returncode == 141
    assert ended.stderr == b""


@pytest.mark.parametrize("args", ["--help", "inspect {}", "tokenize {} -p x --json"])
def test_an_output_that_takes_no_more_is_named(demo_gguf: Path, args: str) -> None:
    ended = shell(args.format(shlex.quote(str(demo_gguf))) + " > /dev/full")
    assert ended.returncode == 1
    assert ended.stderr.startswith("lmpack: error: standard output: no space")
    assert ended.stderr.count("\n") == 1


def test_a_pack_whose_report_could_not_be_printed_is_said_to_be_there(
    demo_gguf: Path, tmp_path: Path
) -> None:
    ended = shell(
        f"convert {shlex.quote(str(demo_gguf))} {shlex.quote(str(tmp_path / 'm.lmpack'))} > /dev/full"
    )
    assert ended.returncode == 1
    assert "the report is lost, what was made before it is there and whole" in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert validate(tmp_path / "m.lmpack").ok


def test_an_error_that_cannot_be_told_keeps_its_exit_code() -> None:
    ended = shell("frobnicate 2> /dev/full")
    assert (ended.returncode, ended.stdout) == (2, "")


@pytest.mark.parametrize("locale", [{}, ASCII_LOCALE], ids=["utf-8", "ascii"])
def test_json_is_utf8_whatever_a_file_is_called(
    demo_gguf: Path, tmp_path: Path, locale: dict[str, str]
) -> None:
    named = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9-\xc3\xa9.gguf")
    shutil.copy(demo_gguf, named)
    ended = subprocess.run(
        [*LMPACK, "inspect", named, "--json"], capture_output=True, env=os.environ | locale, check=True
    )
    assert json.loads(ended.stdout.decode())["path"].endswith("/caf\ufffd-é.gguf")
    ended = subprocess.run(
        [*LMPACK, "inspect", named], capture_output=True, env=os.environ | locale, check=True
    )
    assert "/caf\\udce9-é.gguf: gguf, qwen3moe" in ended.stdout.decode()


def test_a_locale_without_utf8_finds_every_file_of_a_pack(demo_gguf: Path, tmp_path: Path) -> None:
    source = tmp_path / "modèle.gguf"
    shutil.copy(demo_gguf, source)
    pack = tmp_path / "modèle.lmpack"
    for command in (["convert", source, pack], ["validate", pack], ["run", pack, "-p", "é", "-n", "1"]):
        words = [*LMPACK, *map(str, command)]
        ended = subprocess.run(words, capture_output=True, env=os.environ | ASCII_LOCALE, check=False)
        assert ended.returncode == 0, ended.stderr.decode()
    assert subprocess.run([*LMPACK, "validate", pack], capture_output=True, check=False).returncode == 0

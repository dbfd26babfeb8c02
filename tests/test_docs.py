"""README tells the truth: its tree is the repository's, and its tested examples run."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from lmpack.cli.main import run

REPOSITORY = Path(__file__).parents[1]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
FOLDERS_AS_ONE_LINE = ("tests/",)  # their files speak for themselves: test_NOUN.py


def listed_in_the_tree() -> dict[Path, str]:
    """Paths of README's last code block, with their comments; two blanks of indent per level."""
    block = re.findall(r"^```text\n(.*?)^```", README, re.MULTILINE | re.DOTALL)[-1]
    listed: dict[Path, str] = {}
    parents: list[str] = []
    for line in block.splitlines():
        indent, name, comment = re.fullmatch(r"( *)(\S+)(?: +(.*))?", line).groups()  # type: ignore[union-attr]
        parents[len(indent) // 2 :] = [name]
        listed[Path(*parents)] = comment or ""
    return listed


def tracked_files() -> list[str]:
    if not (REPOSITORY / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    shown = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True)
    return [name for name in shown.stdout.splitlines() if (REPOSITORY / name).exists()]


def tested_commands() -> list[str]:
    """The command lines of the console blocks that stand behind a `<!-- tested -->` mark, in order."""
    blocks = re.findall(r"^<!-- tested -->\n+```console\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    return [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ ")]


def test_the_tree_has_a_line_for_every_file() -> None:
    expected = {
        name
        for name in tracked_files()
        if not name.startswith(FOLDERS_AS_ONE_LINE) and Path(name).name not in {"py.typed", ".gitignore"}
    }
    assert not expected - {str(path) for path in listed_in_the_tree()}


def test_the_tree_lists_nothing_that_is_not_there() -> None:
    assert not [path for path in listed_in_the_tree() if not (REPOSITORY / path).exists()]


def test_the_tree_says_what_each_file_is_for() -> None:
    assert not [path for path, comment in listed_in_the_tree().items() if not comment]


def test_the_commands_of_the_quick_tour_work_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lmpack").mkdir()
    (tmp_path / "lmpack" / "demo").symlink_to(REPOSITORY / "lmpack" / "demo")
    monkeypatch.chdir(tmp_path)
    commands = tested_commands()
    assert len(commands) >= 4, "README marks the four jobs as tested"
    for line in commands:
        program, *args = shlex.split(line)
        assert program == "lmpack"
        assert run(args) == 0, f"{line}\n{capfd.readouterr().err}"
        assert capfd.readouterr().out.strip(), f"{line} printed nothing"

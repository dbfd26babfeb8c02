"""README tells the truth: its tree is the repository's, and its tested examples run."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from lmpack.cli.main import run
from runtime.memory_budget import process_nbytes

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
    shown = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, check=True, capture_output=True, text=True)
    return [name for name in shown.stdout.splitlines() if (REPOSITORY / name).exists()]


@dataclass(frozen=True)
class Example:
    """A command line of README with the output README shows for it."""

    line: str
    shown: str
    is_shape_checked: bool  # not where a model's words depend on the last bits of a processor's arithmetic


def examples_marked_as_tested() -> list[Example]:
    """The commands of the console blocks behind a `<!-- tested -->` mark, in order."""
    marked = r"^<!-- tested(: any words)? -->\n+```console\n(.*?)^```"
    found = []
    for any_words, block in re.findall(marked, README, re.MULTILINE | re.DOTALL):
        for example in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            line, shown = example.split("\n", 1)
            found.append(Example(line, shown, not any_words))
    return found


def _budget_here(ram: re.Match[str]) -> str:
    """A budget of README, which was run with a torch for processors, for the torch that is here."""
    return f"--ram {int(ram[1]) - 384 + (process_nbytes() >> 20)}MiB"


def python_example() -> str:
    """README's one python block; it uses the pack that the console examples make."""
    (block,) = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert isinstance(block, str)
    return block


def shape_of(output: str) -> str:
    """An output without what differs between two runs: figures and their units."""
    without_figures = re.sub(r"\d+(\.\d+)?", "#", output)
    without_units = re.sub(r"# [KMGT]i?B", "# B", without_figures)
    return "\n".join(" ".join(line.split()) for line in without_units.strip().splitlines())


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


def test_the_examples_of_the_tour_print_what_readme_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lmpack").mkdir()
    (tmp_path / "lmpack" / "demo").symlink_to(REPOSITORY / "lmpack" / "demo")
    monkeypatch.chdir(tmp_path)
    examples = examples_marked_as_tested()
    assert {example.line.split()[1] for example in examples} >= {"convert", "validate", "profile", "run"}
    for example in examples:
        program, *args = shlex.split(re.sub(r"--ram (\d+)MiB", _budget_here, example.line))
        assert program == "lmpack"
        assert run(args) == 0, f"{example.line}\n{capfd.readouterr().err}"
        printed = capfd.readouterr().out
        assert printed.strip(), f"{example.line} printed nothing"
        if example.is_shape_checked:
            beginning, *rest = shape_of(example.shown).split("\n...")
            assert shape_of(printed).startswith(beginning) if rest else shape_of(printed) == beginning
    (tmp_path / "example.py").write_text(python_example(), encoding="utf-8")
    runpy.run_path(str(tmp_path / "example.py"))
    assert capfd.readouterr().out.strip()

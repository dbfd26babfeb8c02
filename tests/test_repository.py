"""What holds for the repository as a whole: names, lengths, paths, dependencies, targets."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGES = ("lmpack", "converters", "profiles", "runtime")
DRAWERS = {"utils", "helpers", "common", "constants", "misc", "base", "manager", "types"}
MACHINE_PATH = re.compile(r"(?<![\w.:/~-])/(?:home|root|work|users|opt|private)/", re.IGNORECASE)
MAX_LINES = 400


def tracked_files() -> list[Path]:
    """The files that git knows, relative to the root of the repository."""
    if not (REPOSITORY / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPOSITORY, check=True, capture_output=True, text=True
    )
    return sorted(Path(name) for name in listed.stdout.split("\0") if name and (REPOSITORY / name).exists())


def test_no_file_knows_the_machine_it_was_written_on() -> None:
    found = []
    for path in tracked_files():
        try:
            text = (REPOSITORY / path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{path}: {match.group()}" for match in MACHINE_PATH.finditer(text)]
    assert not found


def test_no_module_is_a_drawer() -> None:
    assert not [path for path in tracked_files() if path.suffix == ".py" and path.stem in DRAWERS]


def test_no_module_is_longer_than_one_noun_needs() -> None:
    lengths = {
        path: len((REPOSITORY / path).read_text(encoding="utf-8").splitlines())
        for path in tracked_files()
        if path.suffix == ".py"
    }
    assert not {path: length for path, length in lengths.items() if length > MAX_LINES}


def test_tests_are_flat() -> None:
    assert not list((REPOSITORY / "tests").rglob("__init__.py"))


def test_what_is_imported_is_what_is_declared() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {
        re.split(r"[<>=!~\[; ]", line)[0].lower().replace("-", "_") for line in project["dependencies"]
    }
    imported: set[str] = set()
    for name in PACKAGES:
        for path in (REPOSITORY / name).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    imported |= {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module:
                    imported.add(node.module.split(".")[0])
                elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("find_spec"):
                    imported.add(ast.literal_eval(node.args[0]))  # how the ggml libraries are found
    others = imported - set(sys.stdlib_module_names) - set(PACKAGES)
    installed = packages_distributions()
    needed = {installed[module][0].lower().replace("-", "_") for module in others if module in installed}
    assert not {module for module in others if module not in installed}
    assert needed == declared


def test_every_pin_is_exact_and_names_no_build() -> None:
    lines = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert not [pin for pin in pins if not re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", pin)]
    names = [pin.split("==")[0] for pin in pins]
    assert names == sorted(set(names))


def test_make_help_explains_every_target() -> None:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert phony is not None
    shown = subprocess.run(["make", "help"], cwd=REPOSITORY, check=True, capture_output=True, text=True)
    explained = re.findall(r"^  make (\w+) +\S", shown.stdout, re.MULTILINE)
    assert explained == phony.group(1).split()

"""The wheel carries what people who install it need: the demo, the format's text, the types, the licence."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from this checkout."""
    pytest.importorskip("hatchling", reason="building the wheel needs hatchling, of the dev extra")
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)],
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
    )
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.parametrize(
    "name",
    [
        "lmpack/FORMAT.md",
        "lmpack/demo/README.md",
        "lmpack/demo/heldout.txt",
        "lmpack/demo/prompts.jsonl",
        "lmpack/demo/tiny-Q4_K_M.gguf",
        "lmpack/py.typed",
        "converters/py.typed",
        "profiles/py.typed",
        "runtime/py.typed",
    ],
)
def test_the_wheel_carries(wheel: Path, name: str) -> None:
    assert name in zipfile.ZipFile(wheel).namelist()


def test_the_wheel_holds_the_four_packages_and_nothing_else(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    metadata = {top for top in tops if top.endswith(".dist-info")}
    assert tops - metadata == {"lmpack", "converters", "profiles", "runtime"}
    (folder,) = metadata
    assert f"{folder}/licenses/LICENSE" in zipfile.ZipFile(wheel).namelist()


def test_the_command_works_from_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r});"
        "from lmpack.cli.main import run; from lmpack.cli.demo import GGUF, PROMPTS;"
        "print(GGUF); print(PROMPTS); sys.exit(run(['inspect', str(GGUF)]))"
    )
    shown = subprocess.run(
        [sys.executable, "-P", "-c", script], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    gguf, prompts, *inspected = shown.stdout.splitlines()
    assert Path(gguf).is_relative_to(tmp_path)
    assert Path(prompts).is_file()
    assert inspected

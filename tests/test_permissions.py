"""What the user may not read or write, under the real command: the error names it, and says nothing else is wrong."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gguf_fixtures import METADATA, gguf_bytes, moe_tensors
from tests.round_trip import files_below

REPOSITORY = Path(__file__).parents[1]
ADVICE = "permission denied; change its permissions, or choose another place"
# root may read and write everything; without these two of its capabilities it is like everybody else
AS_EVERYBODY = ("setpriv", "--bounding-set=-dac_override,-dac_read_search")


def lmpack(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """The command in this folder, as a user without privileges."""
    if os.geteuid() == 0 and not shutil.which(AS_EVERYBODY[0]):
        pytest.skip("root, and no setpriv to be somebody else")
    return subprocess.run(
        [*(AS_EVERYBODY if os.geteuid() == 0 else ()), sys.executable, "-m", "lmpack", *args],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint, its pack, and a folder that nobody may write to."""
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(moe_tensors(), METADATA))
    assert lmpack(tmp_path, "convert", "m.gguf", "m.lmpack").returncode == 0
    (tmp_path / "closed").mkdir()
    (tmp_path / "closed").chmod(0o555)
    return tmp_path


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("convert m.gguf closed/n.lmpack", "closed/n.lmpack.partial"),
        ("export m.lmpack closed", "closed/m.gguf"),
        ("export m.lmpack closed/new", "closed/new"),
    ],
)
def test_a_folder_that_may_not_be_written_to_is_named(folder: Path, command: str, named: str) -> None:
    result = lmpack(folder, *command.split())
    assert (result.returncode, result.stderr) == (1, f"lmpack: error: {named}: {ADVICE}\n")
    assert not os.listdir(folder / "closed")


def test_a_profile_that_could_not_be_written_is_refused_before_the_run(folder: Path) -> None:
    (folder / "prompts.txt").write_text("Once upon a time")
    result = lmpack(folder, "profile", "m.lmpack", "--prompts", "prompts.txt", "-o", "closed/new/p")
    reason = f"the folder {folder / 'closed'} cannot be written to; choose another"
    assert (result.returncode, result.stderr) == (1, f"lmpack: error: closed/new/p: {reason}\n")


def test_a_folder_of_the_pack_that_may_not_be_read_is_named(folder: Path) -> None:
    (folder / "m.lmpack/experts/L001").chmod(0)
    for options in ([], ["--quick"], ["--repair", "m.gguf"]):
        result = lmpack(folder, "validate", "m.lmpack", *options)
        assert (result.returncode, result.stderr) == (1, f"lmpack: error: m.lmpack/experts/L001: {ADVICE}\n")
    (folder / "m.lmpack/experts/L001").chmod(0o755)


def test_a_file_of_many_tensors_that_may_not_be_read_is_one_problem(folder: Path) -> None:
    (folder / "m.lmpack/shared.bin").chmod(0)
    result = lmpack(folder, "validate", "m.lmpack")
    assert result.returncode == 1
    assert [line for line in result.stdout.splitlines() if "shared" in line] == [f"shared.bin: {ADVICE}"]


@pytest.mark.parametrize("closed", [".", "experts/L001"])
def test_a_repair_that_may_not_write_leaves_the_pack_as_it_was(folder: Path, closed: str) -> None:
    pack = folder / "m.lmpack"
    (pack / "experts/L001/E0002.bin").write_bytes(b"bad")
    before = files_below(pack)
    (pack / closed).chmod(0o555)
    result = lmpack(folder, "validate", "m.lmpack", "--repair", "m.gguf")
    (pack / closed).chmod(0o755)
    named = (
        "m.lmpack: cannot be written to; change"
        if closed == "."
        else f"m.lmpack/experts/L001/E0002.bin: {ADVICE}"
    )
    assert result.returncode == 1
    assert result.stderr.startswith(f"lmpack: error: {named}")
    assert result.stderr.count("\n") == 1
    assert files_below(pack) == before


def test_a_file_that_may_not_be_read_is_replaced_by_a_repair(folder: Path) -> None:
    pack = folder / "m.lmpack"
    (pack / "experts/L001/E0002.bin").chmod(0)
    result = lmpack(folder, "validate", "m.lmpack")
    assert f"expert L001/E0002 (experts/L001/E0002.bin): {ADVICE}" in result.stdout
    assert lmpack(folder, "validate", "m.lmpack", "--repair", "m.gguf").returncode == 0

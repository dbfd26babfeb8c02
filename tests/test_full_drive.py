"""A drive that is full, read-only or out of inodes, under the real commands: a clear error, and nothing is lost."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from converters.conversion import convert
from lmpack.validation import validate
from tests.gguf_fixtures import METADATA, gguf_bytes, moe_tensors
from tests.hub_server import hub_server
from tests.round_trip import files_below
from tests.test_validation import flip

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

REPOSITORY = Path(__file__).parents[1]
BAD = "experts/L003/E0007.bin"

# A neighbour fills the drive at the moment when the command opens one of its files.
WHILE_ANOTHER_FILLS_THE_DRIVE = """
import os, sys
from lmpack.cli.main import run

def fill(event, args):
    if event == "open" and str(args[0]).endswith(sys.argv[1]) and not os.path.exists(sys.argv[2]):
        with open(sys.argv[2], "wb") as filler:
            try:
                while True:
                    filler.write(bytes(4096))
                    filler.flush()
            except OSError:
                os._exit(9) if filler.tell() == 0 else None

sys.addaudithook(fill)
sys.exit(run(sys.argv[3:]))
"""


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """A function that mounts a small file system in memory and returns its folder."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small drive")
    mounted: list[Path] = []

    def mount_tmpfs(options: str) -> Path:
        folder = tmp_path / f"drive-{len(mounted)}"
        folder.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, check=False
        )
        if done.returncode != 0:
            pytest.skip(f"mounting is not allowed here: {done.stderr.decode().strip()}")
        mounted.append(folder)
        return folder

    yield mount_tmpfs
    for folder in mounted:
        subprocess.run(["umount", "--lazy", folder], check=True)


def lmpack(*args: object, script: tuple[str, ...] = ("-m", "lmpack")) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *script, *map(str, args)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    "file", ["experts/L000/E0003.bin", "experts/L003/E0000.bin", "shared.bin", "journal"]
)
def test_a_drive_that_fills_up_meanwhile_is_an_error_and_the_work_goes_on_later(
    mount: Callable[..., Path], demo_gguf: Path, demo_pack: Path, file: str
) -> None:
    drive = mount("size=40m")
    dst, filler = drive / "m.lmpack", drive / "filler"
    script = ("-c", WHILE_ANOTHER_FILLS_THE_DRIVE, file, str(filler))
    full = lmpack("convert", demo_gguf, dst, script=script)
    assert full.returncode == 1
    assert "no space (or inodes) left on the drive; free some and run it again" in full.stderr
    assert f"(--resume continues with what is in {dst}.partial)" in full.stderr
    assert full.stderr.count("\n") == 1
    assert not dst.exists()
    filler.unlink()
    resumed = lmpack("convert", demo_gguf, dst, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert (dst / "manifest.json").read_bytes() == (demo_pack / "manifest.json").read_bytes()
    assert validate(dst).ok


@pytest.mark.parametrize(
    ("file", "options"),
    [
        ("experts/L001/E0002.bin", ()),
        ("experts/L001/E0002.bin", ("--discard-source",)),
        ("m.gguf.incomplete", ("--discard-source",)),
    ],
    ids=["kept", "discarded", "downloading"],
)
def test_a_pull_onto_a_drive_that_fills_up_goes_on_when_it_is_run_again(
    mount: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, file: str, options: tuple[str, ...]
) -> None:
    drive, repo = mount("size=1M"), "owner/model"
    with hub_server(monkeypatch, drive) as hub:
        hub.add(repo, {"m.gguf": gguf_bytes(moe_tensors(), METADATA)})
        monkeypatch.setenv("HF_HUB_CACHE", str(drive / "cache"))
        args = ("pull", repo, drive / "m.lmpack", *options)
        full = lmpack(file, drive / "filler", *args, script=("-c", WHILE_ANOTHER_FILLS_THE_DRIVE))
        assert full.returncode == 1
        assert full.stderr.count("\n") == 1
        assert "no space (or inodes) left on the drive; free some and run it again" in full.stderr
        assert "--resume" not in full.stderr
        (drive / "filler").unlink()
        assert lmpack(*args).returncode == 0
    assert validate(drive / "m.lmpack").ok


def test_too_little_room_is_known_before_a_byte_is_written(
    mount: Callable[..., Path], demo_gguf: Path
) -> None:
    drive = mount("size=10m")
    result = lmpack("convert", demo_gguf, drive / "m.lmpack")
    assert result.returncode == 1
    assert (
        f"needs 24.9 MiB, {drive} has 10.0 MiB free; free some space or choose another drive" in result.stderr
    )
    assert os.listdir(drive) == []


def test_room_for_the_bytes_alone_is_not_enough(
    mount: Callable[..., Path], demo_gguf: Path, demo_pack: Path
) -> None:
    nbytes = sum(-(-len(raw) // 4096) * 4096 for raw in files_below(demo_pack).values())
    drive = mount(f"size={nbytes}")
    result = lmpack("convert", demo_gguf, drive / "m.lmpack")
    assert result.returncode == 1
    assert f"needs 24.9 MiB, {drive} has 24." in result.stderr
    assert os.listdir(drive) == []


def test_too_few_inodes_are_known_before_a_byte_is_written(
    mount: Callable[..., Path], demo_gguf: Path
) -> None:
    drive = mount("size=100m,nr_inodes=100")
    result = lmpack("convert", demo_gguf, drive / "m.lmpack")
    assert result.returncode == 1
    assert "has only 99 inodes free; delete small files or choose another drive" in result.stderr
    assert os.listdir(drive) == []


@pytest.mark.parametrize("command", ["convert", "export"])
def test_a_read_only_drive_is_called_by_its_name(
    mount: Callable[..., Path], demo_gguf: Path, demo_pack: Path, command: str
) -> None:
    drive = mount("size=10m,ro")
    result = lmpack(command, demo_gguf if command == "convert" else demo_pack, drive / "new" / "m")
    assert result.returncode == 1
    assert result.stderr == (
        f"lmpack: error: {drive}: the file system is read-only; choose another destination\n"
    )


def test_a_file_in_the_way_of_the_destination_is_named(tmp_path: Path, demo_gguf: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    result = lmpack("convert", demo_gguf, tmp_path / "file" / "m.lmpack")
    assert result.returncode == 2
    assert f"{tmp_path / 'file'} is a file, not a folder (see: lmpack convert --help)\n" in result.stderr


@pytest.mark.parametrize(
    ("command", "file"),
    [
        ("export", "tiny-Q4_K_M.gguf.partial"),
        ("unpack", "out.partial/experts/L003/E0000.bin"),
        ("unpack", "out.partial/shared.bin"),
    ],
)
def test_what_an_export_or_an_unpacking_has_written_makes_room_again(
    mount: Callable[..., Path], demo_gguf: Path, tmp_path: Path, command: str, file: str
) -> None:
    drive, pack = mount("size=40m"), tmp_path / "z.lmpack"
    convert(demo_gguf, pack, compress=True)
    dst, filler = drive / "out", drive / "filler"
    script = ("-c", WHILE_ANOTHER_FILLS_THE_DRIVE, file, str(filler))
    full = lmpack(command, pack, dst, script=script)
    assert full.returncode == 1
    assert "no space (or inodes) left on the drive; free some and run it again" in full.stderr
    assert full.stderr.count("\n") == 1
    filler.unlink()
    assert list(files_below(drive)) == []
    assert lmpack(command, pack, dst).returncode == 0


@pytest.fixture
def damaged(mount: Callable[..., Path], demo_pack: Path) -> Path:
    """A pack on a small drive, with a byte of one expert inverted."""
    pack = mount("size=40m") / "m.lmpack"
    shutil.copytree(demo_pack, pack)
    flip(pack / BAD, 100)
    return pack


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_repair_without_room_leaves_the_pack_as_it_was_and_goes_on_later(
    damaged: Path, demo_gguf: Path, demo_pack: Path, when: str
) -> None:
    before, filler = files_below(damaged), damaged.parent / "filler"
    repair = ("validate", damaged, "--repair", demo_gguf)
    if when == "before":
        drive = os.statvfs(damaged)
        filler.write_bytes(bytes((drive.f_bavail - 1) * drive.f_frsize))
        full = lmpack(*repair)
        assert f"{damaged}: needs 112.4 KiB, {damaged} has 4.0 KiB free; free some space" in full.stderr
    else:
        full = lmpack(*repair, script=("-c", WHILE_ANOTHER_FILLS_THE_DRIVE, ".repair", str(filler)))
        assert (
            f"{damaged / BAD}: no space (or inodes) left on the drive; free some and run it again"
            in full.stderr
        )
    assert (full.returncode, full.stderr.count("\n")) == (1, 1)
    assert files_below(damaged) == before
    filler.unlink()
    assert lmpack(*repair).returncode == 0
    assert files_below(damaged) == files_below(demo_pack)


def test_a_pack_on_a_read_only_drive_is_not_repaired_there(damaged: Path, demo_gguf: Path) -> None:
    before = files_below(damaged)
    subprocess.run(["mount", "-o", "remount,ro", damaged.parent], check=True)
    result = lmpack("validate", damaged, "--repair", demo_gguf)
    assert result.returncode == 1
    assert result.stderr == (
        f"lmpack: error: {damaged}: cannot be written to; change its permissions or how the drive is mounted, or "
        "repair a copy\n"
    )
    assert files_below(damaged) == before

"""Repair: bad files of a pack are replaced, from its source or another copy, and nothing else is touched."""

from __future__ import annotations

import json
import os
import random
import shutil
from typing import TYPE_CHECKING

import pytest

from converters.byte_origin import open_local_origin
from converters.conversion import convert
from converters.repair import RepairReport, repair
from lmpack.cli.main import run
from lmpack.errors import PackError, UsageError
from lmpack.pack import read_manifest
from lmpack.validation import validate
from tests.gguf_fixtures import METADATA, gguf_bytes, moe_tensors, write_shards
from tests.round_trip import files_below
from tests.safetensors_fixtures import moe_tensors as hf_moe_tensors
from tests.safetensors_fixtures import write_hf_folder
from tests.test_validation import flip

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conftest import TinyPack


@pytest.fixture(params=["one gguf", "shards", "single tensors", "safetensors"])
def src(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A checkpoint of each kind."""
    path = tmp_path / "src"
    if request.param == "safetensors":
        return write_hf_folder(path, [hf_moe_tensors()])
    if request.param == "shards":
        path.mkdir()
        tensors = moe_tensors(extras=("bias", "scale", "shexp"))
        write_shards(path, [tensors[:5], tensors[5:14], tensors[14:]])
        return path
    path = tmp_path / "src.gguf"
    tensors = moe_tensors(layout="single" if request.param == "single tensors" else "stacked")
    path.write_bytes(gguf_bytes(tensors, METADATA, gap=1, trailing=b"end"))
    return path


def state(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Contents and inodes, so that a replaced file shows even when it looks the same."""
    return {name: (raw, (folder / name).stat().st_ino) for name, raw in files_below(folder).items()}


def mend(pack: Path, origin: Path) -> RepairReport:
    report = validate(pack)
    assert not report.ok
    return repair(pack, open_local_origin(origin, read_manifest(pack).source), report.problems)


def damage(path: Path, rng: random.Random) -> None:
    """Do to a file what happens to files."""
    nbytes = path.stat().st_size
    kind = rng.choice(["flip", "cut", "grow", "delete", "folder", "link", "pipe"])
    if kind == "flip" and nbytes:
        for _ in range(3):
            flip(path, rng.randrange(nbytes))
    elif kind == "cut":
        os.truncate(path, nbytes // 2)
    elif kind == "grow":
        os.truncate(path, nbytes + 1)
    else:
        path.unlink()
        if kind == "folder":
            path.mkdir()
        elif kind == "link":
            path.symlink_to("manifest.json")
        elif kind == "pipe":
            os.mkfifo(path)


@pytest.mark.parametrize("is_copy", [False, True])
def test_bad_files_and_no_others_are_replaced(src: Path, tmp_path: Path, is_copy: bool) -> None:
    pack, copy = tmp_path / "m.lmpack", tmp_path / "copy.lmpack"
    convert(src, pack)
    shutil.copytree(pack, copy)
    wanted, rng = files_below(pack), random.Random(1)
    files = sorted(name for name in wanted if name != "manifest.json")
    for _ in range(6):
        before = state(pack)
        bad = rng.sample(files, 3)
        for file in bad:
            damage(pack / file, rng)
        found = {problem.file for problem in validate(pack).problems}  # a flip may have undone another
        if not found:
            continue
        report = mend(pack, copy if is_copy else src)
        assert set(report.repaired) == found <= set(bad)
        assert (report.failed, report.validation.problems) == ((), ())
        after = state(pack)
        assert {name: raw for name, (raw, _) in after.items()} == wanted
        assert all(after[name] == before[name] for name in wanted.keys() - found)


def test_only_the_bad_tensors_of_shared_bin_are_fetched(tmp_path: Path) -> None:
    src = tmp_path / "src.gguf"
    src.write_bytes(gguf_bytes(moe_tensors(), METADATA))
    convert(src, tmp_path / "m.lmpack")
    flip(tmp_path / "m.lmpack" / "shared.bin", 0)
    manifest = read_manifest(tmp_path / "m.lmpack")
    origin = open_local_origin(src, manifest.source)
    asked: list[int] = []

    class Counting:
        name, is_pack = origin.name, False

        def nbytes(self, file: str) -> int:
            return origin.nbytes(file)

        def read(self, file: str, offset: int, view: memoryview) -> None:
            asked.append(view.nbytes)
            origin.read(file, offset, view)

    report = repair(tmp_path / "m.lmpack", Counting(), validate(tmp_path / "m.lmpack").problems)
    assert report.validation.ok
    assert asked == [manifest.shared[0].nbytes]


def test_padding_that_is_not_zero_is_repaired_without_a_byte_from_elsewhere(
    tiny_pack: TinyPack, tmp_path: Path
) -> None:
    shutil.copytree(tiny_pack.path, tmp_path / "copy.lmpack")
    flip(tiny_pack.path / "shared.bin", 100)
    flip(tmp_path / "copy.lmpack" / "shared.bin", 0)  # the copy is of no use
    assert mend(tiny_pack.path, tmp_path / "copy.lmpack").validation.ok


def test_bytes_from_elsewhere_are_not_trusted(src: Path, tmp_path: Path) -> None:
    pack, copy = tmp_path / "m.lmpack", tmp_path / "copy.lmpack"
    convert(src, pack)
    shutil.copytree(pack, copy)
    good, bad = "experts/L001/E0001.bin", "experts/L001/E0002.bin"
    for file in (good, bad):
        flip(pack / file, 5)
    flip(copy / bad, 6)
    before = state(pack)
    report = mend(pack, copy)
    assert report.repaired == (good,)
    assert [problem.file for problem in report.failed] == [bad]
    assert "copy.lmpack has other bytes: sha256 " in report.failed[0].message
    assert [problem.file for problem in report.validation.problems] == [bad]
    after = state(pack)
    assert {name for name in after if after[name] != before.get(name)} == {good}


def test_a_source_that_lacks_the_file_is_named(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "hf", [hf_moe_tensors()])
    convert(folder, tmp_path / "m.lmpack")
    (folder / "config.json").unlink()
    (tmp_path / "m.lmpack" / "source" / "config.json").unlink()
    report = mend(tmp_path / "m.lmpack", folder)
    assert [str(problem) for problem in report.failed] == [
        f"source/config.json: {folder}: has no file config.json"
    ]
    assert not report.validation.ok


def test_a_renamed_checkpoint_of_one_file_serves(tmp_path: Path) -> None:
    src = tmp_path / "src.gguf"
    src.write_bytes(gguf_bytes(moe_tensors(), METADATA))
    convert(src, tmp_path / "m.lmpack")
    (tmp_path / "m.lmpack" / "source" / "src.gguf.rest").unlink()
    src.rename(tmp_path / "other name.gguf")
    assert mend(tmp_path / "m.lmpack", tmp_path / "other name.gguf").validation.ok


@pytest.mark.parametrize(
    "spoil", [lambda path: path.unlink(), lambda path: flip(path, 700), lambda path: path.write_bytes(b"")]
)
def test_a_manifest_comes_back_from_a_copy_with_all_else_that_is_bad(
    tiny_pack: TinyPack, tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    shutil.copytree(tiny_pack.path, tmp_path / "copy.lmpack")
    wanted = files_below(tiny_pack.path)
    spoil(tiny_pack.path / "manifest.json")
    flip(tiny_pack.path / "experts/L003/E0001.bin", 9)
    origin = open_local_origin(tmp_path / "copy.lmpack", None)
    report = repair(tiny_pack.path, origin, validate(tiny_pack.path).problems)
    assert report.repaired == ("manifest.json", "experts/L003/E0001.bin")
    assert report.validation.ok
    assert files_below(tiny_pack.path) == wanted


def test_the_manifest_of_another_pack_is_not_taken(tiny_pack: TinyPack, tmp_path: Path) -> None:
    src = tmp_path / "src.gguf"
    src.write_bytes(gguf_bytes(moe_tensors(), METADATA))
    convert(src, tmp_path / "other.lmpack")
    (tiny_pack.path / "manifest.json").unlink()
    before = state(tiny_pack.path)
    problems = validate(tiny_pack.path).problems
    with pytest.raises(PackError, match=r"other\.lmpack: is another pack"):
        repair(tiny_pack.path, open_local_origin(tmp_path / "other.lmpack", None), problems)
    with pytest.raises(PackError, match=r"manifest\.json: a checkpoint cannot restore it; name another copy"):
        repair(tiny_pack.path, open_local_origin(src, None), problems)
    assert state(tiny_pack.path) == before


def test_a_folder_with_something_in_it_is_not_deleted(tiny_pack: TinyPack, tmp_path: Path) -> None:
    shutil.copytree(tiny_pack.path, tmp_path / "copy.lmpack")
    (tiny_pack.path / "source/config.json").unlink()
    (tiny_pack.path / "source/config.json").mkdir()
    (tiny_pack.path / "source/config.json/mine").write_bytes(b"")
    report = mend(tiny_pack.path, tmp_path / "copy.lmpack")
    assert report.repaired == ()
    assert "a folder with something in it is in its place" in report.failed[0].message
    assert (tiny_pack.path / "source/config.json/mine").exists()


@pytest.mark.parametrize("folder", ["source", "experts", "experts/L003"])
def test_nothing_is_written_where_a_link_leads(tiny_pack: TinyPack, tmp_path: Path, folder: str) -> None:
    shutil.copytree(tiny_pack.path, tmp_path / "copy.lmpack")
    (tmp_path / "elsewhere").mkdir()
    shutil.rmtree(tiny_pack.path / folder)
    (tiny_pack.path / folder).symlink_to(tmp_path / "elsewhere")
    (found,) = validate(tiny_pack.path).problems  # one for all that should be in there
    assert str(found).startswith(f"{folder}: not a folder; a pack holds no links: ")
    report = mend(tiny_pack.path, tmp_path / "copy.lmpack")
    assert report.repaired == ()
    (problem,) = report.failed
    assert str(problem).startswith(f"{folder}: is a link or a file, a folder is needed here")
    assert report.validation.problems == (found,)
    assert not os.listdir(tmp_path / "elsewhere")


def test_two_repairs_of_one_pack_do_not_mix(tiny_pack: TinyPack, tmp_path: Path) -> None:
    shutil.copytree(tiny_pack.path, tmp_path / "copy.lmpack")
    origin = open_local_origin(tmp_path / "copy.lmpack", None)
    flip(tiny_pack.path / "experts/L003/E0001.bin", 9)
    problems = validate(tiny_pack.path).problems
    refused = []

    class RepairingToo:
        name, is_pack = origin.name, True

        def nbytes(self, file: str) -> int:
            return origin.nbytes(file)

        def read(self, file: str, offset: int, view: memoryview) -> None:
            with pytest.raises(UsageError, match="another repair of it is running; wait for it"):
                repair(tiny_pack.path, origin, problems)
            refused.append(file)
            origin.read(file, offset, view)

    assert repair(tiny_pack.path, RepairingToo(), problems).validation.ok
    assert refused


def test_a_repair_that_fails_makes_no_folders(tiny_pack: TinyPack, tmp_path: Path) -> None:
    shutil.copytree(tiny_pack.path, tmp_path / "copy.lmpack")
    for file in (tmp_path / "copy.lmpack" / "experts").rglob("*.bin"):
        flip(file, 0)
    shutil.rmtree(tiny_pack.path / "experts")
    assert mend(tiny_pack.path, tmp_path / "copy.lmpack").repaired == ()
    assert not (tiny_pack.path / "experts").exists()


def test_a_copy_whose_manifest_is_damaged_still_serves(tiny_pack: TinyPack, tmp_path: Path) -> None:
    copy = tmp_path / "copy.lmpack"
    shutil.copytree(tiny_pack.path, copy)
    flip(copy / "manifest.json", 10)
    for file in ("experts/L003/E0000.bin", "experts/L003/E0001.bin"):
        flip(tiny_pack.path / file, 5)
    flip(copy / "experts/L003/E0000.bin", 6)
    report = mend(tiny_pack.path, copy)
    assert report.repaired == ("experts/L003/E0001.bin",)
    assert [problem.file for problem in report.failed] == ["experts/L003/E0000.bin"]


def test_a_file_in_place_of_a_folder_is_named(tiny_pack: TinyPack, tmp_path: Path) -> None:
    shutil.copytree(tiny_pack.path, tmp_path / "copy.lmpack")
    shutil.rmtree(tiny_pack.path / "source")
    (tiny_pack.path / "source").write_bytes(b"mine")
    (found,) = validate(tiny_pack.path).problems
    assert str(found) == "source: not a folder; move it away"
    report = mend(tiny_pack.path, tmp_path / "copy.lmpack")
    assert str(report.failed[0]).startswith("source: is a link or a file, a folder is needed here")
    assert (tiny_pack.path / "source").read_bytes() == b"mine"


@pytest.mark.parametrize("file", ["manifest.json", "shared.bin"])
def test_what_a_killed_repair_left_is_replaced_and_a_link_of_its_name_is_not_followed(
    tiny_pack: TinyPack, tmp_path: Path, file: str
) -> None:
    shutil.copytree(tiny_pack.path, tmp_path / "copy.lmpack")
    wanted = files_below(tiny_pack.path)
    for left in ("a link", "a file"):
        (tiny_pack.path / file).unlink()
        if left == "a link":
            (tiny_pack.path / "unfinished.repair").symlink_to(tmp_path / "elsewhere")
        else:
            (tiny_pack.path / "unfinished.repair").write_bytes(b"half")
        report = repair(
            tiny_pack.path,
            open_local_origin(tmp_path / "copy.lmpack", None),
            validate(tiny_pack.path).problems,
        )
        assert report.validation.ok
        assert files_below(tiny_pack.path) == wanted
    assert not (tmp_path / "elsewhere").exists()


def test_the_command_repairs_and_says_what(
    tmp_path: Path, demo_gguf: Path, demo_pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pack = tmp_path / "m.lmpack"
    shutil.copytree(demo_pack, pack)
    assert run(["validate", str(pack), "--repair", str(demo_gguf)]) == 0  # nothing to do
    assert "good, 195 files" in capsys.readouterr().out
    (pack / "experts/L003/E0007.bin").unlink()
    flip(pack / "shared.bin", 10)
    assert run(["validate", str(pack), "--repair", str(demo_gguf)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["repaired experts/L003/E0007.bin", "repaired shared.bin"]
    assert "good, 195 files" in lines[2]
    (pack / "junk").mkdir()
    (pack / "experts/L003/E0007.bin").unlink()
    assert run(["validate", str(pack), "--repair", str(demo_pack), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["repaired"], document["not_repaired"]) == (["experts/L003/E0007.bin"], [])
    assert [problem["file"] for problem in document["problems"]] == ["junk"]
    assert run(["validate", str(pack), "--repair", str(demo_gguf), "--quick"]) == 2


def test_ten_thousand_flips_are_found_in_the_right_file_and_repaired(tmp_path: Path) -> None:
    src = tmp_path / "src.gguf"
    src.write_bytes(gguf_bytes(moe_tensors(num_layers=1), METADATA))
    convert(src, tmp_path / "m.lmpack")
    wanted, rng = files_below(tmp_path / "m.lmpack"), random.Random(7)
    files = sorted(name for name, raw in wanted.items() if raw and name != "manifest.json")
    for _ in range(20):
        hit = {file: {rng.randrange(len(wanted[file])) for _ in range(500 // len(files))} for file in files}
        for file, positions in hit.items():
            for position in positions:
                flip(tmp_path / "m.lmpack" / file, position)
        assert {problem.file for problem in validate(tmp_path / "m.lmpack").problems} == set(files)
        assert mend(tmp_path / "m.lmpack", src).validation.ok
    assert files_below(tmp_path / "m.lmpack") == wanted

"""Validation: whatever happens to a file of a pack is found, in that file, with its layer and expert."""

from __future__ import annotations

import hashlib
import os
import shutil
from threading import Lock
from typing import TYPE_CHECKING

import pytest

from lmpack.errors import PackError, UsageError
from lmpack.expert_key import ExpertKey
from lmpack.manifest import Source, SourceFile, pack_id_of
from lmpack.pack_writer import PackWriter
from lmpack.validation import Problem, validate

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import TinyPack, WriteTinyPack

FILES = {
    "experts/L001/E0000.bin": ExpertKey(1, 0),
    "experts/L001/E0001.bin": ExpertKey(1, 1),
    "experts/L003/E0000.bin": ExpertKey(3, 0),
    "experts/L003/E0001.bin": ExpertKey(3, 1),
    "shared.bin": None,
    "source/config.json": None,
    "source/model-00001-of-00002.safetensors.rest": None,
    "source/model-00002-of-00002.safetensors.rest": None,
    "manifest.json": None,
}


def flip(path: Path, position: int) -> None:
    """Invert one byte of a file in place."""
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 0xFF]))


def the_problem(path: Path, *, quick: bool = False) -> Problem:
    """Validate and return the only problem there is."""
    (problem,) = validate(path, quick=quick, jobs=2).problems
    return problem


@pytest.mark.parametrize("quick", [False, True])
def test_a_good_pack_has_no_problems(tiny_pack: TinyPack, quick: bool) -> None:
    report = validate(tiny_pack.path, quick=quick)
    assert report.ok
    assert report.problems == ()
    assert report.num_files == len(FILES)
    total = sum((tiny_pack.path / file).stat().st_size for file in FILES if file != "manifest.json")
    assert report.nbytes == (0 if quick else total)


@pytest.mark.parametrize("file", FILES)
def test_flipping_any_byte_is_found_in_the_right_file(tiny_pack: TinyPack, file: str) -> None:
    path = tiny_pack.path / file
    nbytes = path.stat().st_size
    # every 509th byte reaches tensors, the padding after each, both ends, and (509 is prime) every alignment
    for position in sorted({0, nbytes - 1, *range(0, nbytes, 509)}):
        flip(path, position)
        problem = the_problem(tiny_pack.path)
        assert (problem.file, problem.key) == (file, FILES[file])
        flip(path, position)
    assert validate(tiny_pack.path).ok


@pytest.mark.parametrize(
    ("file", "position", "message"),
    [
        ("experts/L001/E0001.bin", 16, "padding is not zero at byte 16"),
        ("experts/L001/E0001.bin", 255, "padding is not zero at byte 255"),
        ("experts/L001/E0001.bin", 4095, "padding is not zero at byte 4095"),
        ("shared.bin", 48, "tensor 'token_embd.weight': padding is not zero at byte 48"),
        ("shared.bin", 4096 + 8, "tensor 'scale': padding is not zero at byte 4104"),
        ("shared.bin", 16383, "tensor 'output.weight': padding is not zero at byte 16383"),
        ("shared.bin", 8192 + 4999, "tensor 'output.weight': sha256 is "),
        ("experts/L003/E0001.bin", 8960, "sha256 is "),
        ("source/config.json", 3, "sha256 is "),
        ("manifest.json", 300, "byte 300 is not UTF-8"),
    ],
)
def test_a_problem_says_what_was_hit(tiny_pack: TinyPack, file: str, position: int, message: str) -> None:
    flip(tiny_pack.path / file, position)
    problem = the_problem(tiny_pack.path)
    assert problem.file == file
    assert message in problem.message


def test_padding_must_be_zero_even_when_its_checksum_is_right(tiny_pack: TinyPack) -> None:
    path = tiny_pack.path / "experts/L003/E0000.bin"
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    flip(path, 16383)
    after = hashlib.sha256(path.read_bytes()).hexdigest()
    raw = tiny_pack.manifest.to_bytes().replace(before.encode(), after.encode())
    raw = raw.replace(tiny_pack.manifest.pack_id.encode(), pack_id_of(raw).encode())
    (tiny_pack.path / "manifest.json").write_bytes(raw)
    assert the_problem(tiny_pack.path) == Problem(
        "experts/L003/E0000.bin", ExpertKey(3, 0), "padding is not zero at byte 16383"
    )


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("file", [file for file in FILES if file != "manifest.json"])
def test_missing_truncated_and_grown_files_are_found(tiny_pack: TinyPack, file: str, quick: bool) -> None:
    path = tiny_pack.path / file
    raw = path.read_bytes()
    for changed, message in (
        (raw[:-1], f"truncated: {len(raw) - 1} bytes, expected {len(raw)}"),
        (b"", f"truncated: 0 bytes, expected {len(raw)}"),
        (raw + b"\0", f"too long: {len(raw) + 1} bytes, expected {len(raw)}"),
    ):
        path.write_bytes(changed)
        assert the_problem(tiny_pack.path, quick=quick) == Problem(file, FILES[file], message)
    path.unlink()
    missing = Problem(file, FILES[file], f"missing, expected {len(raw)} bytes")
    assert the_problem(tiny_pack.path, quick=quick) == missing
    assert str(missing).startswith(f"expert {FILES[file]} ({file}): " if FILES[file] else f"{file}: ")


def test_swapped_experts_are_both_named_with_what_they_hold(tiny_pack: TinyPack) -> None:
    first, second = (tiny_pack.path / f"experts/L001/E000{expert}.bin" for expert in (0, 1))
    first.rename(tiny_pack.path / "swap")
    second.rename(first)
    (tiny_pack.path / "swap").rename(second)
    problems = validate(tiny_pack.path).problems
    assert [problem.key for problem in problems] == [ExpertKey(1, 0), ExpertKey(1, 1)]
    assert problems[0].message.endswith("it holds the bytes of expert L001/E0001")
    assert problems[1].message.endswith("it holds the bytes of expert L001/E0000")


def test_swapped_tensors_of_shared_bin_are_both_named(write_tiny_pack: WriteTinyPack, tmp_path: Path) -> None:
    tiny = write_tiny_pack(tmp_path / "a.lmpack")
    raw = bytearray((tiny.path / "shared.bin").read_bytes())
    raw[:48], raw[8192 : 8192 + 48] = raw[8192 : 8192 + 48], raw[:48]
    (tiny.path / "shared.bin").write_bytes(raw)
    problems = validate(tiny.path).problems
    assert [problem.file for problem in problems] == ["shared.bin", "shared.bin"]
    assert "token_embd.weight" in problems[0].message
    assert "output.weight" in problems[1].message


@pytest.mark.parametrize("quick", [False, True])
def test_extra_files_are_named_but_profiles_are_welcome(tiny_pack: TinyPack, quick: bool) -> None:
    (tiny_pack.path / "profiles").mkdir()
    (tiny_pack.path / "profiles" / "chat.safetensors").write_bytes(b"counts")
    (tiny_pack.path / "profiles" / "empty").mkdir()
    assert validate(tiny_pack.path, quick=quick).ok
    (tiny_pack.path / "experts/L001/E0002.bin").write_bytes(bytes(4096))
    (tiny_pack.path / "shared.bin.tmp").write_bytes(b"")
    (tiny_pack.path / "junk" / "deep").mkdir(parents=True)
    problems = validate(tiny_pack.path, quick=quick).problems
    assert [problem.file for problem in problems] == ["experts/L001/E0002.bin", "junk/deep", "shared.bin.tmp"]
    assert [problem.message.partition(";")[0] for problem in problems] == [
        "not in the manifest",
        "an empty folder",
        "not in the manifest",
    ]


def test_a_name_that_is_not_text_is_shown_as_one_line(tiny_pack: TinyPack) -> None:
    try:
        (tiny_pack.path / os.fsdecode(b"bad\xff\nname")).write_bytes(b"")
    except OSError:
        pytest.skip("this file system refuses such names")
    problem = the_problem(tiny_pack.path)
    assert problem.file == r"bad\udcff\nname"
    str(problem).encode("utf-8")


def test_links_pipes_and_folders_in_place_of_files_are_found(tiny_pack: TinyPack, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes((tiny_pack.path / "shared.bin").read_bytes())
    (tiny_pack.path / "shared.bin").unlink()
    (tiny_pack.path / "shared.bin").symlink_to(tmp_path / "elsewhere")
    (tiny_pack.path / "source/config.json").unlink()
    os.mkfifo(tiny_pack.path / "source/config.json")
    (tiny_pack.path / "experts/L001/E0001.bin").unlink()
    (tiny_pack.path / "experts/L001/E0001.bin").mkdir()
    (tiny_pack.path / "experts/L001/E0001.bin" / "inside").write_bytes(b"")
    messages = {problem.file: problem.message for problem in validate(tiny_pack.path).problems}
    assert messages["shared.bin"].startswith("not a regular file")
    assert messages["source/config.json"].startswith("not a regular file")
    assert messages["experts/L001/E0001.bin"].startswith("a folder, expected a file")
    assert messages["experts/L001/E0001.bin/inside"].startswith("not in the manifest")
    assert len(messages) == 4


def test_a_profiles_folder_that_leads_out_of_the_pack_is_found(tiny_pack: TinyPack, tmp_path: Path) -> None:
    (tiny_pack.path / "profiles").symlink_to(tmp_path)
    assert the_problem(tiny_pack.path).file == "profiles"


def test_many_problems_come_in_the_order_of_the_manifest(tiny_pack: TinyPack) -> None:
    for file in FILES:
        if file not in ("manifest.json", "experts/L003/E0000.bin"):
            flip(tiny_pack.path / file, 0)
    (tiny_pack.path / "experts/L003/E0000.bin").unlink()
    problems = validate(tiny_pack.path, jobs=4).problems
    assert [problem.key for problem in problems[:4]] == [
        ExpertKey(3, 0),
        ExpertKey(1, 0),
        ExpertKey(1, 1),
        ExpertKey(3, 1),
    ]
    assert len(problems) == 8


def test_a_pack_without_a_manifest_or_with_a_bad_one_has_that_problem(tiny_pack: TinyPack) -> None:
    raw = (tiny_pack.path / "manifest.json").read_bytes()
    (tiny_pack.path / "manifest.json").write_bytes(raw[:-3])
    assert the_problem(tiny_pack.path).file == "manifest.json"
    (tiny_pack.path / "manifest.json").unlink()
    problem = the_problem(tiny_pack.path, quick=True)
    assert problem.file == "manifest.json"
    assert "no manifest.json, so it is not a pack" in problem.message


def test_a_manifest_of_another_pack_does_not_fit(
    tiny_pack: TinyPack, write_tiny_pack: WriteTinyPack, tmp_path: Path
) -> None:
    other = write_tiny_pack(tmp_path / "other.lmpack", page_size=8192)
    shutil.copy(other.path / "manifest.json", tiny_pack.path)
    assert len(validate(tiny_pack.path, quick=True).problems) == 3  # two experts and shared.bin


def test_progress_counts_every_byte_once(tiny_pack: TinyPack) -> None:
    lock, counted = Lock(), [0]

    def count(nbytes: int) -> None:
        with lock:
            counted[0] += nbytes

    report = validate(tiny_pack.path, jobs=4, progress=count)
    assert counted[0] == report.nbytes > 0


def test_a_file_that_shrinks_or_vanishes_while_it_is_checked_is_found(tiny_pack: TinyPack) -> None:
    last, before_last = tiny_pack.path / "source/config.json", tiny_pack.path / "experts/L003/E0001.bin"

    def damage(nbytes: int) -> None:
        last.unlink(missing_ok=True)
        os.truncate(before_last, 5)

    problems = validate(tiny_pack.path, jobs=1, progress=damage).problems
    assert [problem.file for problem in problems] == ["experts/L003/E0001.bin", "source/config.json"]
    assert problems[0].message == "ends at byte 5, expected at least 16384 bytes"
    assert "missing" in problems[1].message


def test_files_larger_than_a_read_are_checked_to_the_end(tmp_path: Path) -> None:
    nbytes = 20 * 1024 * 1024 + 1000
    with PackWriter(tmp_path / "a.lmpack", page_size=2 * 1024 * 1024) as writer:
        writer.add_layer(0, 1, [("up", "U8", (1, nbytes))])
        writer.add_shared("embed", "U8", (nbytes,))
        writer.write_part(0, 0, "up", bytes(nbytes))
        writer.write_shared("embed", 0, bytes(nbytes))
        kept = writer.keep("source/a", b"a")
        file = SourceFile("a", *kept, "source/a", *kept, ())
        writer.finish(architecture="x", config={}, source=Source("gguf", (file,)))
    assert validate(tmp_path / "a.lmpack").ok
    for name, key in (("experts/L000/E0000.bin", ExpertKey(0, 0)), ("shared.bin", None)):
        for position, message in (
            (17 * 1024 * 1024, "sha256 is"),
            (nbytes - 1, "sha256 is"),
            (nbytes, f"padding is not zero at byte {nbytes}"),
            (22 * 1024 * 1024 - 1, f"padding is not zero at byte {22 * 1024 * 1024 - 1}"),
        ):
            flip(tmp_path / "a.lmpack" / name, position)
            problem = the_problem(tmp_path / "a.lmpack")
            assert (problem.file, problem.key) == (name, key)
            assert message in problem.message
            flip(tmp_path / "a.lmpack" / name, position)


def test_what_is_no_folder_and_no_number_of_jobs_is_refused(tiny_pack: TinyPack) -> None:
    with pytest.raises(PackError, match="not a folder"):
        validate(tiny_pack.path / "shared.bin")
    for jobs in (0, -1, 1000):
        with pytest.raises(UsageError, match="expected 1 to 64"):
            validate(tiny_pack.path, jobs=jobs)

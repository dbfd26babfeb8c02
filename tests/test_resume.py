"""Resume: a conversion that is killed at any moment goes on, gives the same pack, and repeats nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import converters.conversion
from converters.checkpoint import CheckpointFile
from converters.conversion import convert
from converters.source_files import LocalFiles
from lmpack.cli.main import run
from lmpack.errors import CheckpointError, SourceChangedError, StorageError, UsageError
from tests.gguf_fixtures import METADATA, gguf_bytes, moe_tensors, write_shards
from tests.kill_conversions import journaled
from tests.round_trip import files_below
from tests.safetensors_fixtures import moe_tensors as hf_moe_tensors
from tests.safetensors_fixtures import write_hf_folder
from tests.test_validation import flip

REPOSITORY = Path(__file__).parents[1]


class KilledError(Exception):
    """Stands for a kill where the test goes on in the same process."""


def shards(folder: Path) -> Path:
    """A split set in which gate/up and down of a layer lie in different files, with two experts alike."""
    tensors = moe_tensors(num_layers=3, extras=("bias", "shexp"))
    folder.mkdir()
    write_shards(folder, [tensors[:7], tensors[7:20], tensors[20:]])
    return folder


def interrupt(src: Path, dst: Path, after_nbytes: int, **options: Any) -> None:
    """Convert until this many source bytes are done."""
    done = 0

    def stop(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if done > after_nbytes:
            raise KilledError

    with pytest.raises(KilledError):
        convert(src, dst, progress=stop, **options)


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the tiny models of these tests take many batches."""
    monkeypatch.setattr(converters.conversion, "BUFFER_NBYTES", 1000)


@pytest.fixture
def src(tmp_path: Path) -> Path:
    """The split set."""
    return shards(tmp_path / "set")


@pytest.fixture
def wanted(src: Path, tmp_path: Path) -> dict[str, bytes]:
    """The files of its pack."""
    convert(src, tmp_path / "wanted.lmpack")
    return files_below(tmp_path / "wanted.lmpack")


def killed(src: Path, work: Path, *options: str) -> Any:
    """Return what tests/kill_conversions.py prints."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.kill_conversions", src, work, *options],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_killed_anywhere_it_goes_on_to_the_same_pack_and_repeats_nothing(src: Path, tmp_path: Path) -> None:
    result = killed(src, tmp_path / "work", "--kills", "50")
    assert result["kills"] == 50
    assert len(result["pack_ids"]) == 1
    assert result["different_packs"] == 0
    assert result["num_resumed"] > 15  # the others were killed before a batch was whole, or when the pack was
    assert result["repeated_nbytes"] == 0
    # the kernel's counts: every byte is read once, from the source or from the pack; in the last step, when only the
    # pack's name is missing, all of it is checked
    assert result["most_read_nbytes"] <= result["whole"]["read_nbytes"] + result["pack_nbytes"] // 2
    # what was taken over is not written again, but for padding
    assert result["most_written_or_resumed_nbytes"] <= result["whole"]["written_nbytes"] + 50_000


def test_killed_while_it_compresses_it_goes_on_to_the_same_pack(src: Path, tmp_path: Path) -> None:
    result = killed(src, tmp_path / "work", "--kills", "20", "--compress")
    assert result["kills"] == 20
    assert len(result["pack_ids"]) == 1
    assert result["different_packs"] == 0


@pytest.mark.usefixtures("small_batches")
def test_what_was_packed_is_taken_over(src: Path, wanted: dict[str, bytes], tmp_path: Path) -> None:
    dst = tmp_path / "m.lmpack"
    interrupt(src, dst, 90_000)
    noted = journaled(tmp_path / "m.lmpack.partial")
    assert noted is not None
    assert convert(src, dst, resume=True).resumed_nbytes == noted > 20_000
    assert files_below(dst) == wanted
    assert sorted(os.listdir(tmp_path)) == ["m.lmpack", "set", "wanted.lmpack"]


@pytest.mark.usefixtures("small_batches")
def test_a_source_without_tensors_for_experts_and_small_files_are_taken_over_too(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "hf", [hf_moe_tensors()])
    (folder / "empty.json").write_bytes(b"")
    convert(folder, tmp_path / "wanted.lmpack")
    total = sum(path.stat().st_size for path in folder.iterdir())
    interrupt(folder, tmp_path / "m.lmpack", total - 100)
    assert convert(folder, tmp_path / "m.lmpack", resume=True).resumed_nbytes > 0
    assert files_below(tmp_path / "m.lmpack") == files_below(tmp_path / "wanted.lmpack")


@pytest.mark.usefixtures("small_batches")
def test_without_resume_what_is_there_is_refused_with_what_to_do(
    src: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dst = tmp_path / "m.lmpack"
    interrupt(src, dst, 90_000)
    assert run(["convert", str(src), str(dst)]) == 2
    assert (
        "m.lmpack.partial: exists; an interrupted conversion left it: continue it with --resume, or delete"
        in (capsys.readouterr().err)
    )
    assert run(["convert", str(src), str(dst), "--resume", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["resumed_nbytes"] > 20_000


@pytest.mark.usefixtures("small_batches")
def test_a_command_without_a_resume_tells_what_is_there_to_be_resumed(src: Path, tmp_path: Path) -> None:
    interrupt(src, tmp_path / "m.lmpack", 90_000)
    with pytest.raises(UsageError, match="interrupted conversion's weights: continue that one with --resume"):
        convert(src, tmp_path / "m.lmpack", reference=True)


def test_resume_with_nothing_to_resume_converts_and_says_so(
    src: Path, wanted: dict[str, bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["convert", str(src), str(tmp_path / "m.lmpack"), "--resume"]) == 0
    assert "resumed: nothing was in the pack already" in capsys.readouterr().err
    assert files_below(tmp_path / "m.lmpack") == wanted
    with pytest.raises(UsageError, match=r"m\.lmpack: exists"):
        convert(src, tmp_path / "m.lmpack", resume=True)


@pytest.mark.usefixtures("small_batches")
def test_what_was_damaged_meanwhile_is_read_again(
    src: Path, wanted: dict[str, bytes], tmp_path: Path
) -> None:
    dst, partial = tmp_path / "m.lmpack", tmp_path / "m.lmpack.partial"
    interrupt(src, dst, 150_000)
    files = sorted(file for file in files_below(partial) if file not in ("journal", "manifest.json"))
    for number, file in enumerate(files):
        nbytes = (partial / file).stat().st_size
        if number % 4 == 0:
            (partial / file).unlink()
        elif number % 4 == 1:
            os.truncate(partial / file, nbytes // 2)
        elif number % 4 == 2 and nbytes:
            flip(partial / file, 0)
            flip(partial / file, nbytes - 1)
        else:
            with (partial / file).open("ab") as opened:
                opened.write(b"more than it should have")
    convert(src, dst, resume=True)
    assert files_below(dst) == wanted


@pytest.mark.usefixtures("small_batches")
def test_a_torn_or_lost_journal_costs_time_only(src: Path, wanted: dict[str, bytes], tmp_path: Path) -> None:
    dst = tmp_path / "m.lmpack"
    journal = tmp_path / "m.lmpack.partial" / "journal"
    interrupt(src, dst, 150_000)
    raw = journal.read_bytes()
    shutil.copytree(journal.parent, tmp_path / "kept.partial")
    resumed = []
    for left in (
        raw,
        raw[:-130],
        raw[: len(raw) // 2],
        raw[: len(raw) // 2] + b"\xff\0\n" + raw[-100:],
        raw[:20],
        b"",
    ):
        journal.write_bytes(left)
        resumed.append(convert(src, dst, resume=True).resumed_nbytes)
        assert files_below(dst) == wanted
        shutil.rmtree(dst)
        shutil.copytree(tmp_path / "kept.partial", journal.parent)
    assert resumed == sorted(resumed, reverse=True)
    assert resumed[0] > resumed[1] > resumed[2] >= resumed[3] > resumed[4] == resumed[5] == 0


@pytest.mark.usefixtures("small_batches")
def test_a_source_that_changed_between_two_runs_is_read_again(src: Path, tmp_path: Path) -> None:
    dst, first = tmp_path / "m.lmpack", min(src.iterdir())
    interrupt(src, dst, 150_000)
    before = first.stat()
    flip(first, before.st_size - 100)
    os.utime(first, ns=(before.st_atime_ns, before.st_mtime_ns))  # size and modification time say nothing
    report = convert(src, dst, resume=True)
    assert 0 < report.resumed_nbytes < 150_000  # the other files' bytes
    assert report.pack_id == convert(src, tmp_path / "new.lmpack").pack_id
    assert files_below(dst) == files_below(tmp_path / "new.lmpack")


@pytest.mark.usefixtures("small_batches")
def test_a_source_that_changed_and_hides_it_is_an_error(src: Path, tmp_path: Path) -> None:
    class Hiding(LocalFiles):
        def identity(self, file: CheckpointFile) -> str:
            return "as-ever"

    dst, first = tmp_path / "m.lmpack", min(src.iterdir())
    interrupt(src, dst, 150_000, files=Hiding())
    flip(first, first.stat().st_size - 1)
    for path in (tmp_path / "m.lmpack.partial").rglob("*.*"):
        path.write_bytes(b"")  # so that the source is needed again
    with pytest.raises(
        CheckpointError, match=r"are not those that the interrupted conversion has read; delete"
    ):
        convert(src, dst, files=Hiding(), resume=True)
    assert not dst.exists()


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("change", ["size", "times", "hash", "replaced", "gone"])
def test_a_source_that_changes_meanwhile_is_an_error_and_is_read_again(
    src: Path, tmp_path: Path, change: str
) -> None:
    dst, file = tmp_path / "m.lmpack", min(src.iterdir())
    before = file.stat()
    aside = tmp_path / "aside"

    def spoil(_: int) -> None:
        if aside.exists():
            return
        shutil.copy2(file, aside)
        if change == "size":
            os.truncate(file, before.st_size - 1)
        elif change == "times":
            os.utime(file, ns=(1, 1))
        elif change == "hash":
            flip(file, before.st_size - 1)
            os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        elif change == "replaced":
            shutil.copy2(file, tmp_path / "other")
            (tmp_path / "other").rename(file)
        else:
            file.unlink()

    with pytest.raises(
        SourceChangedError,
        match=rf"{file.name}: .*(changed while|is no longer there|ends at byte).* \(--resume continues with what is in",
    ):
        convert(src, dst, progress=spoil)
    assert not dst.exists()
    if not file.exists():
        shutil.copy2(aside, file)
    if change == "size":
        with file.open("ab") as opened:
            opened.write(b"!")
    report = convert(src, dst, resume=True)
    assert report.pack_id == convert(src, tmp_path / "new.lmpack").pack_id
    assert files_below(dst) == files_below(tmp_path / "new.lmpack")


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("what", ["page size", "source", "hyperparameter"])
def test_another_source_or_setting_is_refused(src: Path, tmp_path: Path, what: str) -> None:
    dst = tmp_path / "m.lmpack"
    interrupt(src, dst, 90_000)
    before = files_below(tmp_path / "m.lmpack.partial")
    other = tmp_path / "other.gguf"
    metadata = METADATA if what == "source" else {**METADATA, "general.name": "another"}
    other.write_bytes(gguf_bytes(moe_tensors(), metadata))
    with pytest.raises(UsageError, match="begun from another source or with other settings"):
        convert(
            src if what == "page size" else other,
            dst,
            resume=True,
            page_size=8192 if what == "page size" else 4096,
        )
    assert files_below(tmp_path / "m.lmpack.partial") == before


def test_a_file_that_does_not_belong_there_is_named(src: Path, tmp_path: Path) -> None:
    (tmp_path / "m.lmpack.partial").mkdir()
    (tmp_path / "m.lmpack.partial" / "journal").write_bytes(b"")
    (tmp_path / "m.lmpack.partial" / "notes.txt").write_text("mine", encoding="ascii")
    with pytest.raises(UsageError, match=r"notes\.txt: is no part of this pack; move it away"):
        convert(src, tmp_path / "m.lmpack", resume=True)


def test_what_a_killed_unpacking_left_is_not_taken_over(
    src: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dst, partial = tmp_path / "m.lmpack", tmp_path / "m.lmpack.partial"
    convert(src, dst)
    (dst / "manifest.json").unlink()
    dst.rename(partial)
    before = files_below(partial)
    assert run(["convert", str(src), str(dst)]) == 2
    assert "m.lmpack.partial: exists; a command that was killed left it; delete it" in capsys.readouterr().err
    assert run(["convert", str(src), str(dst), "--resume"]) == 2
    assert "m.lmpack.partial: no conversion left it, for there is no journal in it" in capsys.readouterr().err
    assert files_below(partial) == before


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("resume", [True, False])
def test_two_conversions_of_one_pack_do_not_mix(
    src: Path, wanted: dict[str, bytes], tmp_path: Path, resume: bool
) -> None:
    refused = []

    def second(_: int) -> None:
        try:
            convert(src, tmp_path / "m.lmpack", resume=resume)
        except UsageError as error:
            refused.append(str(error))

    convert(src, tmp_path / "m.lmpack", progress=second)
    assert files_below(tmp_path / "m.lmpack") == wanted
    assert set(refused) == {f"{tmp_path / 'm.lmpack.partial'}: another process is writing it; wait for it"}


class ShardByShard:
    """Hands out copies of shards, and deletes each when it is released, as a download would."""

    discards = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events: list[str] = []

    def identity(self, file: CheckpointFile) -> str:
        return f"revision-1/{file.name}"

    def fetch(self, file: CheckpointFile) -> CheckpointFile:
        self.events.append(f"fetch {file.name[-19:-14]}")
        self.folder.mkdir(exist_ok=True)
        shutil.copy2(file.path, self.folder / file.name)
        return CheckpointFile.of(self.folder / file.name, file.name)

    def release(self, file: CheckpointFile) -> None:
        self.events.append(f"release {file.name[-19:-14]}")
        (self.folder / file.name).unlink(missing_ok=True)


def test_shards_that_are_deleted_as_they_are_packed_are_never_asked_for_again(
    src: Path, wanted: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(converters.conversion, "BUFFER_NBYTES", 1000)
    files = ShardByShard(tmp_path / "downloads")
    nbytes = [path.stat().st_size for path in sorted(src.iterdir())]
    interrupt(src, tmp_path / "m.lmpack", nbytes[0] + nbytes[1] // 2, files=files)
    assert files.events == ["fetch 00001", "release 00001", "fetch 00002"]
    files.events.clear()
    convert(src, tmp_path / "m.lmpack", files=files, resume=True)
    assert files.events == ["release 00001", "fetch 00002", "release 00002", "fetch 00003", "release 00003"]
    assert files_below(tmp_path / "m.lmpack") == wanted
    assert list((tmp_path / "downloads").iterdir()) == []


def test_a_shard_is_not_given_up_when_the_pack_does_not_give_its_bytes_back(
    src: Path, tmp_path: Path
) -> None:
    files = ShardByShard(tmp_path / "downloads")
    partial = tmp_path / "m.lmpack.partial"

    class Damaging(ShardByShard):
        def identity(self, file: CheckpointFile) -> str:
            for path in partial.glob("experts/*/E0000.bin"):
                flip(path, 0)  # between writing and reading back
            return super().identity(file)

    files = Damaging(tmp_path / "downloads")
    with pytest.raises(StorageError, match="does not give back the bytes of"):
        convert(src, tmp_path / "m.lmpack", files=files)
    assert files.events == ["fetch 00001"]

"""Writing a pack: the same bytes whatever the order and the threads, whole or not at all."""

from __future__ import annotations

import os
import resource
import signal
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from lmpack.errors import ManifestError, PackError, StorageError, UnsupportedError, UsageError
from lmpack.manifest import Source, SourceFile
from lmpack.pack import Pack
from lmpack.pack_writer import PackWriter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import TinyPack, WriteTinyPack


def contents(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def finish(writer: PackWriter, *, architecture: str = "tinymoe") -> None:
    nbytes, sha256 = writer.keep("source/a", b"a")
    file = SourceFile("a", nbytes, sha256, "source/a", nbytes, sha256, ())
    writer.finish(architecture=architecture, config={}, source=Source("gguf", (file,)))


def test_order_and_threads_do_not_change_a_byte(
    write_tiny_pack: WriteTinyPack, tiny_pack: TinyPack, tmp_path: Path
) -> None:
    wanted = contents(tiny_pack.path)
    for seed in range(6):
        other = write_tiny_pack(tmp_path / f"{seed}.lmpack", seed=seed, num_threads=1 + seed)
        assert other.manifest.pack_id == tiny_pack.manifest.pack_id
        assert contents(other.path) == wanted


@pytest.mark.parametrize("page_size", [4096, 16384, 2 * 1024 * 1024])
def test_every_file_of_the_runtime_is_padded_to_the_page(
    write_tiny_pack: WriteTinyPack, tmp_path: Path, page_size: int
) -> None:
    tiny = write_tiny_pack(tmp_path / "tiny.lmpack", page_size=page_size)
    sizes = {
        file: len(raw) for file, raw in contents(tiny.path).items() if not file.startswith(("source", "man"))
    }
    assert len(sizes) == 5
    assert all(nbytes % page_size == 0 for nbytes in sizes.values())
    assert all(tensor.offset % page_size == 0 for tensor in tiny.manifest.shared)
    assert Pack.open(tiny.path).manifest == tiny.manifest


def test_the_partial_folder_is_gone_when_the_pack_is_there(tiny_pack: TinyPack) -> None:
    assert os.listdir(tiny_pack.path.parent) == ["tiny.lmpack"]


def test_identical_experts_are_stored_once_even_across_layers(tmp_path: Path) -> None:
    with PackWriter(tmp_path / "a.lmpack") as writer:
        for layer in (5, 2):
            writer.add_layer(layer, 2, [("up", "U8", (1, 4))])
        for layer in (5, 2):
            for expert in (1, 0):
                writer.write_part(layer, expert, "up", b"same" if layer == 5 else b"some")
        finish(writer)
    manifest = Pack.open(tmp_path / "a.lmpack").manifest
    files = [expert.file for layer in manifest.layers for expert in layer.experts]
    assert files == ["experts/L002/E0000.bin"] * 2 + ["experts/L005/E0000.bin"] * 2
    assert sorted(contents(tmp_path / "a.lmpack")) == [
        "experts/L002/E0000.bin",
        "experts/L005/E0000.bin",
        "manifest.json",
        "shared.bin",
        "source/a",
    ]


def test_a_layer_of_only_duplicates_leaves_no_folder(tmp_path: Path) -> None:
    with PackWriter(tmp_path / "a.lmpack") as writer:
        for layer in (0, 1):
            writer.add_layer(layer, 2, [("up", "U8", (1, 4))])
        for layer in (0, 1):
            for expert in (0, 1):
                writer.write_part(layer, expert, "up", b"same")
        finish(writer)
    assert os.listdir(tmp_path / "a.lmpack" / "experts") == ["L000"]


def test_nothing_is_created_before_the_first_byte(tmp_path: Path) -> None:
    with PackWriter(tmp_path / "deep" / "a.lmpack") as writer:
        writer.add_layer(0, 3, [("up", "F32", (1, 4))])
        writer.add_shared("norm", "F32", (4,))
        assert writer.planned_nbytes == 3 * 4096 + 4096
        assert writer.planned_num_files == 3 + 1 + 5
    assert os.listdir(tmp_path) == []


def test_an_error_leaves_the_partial_folder_and_no_pack(tmp_path: Path) -> None:
    writer = PackWriter(tmp_path / "a.lmpack")
    writer.add_layer(0, 2, [("up", "U8", (1, 4))])
    with pytest.raises(RuntimeError), writer:
        writer.write_part(0, 0, "up", b"four")
        raise RuntimeError
    assert os.listdir(tmp_path) == ["a.lmpack.partial"]
    with pytest.raises(ManifestError, match="not a pack"):
        Pack.open(tmp_path / "a.lmpack.partial")
    with pytest.raises(ValueError, match="closed"):
        writer.write_part(0, 1, "up", b"four")


def test_a_destination_that_exists_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.lmpack").mkdir()
    with pytest.raises(UsageError, match=r"a\.lmpack: exists; choose another name"):
        PackWriter(tmp_path / "a.lmpack")
    (tmp_path / "b.lmpack.partial").mkdir()
    with pytest.raises(UsageError, match=r"b\.lmpack\.partial: exists; a command that was killed left it"):
        PackWriter(tmp_path / "b.lmpack")
    (tmp_path / "b.lmpack.partial" / "journal").write_bytes(b"")
    with pytest.raises(UsageError, match=r"b\.lmpack\.partial: exists; an interrupted conversion left it"):
        PackWriter(tmp_path / "b.lmpack")
    (tmp_path / "c.lmpack").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"c\.lmpack: exists"):
        PackWriter(tmp_path / "c.lmpack")


def test_two_writers_of_one_destination_do_not_mix(tmp_path: Path) -> None:
    writers = [PackWriter(tmp_path / "a.lmpack") for _ in range(3)]
    for writer in writers:
        writer.add_shared("norm", "U8", (4,))
    with writers[0]:
        writers[0].write_shared("norm", 0, b"four")
        with pytest.raises(
            UsageError, match=r"a\.lmpack\.partial: another process is writing it; wait for it"
        ):
            writers[1].write_shared("norm", 0, b"four")
    with pytest.raises(UsageError, match=r"a\.lmpack\.partial: exists; a command that was killed left it"):
        writers[2].write_shared("norm", 0, b"four")


def test_a_destination_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    with PackWriter(tmp_path / "a.lmpack") as writer:
        writer.add_shared("norm", "U8", (4,))
        writer.write_shared("norm", 0, b"four")
        (tmp_path / "a.lmpack").mkdir()
        with pytest.raises(UsageError, match="appeared meanwhile"):
            finish(writer)
    assert os.listdir(tmp_path / "a.lmpack") == []
    Pack.open(tmp_path / "a.lmpack.partial")  # whole but for its name, as the message says


def test_the_destination_may_be_named_by_dots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in (".", "..", ""):
        with pytest.raises(UsageError, match="exists"):
            PackWriter(name)


@pytest.mark.parametrize("page_size", [0, -4096, 512, 4095, 12288, 4 * 1024 * 1024])
def test_a_page_size_outside_the_format_is_refused(tmp_path: Path, page_size: int) -> None:
    with pytest.raises(UsageError, match="expected a power of two from 4096 to 2097152"):
        PackWriter(tmp_path / "a.lmpack", page_size=page_size)


def test_missing_bytes_are_named_at_the_end(tmp_path: Path) -> None:
    with PackWriter(tmp_path / "a.lmpack") as writer:
        writer.add_layer(7, 2, [("up", "U8", (1, 4)), ("down", "U8", (1, 4))])
        writer.add_shared("norm", "U8", (4,))
        writer.write_part(7, 0, "down", b"four")
        with pytest.raises(PackError, match="expert L007/E0000 lacks up"):
            finish(writer)
        for expert, role in ((0, "up"), (1, "down"), (1, "up")):
            writer.write_part(7, expert, role, b"four")
        writer.write_shared("norm", 0, b"two")
        nbytes, sha256 = 1, "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb"
        kept = SourceFile("a", nbytes, sha256, "source/a", nbytes, sha256, ())
        with pytest.raises(PackError, match="shared tensor 'norm' has 3 of 4 bytes"):
            writer.finish(architecture="x", config={}, source=Source("gguf", (kept,)))
        writer.write_shared("norm", 3, b"!")
        with pytest.raises(PackError, match="the source and the kept files differ in source/a"):
            writer.finish(architecture="x", config={}, source=Source("gguf", ()))
    assert os.listdir(tmp_path) == ["a.lmpack.partial"]


def test_wrong_calls_are_refused_at_once(tmp_path: Path) -> None:
    with PackWriter(tmp_path / "a.lmpack") as writer:
        writer.add_layer(0, 1, [("up", "U8", (1, 4)), ("down", "U8", (1, 4))])
        writer.add_shared("norm", "U8", (4,))
        with pytest.raises(ValueError, match="was added before"):
            writer.add_shared("norm", "U8", (4,))
        with pytest.raises(ValueError, match="cannot be added"):
            writer.add_layer(0, 1, [("up", "U8", (1, 4))])
        with pytest.raises(ValueError, match="stands twice"):
            writer.add_layer(1, 1, [("up", "U8", (1, 4)), ("up", "U8", (1, 4))])
        writer.write_part(0, 0, "up", b"four")
        with pytest.raises(ValueError, match="up was written before"):
            writer.write_part(0, 0, "up", b"four")
        with pytest.raises(ValueError, match="down takes 4 bytes, got 5"):
            writer.write_part(0, 0, "down", b"five!")
        for expert in (1, -1):
            with pytest.raises(ValueError, match="added with 1 experts"):
                writer.write_part(0, expert, "up", b"four")
        with pytest.raises(ValueError, match=r"bytes 1\+1 do not follow 0 of 4"):
            writer.write_shared("norm", 1, b"x")
        with pytest.raises(ValueError, match=r"bytes 0\+5 do not follow 0 of 4"):
            writer.write_shared("norm", 0, b"fiver")
        with pytest.raises(ValueError, match="layout is fixed"):
            writer.add_shared("late", "U8", (4,))


def test_what_the_format_cannot_hold_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    writer = PackWriter(tmp_path / "a.lmpack")
    with pytest.raises(UnsupportedError, match="'Q9_9' is not known"):
        writer.add_layer(0, 1, [("up", "Q9_9", (1, 4))])
    with pytest.raises(UnsupportedError, match="multiple of 256"):
        writer.add_layer(0, 1, [("up", "Q4_K", (2, 128))])
    with pytest.raises(UnsupportedError, match="role"):
        writer.add_layer(0, 1, [("Up!", "F32", (2, 128))])
    with pytest.raises(UnsupportedError, match="name: expected a printable string"):
        writer.add_shared("a\nb", "F32", (2,))
    with pytest.raises(UnsupportedError, match="more than a file can have"):
        writer.add_shared("big", "F32", (2**40, 2**40))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "kept", ["source/../x", "/etc/x", "source/a\\b", "source//a", "source/a\0", "source/"]
)
def test_a_kept_file_cannot_leave_the_pack(tmp_path: Path, kept: str) -> None:
    with PackWriter(tmp_path / "a.lmpack") as writer, pytest.raises(UnsupportedError, match="kept file"):
        writer.keep(kept, b"x")
    assert os.listdir(tmp_path) == []


def test_a_kept_file_may_come_from_a_path_and_lie_in_folders(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"{}" * 9_000_000)
    with PackWriter(tmp_path / "a.lmpack") as writer:
        nbytes, sha256 = writer.keep("source/sub/tokenizer.json", tmp_path / "tokenizer.json")
        name = "sub/tokenizer.json"
        file = SourceFile(name, nbytes, sha256, f"source/{name}", nbytes, sha256, ())
        writer.finish(architecture="x", config={}, source=Source("safetensors", (file,)))
    kept = Pack.open(tmp_path / "a.lmpack").kept_file("sub/tokenizer.json")
    assert kept is not None
    assert kept.read_bytes() == b"{}" * 9_000_000


def test_a_kept_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with (
        PackWriter(tmp_path / "a.lmpack") as writer,
        pytest.raises(StorageError, match=r"nothing\.json: no such file"),
    ):
        writer.keep("source/nothing.json", tmp_path / "nothing.json")


def test_a_description_that_no_manifest_can_hold_leaves_no_pack(tmp_path: Path) -> None:
    with PackWriter(tmp_path / "a.lmpack") as writer:
        writer.add_shared("norm", "U8", (4,))
        writer.write_shared("norm", 0, b"four")
        with pytest.raises(UnsupportedError, match="architecture"):
            finish(writer, architecture="../x")
    assert os.listdir(tmp_path) == ["a.lmpack.partial"]


@pytest.fixture
def small_files_only() -> Iterator[None]:
    """Make the kernel refuse files above 16 KiB, which is as good as a full drive."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 * 1024, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.usefixtures("small_files_only")
def test_a_write_that_the_drive_refuses_is_a_storage_error(tmp_path: Path) -> None:
    with PackWriter(tmp_path / "a.lmpack") as writer:
        writer.add_layer(0, 1, [("up", "U8", (1, 20_000))])
        writer.add_shared("embed", "U8", (20_000,))
        with pytest.raises(StorageError, match=r"E0000\.bin: a file this large is not allowed here"):
            writer.write_part(0, 0, "up", bytes(20_000))
        with pytest.raises(StorageError, match=r"shared\.bin: a file this large is not allowed here"):
            writer.write_shared("embed", 0, bytes(20_000))
        with pytest.raises(StorageError, match=r"source/a: a file this large is not allowed here"):
            writer.keep("source/a", bytes(20_000))
    assert os.listdir(tmp_path) == ["a.lmpack.partial"]


def test_a_full_drive_is_a_storage_error(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    with PackWriter(tmp_path / "a.lmpack") as writer:
        writer.add_layer(0, 1, [("up", "U8", (1, 4))])
        writer.keep("source/a", b"a")  # creates the folders
        (writer.folder.path / "experts" / "L000" / "E0000.bin").symlink_to("/dev/full")
        with pytest.raises(StorageError, match=r"E0000\.bin: no space \(or inodes\) left on the drive"):
            writer.write_part(0, 0, "up", b"four")


def test_a_folder_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with (
        PackWriter(tmp_path / "file" / "a.lmpack") as writer,
        pytest.raises(StorageError, match="a file stands where"),
    ):
        writer.keep("source/a", b"a")
    long = PackWriter(tmp_path / ("n" * 250))
    with long, pytest.raises(StorageError, match="the name is too long"):
        long.keep("source/a", b"a")


def test_one_open_file_is_enough_however_many_experts_there_are(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    in_use = max(map(int, os.listdir("/proc/self/fd"))) if Path("/proc/self/fd").exists() else 64
    with PackWriter(tmp_path / "a.lmpack") as writer:
        writer.add_layer(0, 300, [("up", "U8", (1, 4)), ("down", "U8", (1, 4))])
        resource.setrlimit(resource.RLIMIT_NOFILE, (in_use + 8, limits[1]))
        try:
            for role in ("up", "down"):
                for expert in range(300):
                    writer.write_part(0, expert, role, expert.to_bytes(4, "little"))
            finish(writer)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert Pack.open(tmp_path / "a.lmpack").manifest.num_experts == 300


def test_memory_does_not_grow_with_the_pack(tmp_path: Path) -> None:
    part = bytes(256 * 1024)
    with PackWriter(tmp_path / "a.lmpack") as writer:
        writer.add_layer(0, 128, [("up", "U8", (1, len(part)))])
        tracemalloc.start()
        try:
            for expert in range(128):
                writer.write_part(0, expert, "up", part)
            finish(writer)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < 2 * 1024 * 1024

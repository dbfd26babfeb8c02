"""Drives and users that interfere with a run: clear errors, right tokens afterwards, nothing left behind."""

from __future__ import annotations

import contextlib
import shutil
import signal
import threading
from typing import TYPE_CHECKING

import pytest

from lmpack.cli.main import run
from lmpack.errors import StorageError
from runtime.engine import Engine
from runtime.sampler import SamplingParams

if TYPE_CHECKING:
    from pathlib import Path

PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)
IO = ["direct", "mmap"]


@pytest.fixture
def pack(demo_pack: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return shutil.copytree(demo_pack, tmp_path / "demo.lmpack")


def tokens(engine: Engine) -> list[int]:
    return [token.token_id for token in engine.generate(engine.tokenizer.encode("One day a fox"), PARAMS)]


def readers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("expert-reader")]


@pytest.mark.parametrize("io", IO)
@pytest.mark.parametrize("fault", ["gone", "truncated"])
def test_a_file_that_fails_while_running_is_named_and_the_run_goes_on_when_it_is_back(
    pack: Path, io: str, fault: str
) -> None:
    folder = pack / "experts" / "L003"
    with Engine.load(pack, io=io, num_threads=1) as engine:
        aside = folder.rename(pack / "aside")
        if fault == "truncated":
            shutil.copytree(aside, folder)
            for file in folder.iterdir():
                file.write_bytes(file.read_bytes()[:4096])
        for _ in range(2):
            with pytest.raises(StorageError, match=r"expert L003/E00\d\d: .*; run: lmpack validate"):
                tokens(engine)
        if folder.exists():
            shutil.rmtree(folder)
        aside.rename(folder)
        after = tokens(engine)
    assert readers() == []
    with Engine.load(pack, io=io, num_threads=1) as engine:
        assert tokens(engine) == after


@pytest.mark.parametrize("io", IO)
def test_an_inverted_byte_is_found_when_reads_are_verified(
    pack: Path, io: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in (pack / "experts" / "L002").iterdir():
        raw = bytearray(file.read_bytes())
        raw[100] ^= 0xFF
        file.write_bytes(raw)
    command = ["run", str(pack), "-p", "One day", "-n", "1", "--io", io, "--threads", "1"]
    assert run(command) == 0
    capsys.readouterr()
    assert run([*command, "--verify-reads"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("lmpack: error: expert L002/E00")
    assert "sha256 is" in error
    assert error.endswith(f"run: lmpack validate {pack}")
    assert readers() == []


def test_an_inverted_byte_of_a_shared_tensor_is_found_when_reads_are_verified(pack: Path) -> None:
    raw = bytearray((pack / "shared.bin").read_bytes())
    raw[100] ^= 0xFF
    (pack / "shared.bin").write_bytes(raw)
    with pytest.raises(StorageError, match=r"shared\.bin: .* is not what the manifest says"):
        Engine.load(pack, verify_reads=True)
    assert readers() == []


# an interrupt that meets a weak reference's callback is lost there, which Python reports and pytest takes for a failure
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("io", IO)
def test_interrupted_at_any_moment_it_gives_the_same_tokens_afterwards(demo_pack: Path, io: str) -> None:
    with Engine.load(demo_pack, io=io, num_threads=1) as engine:
        expected = tokens(engine)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for delay_ms in (1, 3, 7, 12, 25, 60):
            with Engine.load(demo_pack, io=io, num_threads=1, verify_reads=True) as engine:
                with contextlib.suppress(KeyboardInterrupt):  # around `finally`, where it may come, too
                    try:
                        signal.setitimer(signal.ITIMER_REAL, delay_ms / 1000)
                        tokens(engine)
                    finally:
                        signal.setitimer(signal.ITIMER_REAL, 0)
                assert tokens(engine) == expected
    finally:
        signal.signal(signal.SIGALRM, before)
    assert readers() == []

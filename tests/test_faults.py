"""Drives and users that interfere with a run: clear errors, right tokens afterwards, nothing left behind."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from lmpack.cli.main import run
from lmpack.errors import StorageError
from lmpack.pack import Pack
from profiles.routing_recorder import RoutingRecorder
from profiles.routing_shape import RoutingShape
from runtime.engine import Engine
from runtime.sampler import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from _typeshed import TraceFunction

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


@pytest.mark.parametrize("io", IO)
def test_interrupted_at_any_line_it_gives_the_same_tokens_afterwards(demo_pack: Path, io: str) -> None:
    with Engine.load(demo_pack, io=io, num_threads=1) as engine:
        expected = tokens(engine)
        for number in count(1):
            try:
                with interrupt_at_line(number):
                    tokens(engine)
            except KeyboardInterrupt:
                assert tokens(engine) == expected
            else:
                break
    assert number > 100
    assert readers() == []


@contextmanager
def interrupt_at_line(number: int) -> Iterator[None]:
    """As a signal would, in what this thread executes of the engine."""
    lines = 0

    def trace(frame: FrameType, event: str, _: object) -> TraceFunction | None:
        nonlocal lines
        if Path(frame.f_code.co_filename).name not in ("engine.py", "compute_thread.py"):
            return None
        lines += event == "line"
        if lines == number:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def test_an_interrupted_prompt_ends_at_the_next_layer(demo_pack: Path) -> None:
    interrupted = threading.Event()
    layers: list[int] = []

    class Interrupter(RoutingRecorder):
        def on_select(self, layer: int, *_: object) -> None:
            layers.append(layer)
            if layers == [0, 1]:
                os.kill(os.getpid(), signal.SIGINT)
                assert interrupted.wait(60)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    recorder = Interrupter(RoutingShape.of_manifest(Pack.open(demo_pack).manifest))
    with Engine.load(demo_pack, recorder=recorder, num_threads=1) as engine:
        try:
            with pytest.raises(KeyboardInterrupt):
                tokens(engine)
        finally:
            signal.signal(signal.SIGINT, before)
        interrupted.set()
        tokens(engine)
    assert layers[:5] == [0, 1, 0, 1, 2]

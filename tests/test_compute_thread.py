"""The thread that an engine computes in, and those that read for it: interrupts, forks, and the interpreter's end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from lmpack.expert_key import ExpertKey
from runtime.compute_thread import AbandonedError, ComputeThread
from runtime.expert_readers import ExpertReaders, Read

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

DEADLINE_S = 120
INTERRUPTED_AT_THE_END = """
import os, signal, torch
from runtime.compute_thread import ComputeThread

signal.signal(signal.SIGINT, signal.default_int_handler)
thread = ComputeThread()
x = torch.ones(64, 64)

def compute():
    os.kill(os.getpid(), signal.SIGINT)
    while True:
        x @ x
        thread.check()

try:
    thread.run(compute)
except KeyboardInterrupt:
    print("interrupted")
"""
FORKED = """
import os, sys
from runtime.engine import Engine
from runtime.sampler import SamplingParams

with Engine.load(sys.argv[1], num_threads=2) as engine:
    child = os.fork()
    if child == 0:
        try:
            list(engine.generate(engine.tokenizer.encode("One day"), SamplingParams(max_tokens=1)))
        except ValueError as error:
            print(error)
            sys.exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert list(engine.generate(engine.tokenizer.encode("One day"), SamplingParams(max_tokens=1)))
"""


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """A shell's job in the background ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def python(script: str, *args: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a script of its own."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script, *args]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    return ended.returncode, ended.stdout, ended.stderr


@contextmanager
def while_main_waits_in(name: str, act: Callable[[], None]) -> Iterator[None]:
    """Do something in another thread as soon as the main thread waits somewhere below a function of this name."""
    left = threading.Event()

    def watch() -> None:
        before = None
        while not left.is_set():
            innermost = frame = sys._current_frames()[threading.main_thread().ident or 0]
            while frame.f_back is not None and frame.f_code.co_name != name:
                frame = frame.f_back
            place = (id(innermost), innermost.f_lasti)
            if frame.f_code.co_name == name and place == before:
                act()
                return
            before = place
            os.sched_yield()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        left.set()
        watcher.join()


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_what_an_interrupt_abandons_ends_at_its_next_check() -> None:
    thread = ComputeThread()
    abandoned = threading.Event()

    def compute() -> None:
        interrupt()
        try:
            while True:
                thread.check()
        except AbandonedError:
            abandoned.set()
            raise

    with pytest.raises(KeyboardInterrupt):
        thread.run(compute)
    assert thread.run(abandoned.is_set)
    thread.close()


def test_a_close_that_was_interrupted_waits_when_it_is_called_again() -> None:
    thread = ComputeThread()
    begun, released, ended = threading.Event(), threading.Event(), threading.Event()

    def compute() -> None:
        begun.set()
        assert released.wait(DEADLINE_S)
        ended.set()

    caller = threading.Thread(target=thread.run, args=(compute,))
    caller.start()
    assert begun.wait(DEADLINE_S)
    with pytest.raises(KeyboardInterrupt), while_main_waits_in("close", interrupt):
        thread.close()
    with while_main_waits_in("close", released.set):
        thread.close()
    assert ended.is_set()
    caller.join()


def test_readers_whose_close_was_interrupted_are_waited_for_when_it_is_called_again() -> None:
    begun, released, ended = threading.Event(), threading.Event(), threading.Event()

    def read(key: ExpertKey, slot: int) -> int:
        begun.set()
        assert released.wait(DEADLINE_S)
        ended.set()
        return 0

    readers = ExpertReaders(read, num_threads=2)
    readers.start(Read(ExpertKey(0, 0), 0))
    assert begun.wait(DEADLINE_S)
    with pytest.raises(KeyboardInterrupt), while_main_waits_in("close", interrupt):
        readers.close()
    with while_main_waits_in("close", released.set):
        readers.close()
    assert ended.is_set()


def test_a_closed_thread_refuses_to_compute() -> None:
    thread = ComputeThread()
    thread.close()
    thread.close()
    with pytest.raises(ValueError, match="the engine is closed"):
        thread.run(int)


def test_an_interpreter_that_ends_while_it_computes_ends_cleanly() -> None:
    assert python(INTERRUPTED_AT_THE_END) == (0, "interrupted\n", "")


def test_a_fork_is_told_that_the_engine_is_another_processs(demo_pack: Path) -> None:
    exit_code, out, _ = python(FORKED, str(demo_pack))
    assert (exit_code, out) == (
        0,
        "the engine is closed, or this process is a fork of the one that loaded it\n",
    )

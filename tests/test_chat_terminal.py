"""lmpack chat on a real terminal: line editing, pastes, Ctrl-C in mid-answer, Ctrl-D."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytest.importorskip("readline", reason="this Python was built without readline")

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
CTRL_A, CTRL_C, CTRL_D = "\x01", "\x03", "\x04"
PASTE, END_OF_PASTE = "\x1b[200~", "\x1b[201~"
DEADLINE_S = 120
# The first wait for a key begins with an interrupt, after the line editor has looked for one.
INTERRUPTED_SELECT = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <sys/select.h>

int select(int count, fd_set *read, fd_set *write, fd_set *except, struct timeval *timeout) {
    static int interrupted;
    if (count == 1 && !interrupted) { interrupted = 1; raise(SIGINT); }
    return ((int (*)(int, fd_set *, fd_set *, fd_set *, struct timeval *))dlsym(RTLD_NEXT, "select"))(
        count, read, write, except, timeout);
}
"""
# A terminal sends SIGINT to the session whose terminal it is: make it the chat's before the chat starts.
LOGIN = """
import fcntl, os, signal, sys, termios
signal.signal(signal.SIGINT, signal.SIG_DFL)  # which the jobs of a shell's background ignore
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-m", "lmpack", *sys.argv[1:]])
"""


class Terminal:
    """The keyboard and the screen of a running chat."""

    def __init__(self, descriptor: int, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self._descriptor = descriptor
        self._unread = ""

    def type(self, keys: str) -> None:
        os.write(self._descriptor, keys.encode())

    def wait_for(self, pattern: str) -> str:
        """What is shown up to the pattern's end, without the sequences that steer a terminal."""
        deadline = time.monotonic() + DEADLINE_S
        while not (found := re.search(pattern, self._unread)):
            assert select.select([self._descriptor], [], [], deadline - time.monotonic())[0], self._unread
            try:
                raw = os.read(self._descriptor, 65_536)
            except OSError:  # how Linux says that the other end is closed
                raw = b""
            assert raw, f"the chat ended: {self._unread}"
            self._unread += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", raw.decode()).replace("\r", "")
        shown, self._unread = self._unread[: found.end()], self._unread[found.end() :]
        return shown

    def say(self, line: str) -> str:
        """Type a line and return the answer to it, up to the next prompt."""
        self.type(f"{line}\r")
        return self.wait_for(r"\n> ")


@contextmanager
def chat(*args: str, **environment: str) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", LOGIN, "chat", *args],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=os.environ | {"TERM": "xterm", "INPUTRC": os.devnull, "COLUMNS": "500"} | environment,
    )
    os.close(theirs)
    try:
        terminal = Terminal(ours, process)
        terminal.wait_for("> ")
        yield terminal
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_a_session_with_edited_lines_pastes_and_slash_commands(demo_pack: Path) -> None:
    with chat(str(demo_pack), "-n", "24") as terminal:
        assert ANSWER in terminal.say(f"{QUESTION.removeprefix('What')}{CTRL_A}What")
        assert "Ctrl-D leaves" in terminal.say("/help")
        terminal.say("")
        terminal.say("/clear")
        assert ANSWER in terminal.say(f"{PASTE}{QUESTION}\n{END_OF_PASTE}")
        terminal.say("/clear")
        assert ANSWER in terminal.say("\x1b[A\x1b[A")  # arrow up, twice: the line before the last
        terminal.type(CTRL_D)
        assert terminal.process.wait(DEADLINE_S) == 0


def test_a_paste_longer_than_a_terminals_line_is_one_turn(demo_pack: Path) -> None:
    sentences = 400  # 8,400 bytes; a terminal by itself cuts a line after 4,095
    with chat(str(demo_pack), "-n", "24") as terminal:
        terminal.type(f"{PASTE}{'The fox saw the hen. ' * sentences}{END_OF_PASTE}")
        told = terminal.say("")
        found = re.search(r"(\d+) tokens do not fit", told)
        assert found is not None
        assert int(found[1]) > 6 * sentences
        assert ANSWER in terminal.say(QUESTION)


def test_ctrl_c_stops_the_answer_and_not_the_talk(demo_pack: Path) -> None:
    with chat(str(demo_pack), "-n", "100000", "--kernels", "torch", "--temperature", "1") as terminal:
        terminal.type("Tell me a story about a fox.\r")
        terminal.wait_for(r"fox\.\n\S")
        terminal.type(CTRL_C)
        terminal.wait_for(r"\n> ")
        terminal.say("/clear")
        terminal.type(CTRL_D)
        assert terminal.process.wait(DEADLINE_S) == 0


def test_ctrl_c_drops_a_line(demo_pack: Path) -> None:
    with chat(str(demo_pack)) as terminal:
        terminal.say("/clear")
        terminal.type(f"half a line{CTRL_C}")
        terminal.wait_for(r"\n> ")
        terminal.type(CTRL_D)
        assert terminal.process.wait(DEADLINE_S) == 0


def test_ctrl_c_is_heard_when_it_comes_just_before_the_wait_for_a_key(
    demo_pack: Path, tmp_path: Path
) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    shim = tmp_path / "interrupt.so"
    (tmp_path / "interrupt.c").write_text(INTERRUPTED_SELECT)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", shim, tmp_path / "interrupt.c", "-ldl"], check=True)
    with chat(str(demo_pack), "-n", "24", LD_PRELOAD=str(shim)) as terminal:
        terminal.wait_for(r"\n> ")
        assert ANSWER in terminal.say(QUESTION)
        terminal.type(CTRL_D)
        assert terminal.process.wait(DEADLINE_S) == 0

"""A drive that fails under the direct store: a library between Python and the C library makes system calls fail."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.expert_packs import write_expert_pack

REPOSITORY = Path(__file__).parents[1]

SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

/* opening with O_DIRECT fails while REFUSE_DIRECT is set */
#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest); \
        if ((flags & O_DIRECT) && getenv("REFUSE_DIRECT")) { errno = EINVAL; return -1; } \
        return ((int (*)(const char *, int, mode_t))dlsym(RTLD_NEXT, #name))(path, flags, mode); \
    }
OPEN(open)
OPEN(open64)

/* A file whose path holds BAD_FILE, while the file BAD_WHILE exists: reading it fails, or with STALL waits
   until that file is gone, after a line on standard output */
static int bad(int fd) {
    char link[64], path[4096];
    const char *name = getenv("BAD_FILE"), *switched = getenv("BAD_WHILE");
    if (!name || !switched || access(switched, F_OK)) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    if (!strstr(path, name)) return 0;
    if (!getenv("STALL")) return 1;
    dprintf(1, "stalled\n");
    while (!access(switched, F_OK)) usleep(1000);
    return 0;
}
/* with SHORT_READS a read gives one page at most, as read(2) may */
#define READ_AS(name, parameters, arguments) \
    ssize_t name parameters { \
        if (bad(fd)) { errno = EIO; return -1; } \
        struct iovec first = *iov; \
        if (getenv("SHORT_READS")) { iov = &first; count = 1; if (first.iov_len > 4096) first.iov_len = 4096; } \
        return ((ssize_t (*) parameters)dlsym(RTLD_NEXT, #name)) arguments; \
    }
#define READ(name) READ_AS(name, (int fd, const struct iovec *iov, int count, off_t offset), (fd, iov, count, offset))
#define READ2(name) READ_AS(name, (int fd, const struct iovec *iov, int count, off_t offset, int flags), \
    (fd, iov, count, offset, flags))
READ(preadv)
READ(preadv64)
READ2(preadv2)
READ2(preadv64v2)
"""

READ_ALL = """
import os, sys
from lmpack.errors import StorageError
from lmpack.pack import Pack
from runtime.direct_store import DirectStore
from tests.expert_packs import all_keys, budget_with_slots, load

pack = Pack.open(sys.argv[1])
store = DirectStore(pack, budget_with_slots(pack.manifest))
print(store.name)
keys = all_keys(pack)
slots = [store.acquire(key) for key in keys]
try:
    load(store, keys, slots)
except StorageError as error:
    print(error)
    os.unlink(os.environ["BAD_WHILE"])
    load(store, keys, slots)
for key, slot in zip(keys, slots):
    bank = store.bank(key.layer)
    assert bank.storage[slot * bank.stride : (slot + 1) * bank.stride].numpy().tobytes() == pack.read_expert(key)
store.close()
print("all read")
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library, compiled for this machine."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("shim")
    (folder / "shim.c").write_text(SHIM, encoding="ascii")
    library = folder / "shim.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, folder / "shim.c", "-ldl"], check=True)
    return library


def read_all(pack: Path, shim: Path, **environment: str) -> list[str]:
    """What a process prints that reads every expert with the shim in its way."""
    done = subprocess.run(
        [sys.executable, "-c", READ_ALL, pack],
        cwd=REPOSITORY,
        env={**os.environ, "LD_PRELOAD": str(shim), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_read_error_names_the_expert_and_the_store_works_again_when_the_drive_does(
    tmp_path: Path, shim: Path
) -> None:
    pack = write_expert_pack(tmp_path / "experts.lmpack").path
    switch = tmp_path / "switch"
    switch.touch()
    lines = read_all(pack, shim, BAD_FILE="L003/E0002.bin", BAD_WHILE=str(switch))
    assert lines[1].startswith("expert L003/E0002: ")
    assert "Input/output error; run: lmpack validate" in lines[1]
    assert lines[2:] == ["all read"]


def test_a_file_system_without_direct_reads_is_read_through_the_page_cache_and_said(
    tmp_path: Path, shim: Path
) -> None:
    pack = write_expert_pack(tmp_path / "experts.lmpack").path
    lines = read_all(pack, shim, REFUSE_DIRECT="1")
    assert lines == ["direct (buffered: the file system refuses O_DIRECT)", "all read"]


def test_short_reads_are_continued(tmp_path: Path, shim: Path) -> None:
    pack = write_expert_pack(tmp_path / "experts.lmpack").path
    assert read_all(pack, shim, SHORT_READS="1")[-1] == "all read"


RUN = ["-p", "One day a fox", "-n", "4", "--threads", "1", "--ignore-eos", "--io", "direct"]


def run_command(pack: Path, shim: Path, **environment: str) -> subprocess.Popen[str]:
    """`lmpack run` with the shim in its way."""
    return subprocess.Popen(
        [sys.executable, "-m", "lmpack", "run", pack, *RUN],
        cwd=REPOSITORY,
        env={**os.environ, "LD_PRELOAD": str(shim), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_heed_interrupts,  # noqa: PLW1509 (no other thread runs here)
    )


def _heed_interrupts() -> None:
    """Undo what a shell does to the jobs it puts in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_a_run_that_meets_a_read_error_ends_with_one_line_that_names_the_expert(
    demo_pack: Path, tmp_path: Path, shim: Path
) -> None:
    switch = tmp_path / "switch"
    switch.touch()
    with run_command(demo_pack, shim, BAD_FILE="experts/L004/", BAD_WHILE=str(switch)) as run:
        _, errors = run.communicate(timeout=120)
    assert run.returncode == 1
    (line,) = [line for line in errors.splitlines() if "error" in line]
    assert line.startswith("lmpack: error: expert L004/E00")
    assert line.endswith(f"Input/output error; run: lmpack validate {demo_pack}")


def test_an_interrupt_while_a_read_is_under_way_ends_the_run(
    demo_pack: Path, tmp_path: Path, shim: Path
) -> None:
    switch = tmp_path / "switch"
    switch.touch()
    with run_command(demo_pack, shim, BAD_FILE="experts/L004/", BAD_WHILE=str(switch), STALL="1") as run:
        assert run.stdout is not None
        assert "stalled\n" in run.stdout  # lines up to that one
        run.send_signal(signal.SIGINT)
        switch.unlink()  # a read cannot be taken back; it ends when the drive answers
        _, errors = run.communicate(timeout=120)
    assert run.returncode == 130
    assert "Traceback" not in errors

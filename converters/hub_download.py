"""Downloads: files of a repository brought to the drive, resumed where they stopped, checked before they get a name."""

from __future__ import annotations

import os
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from converters.hub_repo import wrong_bytes
from lmpack.drive import storage_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from converters.hub_repo import HubFile, HubRepo

INCOMPLETE_SUFFIX = ".incomplete"
NUM_CONNECTIONS = 8  # one connection rarely fills a line, and a pack is thousands of small files


def missing_nbytes(file: HubFile, path: Path) -> int:
    """Return how many bytes of a file are still to come."""
    if path.exists():
        return 0
    incomplete = _incomplete(path)
    have = incomplete.stat().st_size if incomplete.exists() else 0
    return file.nbytes - have if have <= file.nbytes else file.nbytes


def download(repo: HubRepo, file: HubFile, path: Path, progress: Callable[[int], None]) -> None:
    """Have the whole file at path, hashed against what the hub says; progress gets the bytes that just came.

    What an earlier call left is hashed and taken over. Raises HubError when the hub fails or gives other bytes twice,
    StorageError when the drive refuses; what came stays in path.incomplete, and the next call goes on from there.
    """
    incomplete = _incomplete(path)
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            os.rename(path, incomplete)
        have = file.nbytes - missing_nbytes(file, path)
        for start in [have, 0, 0] if have else [0, 0]:
            found = _continue(repo, file, incomplete, progress)
            if found == file.expected_digest:
                os.rename(incomplete, path)
                return
            incomplete.unlink()
            progress(start - file.nbytes)
        raise wrong_bytes(repo, file, found)


def download_all(
    repo: HubRepo, files: Sequence[tuple[HubFile, Path]], progress: Callable[[int], None]
) -> None:
    """Download many files at once; the first failure ends the others and is raised."""
    with ThreadPoolExecutor(NUM_CONNECTIONS, "download") as pool:
        try:
            todo = [pool.submit(download, repo, file, path, progress) for file, path in files]
            done, _ = wait(todo, return_when=FIRST_EXCEPTION)
            for one in done:
                one.result()
        except BaseException:
            repo.client.stop()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _continue(repo: HubRepo, file: HubFile, incomplete: Path, progress: Callable[[int], None]) -> str:
    """Write what is missing, and return the digest of the whole."""
    digest = file.new_digest()
    with open(incomplete, "a+b") as opened:
        if opened.tell() > file.nbytes:
            opened.truncate(0)
        opened.seek(0)
        while chunk := opened.read(1 << 20):
            digest.update(chunk)
            repo.client.check_stopped(file.path)
        for chunk in repo.stream(file, opened.tell()):
            opened.write(chunk)
            digest.update(chunk)
            progress(len(chunk))
    return digest.hexdigest()


def _incomplete(path: Path) -> Path:
    return path.with_name(path.name + INCOMPLETE_SUFFIX)

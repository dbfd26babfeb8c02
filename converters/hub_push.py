"""Push: a pack goes to a repository, its manifest last, so that no half of one can be pulled."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import httpx2
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, constants
from huggingface_hub.utils import disable_progress_bars, get_session

from converters.hub_repo import DEFAULT_REVISION, HubRepo, check_repo_id
from converters.model_card import CARD_FILE, model_card
from lmpack.errors import HubError, PackError, UsageError
from lmpack.manifest import MANIFEST_FILE, SHARED_FILE
from lmpack.pack import Pack, read_manifest
from lmpack.pack_files import FOLDER, found_files
from lmpack.source_file import KEPT_FOLDER
from lmpack.validation import validate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from converters.hub_client import HubClient

COMMIT_NUM_FILES = 1000  # a commit of many thousand files times out on the hub
MAX_UPLOAD_FAILURES = 2  # each after six tries and 23 s of huggingface_hub's own
SILENCE_S = 300.0  # of a hub that makes a commit, or of a store that puts a large file together
UPLOAD_NBYTES = 256 << 20  # between two steps of the progress
_OURS = ("experts/", KEPT_FOLDER, SHARED_FILE, MANIFEST_FILE)


@dataclass(frozen=True, slots=True)
class PushReport:
    """What went where."""

    repo_id: str
    url: str
    commit: str
    pack_id: str
    num_files: int
    nbytes: int
    has_new_card: bool  # false when the repository had a README.md, which stays
    seconds: float


@contextmanager
def _without_xet() -> Iterator[None]:
    """Let huggingface_hub upload by Git LFS, which every hub takes, also where hf_xet is installed.

    hf_xet retries for minutes without a word, and tells a refused token from a broken line in its prose alone.
    """
    before = constants.HF_HUB_DISABLE_XET
    constants.HF_HUB_DISABLE_XET = True
    try:
        yield
    finally:
        constants.HF_HUB_DISABLE_XET = before


@contextmanager
def _no_endless_silence() -> Iterator[None]:
    """Give up requests that get no answer; those of huggingface_hub would wait for ever."""
    session = get_session()
    before = session.timeout
    session.timeout = httpx2.Timeout(SILENCE_S)
    try:
        yield
    finally:
        session.timeout = before


@_without_xet()
@_no_endless_silence()
def push(
    client: HubClient,
    path: Path | str,
    repo_id: str,
    *,
    private: bool = False,
    revision: str = DEFAULT_REVISION,
    progress: Callable[[int], None] | None = None,
) -> PushReport:
    """Upload the pack at path, after checking every byte of it; progress gets the bytes that are there now.

    The repository and the branch are made when there are none. Interrupted, the same call sends only what is missing.
    Raises PackError for a pack that does not validate, HubError for the rest.
    """
    started = time.perf_counter()
    check_repo_id(repo_id)
    if read_manifest(Path(path)).is_reference:
        raise UsageError(
            f"{path}: holds no weights, they are in the checkpoint that it refers to; push what lmpack unpack makes of it"
        )
    report = validate(path)
    if not report.ok:
        raise PackError(f"{path}: {report.problems[0]}; only a whole pack is pushed")
    pack = Pack.open(path)
    disable_progress_bars()  # huggingface_hub's own; ours is `progress`
    client.retry(repo_id, lambda: client.api.create_repo(repo_id, private=private, exist_ok=True))
    if revision != DEFAULT_REVISION:
        client.retry(
            f"{repo_id} at {revision}",
            lambda: client.api.create_branch(repo_id, branch=revision, exist_ok=True),
        )
    there = {file.path for file in HubRepo.open(client, repo_id, revision).files}
    found = found_files(pack.path)
    names = sorted(name for name in found if found[name] != FOLDER and name != MANIFEST_FILE)
    upload = _Upload(client, repo_id, revision, progress or (lambda _: None))
    groups = [names[at : at + COMMIT_NUM_FILES] for at in range(0, len(names), COMMIT_NUM_FILES)]
    last = groups.pop()
    if groups and MANIFEST_FILE in there:  # what was pushed before is no pack while its files are replaced
        upload.commit(
            [CommitOperationDelete(MANIFEST_FILE)], "Replace the pack: the manifest comes back last"
        )
    for number, group in enumerate(groups, 1):
        upload.commit(upload.files(pack.path, group), f"Upload part {number} of {len(groups) + 1}")
    final = [*upload.files(pack.path, [*last, MANIFEST_FILE])]
    stale = {name for name in there if name.startswith(_OURS)} - {*names, MANIFEST_FILE}
    final += [CommitOperationDelete(name) for name in sorted(stale)]
    if CARD_FILE not in there:
        final.append(CommitOperationAdd(CARD_FILE, model_card(pack, repo_id).encode()))
    commit = upload.commit(final, f"Upload the pack {pack.manifest.pack_id[:12]}")
    return PushReport(
        repo_id=repo_id,
        url=f"{client.endpoint}/{repo_id}",
        commit=commit,
        pack_id=pack.manifest.pack_id,
        num_files=len(names) + 1,
        nbytes=upload.nbytes,
        has_new_card=CARD_FILE not in there,
        seconds=time.perf_counter() - started,
    )


class _Upload:
    """Sends files and commits to one branch."""

    def __init__(
        self, client: HubClient, repo_id: str, revision: str, progress: Callable[[int], None]
    ) -> None:
        self.nbytes = 0
        self._client = client
        self._repo_id = repo_id
        self._revision = revision
        self._progress = progress

    def files(self, folder: Path, names: Sequence[str]) -> list[CommitOperationAdd | CommitOperationDelete]:
        """Send the contents of files, and return what makes a commit of them."""
        sent: list[CommitOperationAdd | CommitOperationDelete] = []
        for batch in _batches(folder, names):
            additions = [CommitOperationAdd(name, folder / name) for name in batch]
            self._client.retry(self._repo_id, partial(self._send, additions), most=MAX_UPLOAD_FAILURES)
            sent += additions
            nbytes = sum((folder / name).stat().st_size for name in batch)
            self.nbytes += nbytes
            self._progress(nbytes)
        return sent

    def _send(self, additions: Sequence[CommitOperationAdd]) -> None:
        """Upload what the hub does not have; huggingface_hub wraps failures, and has refused files as ValueError."""
        try:
            self._client.api.preupload_lfs_files(self._repo_id, additions, revision=self._revision)
        except (RuntimeError, ValueError) as error:
            if isinstance(error.__cause__, httpx2.HTTPError):
                raise error.__cause__ from error
            why = " ".join(f"{error} {error.__cause__ or ''}".split())
            raise HubError(
                self._client.hide_token(
                    f"{self._repo_id}: {self._client.endpoint} did not take files ({why[:300]}); run it again, it sends "
                    "what is missing"
                )
            ) from error

    def commit(self, operations: Sequence[CommitOperationAdd | CommitOperationDelete], message: str) -> str:
        """Make one commit, and return its id."""
        done = self._client.retry(
            self._repo_id,
            lambda: self._client.api.create_commit(
                self._repo_id, operations, commit_message=message, revision=self._revision
            ),
        )
        return str(done.oid)


def _batches(folder: Path, names: Sequence[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    nbytes = 0
    for name in names:
        batch.append(name)
        nbytes += (folder / name).stat().st_size
        if nbytes >= UPLOAD_NBYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch

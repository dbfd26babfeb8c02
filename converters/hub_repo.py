"""HubRepo: a model repository at one commit: which files it has, and their bytes by ranges."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from huggingface_hub import hf_hub_url

from lmpack.errors import HubError, UsageError
from lmpack.source_file import check_relative_path
from lmpack.strict_json import JsonError, check_int, check_pattern, check_sha256

if TYPE_CHECKING:
    from collections.abc import Iterator

    from converters.hub_client import HubClient

DEFAULT_REVISION = "main"
MAX_FILES = 1_000_000
MAX_PAGES = 10_000  # of a list of files; the hub puts a thousand on each
_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(?:/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)
_OBJECT_ID = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository; the hub vouches for large ones with a SHA-256, for small ones with git's blob id."""

    path: str  # inside the repository, with /
    nbytes: int
    blob_id: str
    sha256: str | None

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition("/")[2]

    def new_digest(self) -> hashlib._Hash:
        """Return the digest that, fed the whole file, gives `expected_digest`."""
        if self.sha256 is not None:
            return hashlib.sha256()
        algorithm = "sha1" if len(self.blob_id) == 40 else "sha256"
        return hashlib.new(algorithm, b"blob %d\0" % self.nbytes, usedforsecurity=False)

    @property
    def expected_digest(self) -> str:
        """What the file's digest must be, in hex."""
        return self.sha256 or self.blob_id


@dataclass(frozen=True, slots=True)
class HubRepo:
    """A repository at one commit; paths are checked, and no two files have one."""

    client: HubClient = field(repr=False)
    repo_id: str
    commit: str
    files: tuple[HubFile, ...]

    @classmethod
    def open(cls, client: HubClient, repo_id: str, revision: str = DEFAULT_REVISION) -> HubRepo:
        """Ask the hub which commit the revision is, and what it holds; raises HubError, or UsageError for the name."""
        check_repo_id(repo_id)
        where = repo_id if revision == DEFAULT_REVISION else f"{repo_id} at {revision}"
        base = f"{client.endpoint}/api/models/{repo_id}"
        info, _ = client.get_json(f"{base}/revision/{quote(revision, safe='')}", where)
        try:
            commit = check_pattern(info.get("sha"), _OBJECT_ID, "sha", "a commit")
            files: dict[str, HubFile] = {}
            following: str | None = f"{base}/tree/{commit}?recursive=true&expand=false"
            asked: set[str] = set()
            while following is not None and len(files) < MAX_FILES:
                if following in asked or len(asked) == MAX_PAGES:
                    raise JsonError("its pages have no end")
                asked.add(following)
                page, following = client.get_json(following, where)
                files |= {file.path: file for entry in page if (file := _parse_entry(entry)) is not None}
        except (JsonError, AttributeError, KeyError, TypeError) as error:
            what = f" ({error})" if isinstance(error, JsonError) else ""
            raise HubError(
                f"{where}: {client.endpoint} gives a malformed list of files{what}; is it a hub? check HF_ENDPOINT"
            ) from error
        return cls(client, repo_id, commit, tuple(files.values()))

    def file(self, path: str) -> HubFile | None:
        """Return the file at path, None when there is none."""
        return next((file for file in self.files if file.path == path), None)

    def stream(self, file: HubFile, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
        """Yield bytes [start, stop) of a file, up to its end when stop is None; raises HubError."""
        url = hf_hub_url(self.repo_id, file.path, revision=self.commit, endpoint=self.client.endpoint)
        end = file.nbytes if stop is None else stop
        return self.client.stream(url, f"{self.repo_id}: {file.path}", start, end)

    def read(self, file: HubFile, *, most: int) -> bytes:
        """Return a small file's bytes, checked; raises HubError when it has more than `most`, or the wrong ones."""
        if file.nbytes > most:
            raise HubError(f"{self.repo_id}: {file.path}: {file.nbytes} bytes, expected at most {most}")
        raw = b"".join(self.stream(file))
        digest = file.new_digest()
        digest.update(raw)
        if digest.hexdigest() != file.expected_digest:
            raise wrong_bytes(self, file, digest.hexdigest())
        return raw


def split_model_name(name: str) -> tuple[str, str | None]:
    """Return the parts of REPO:NAME; the second is None when there is no colon.

    Raises UsageError for an empty NAME, and for the address of a page.
    """
    if name.startswith(("https://", "http://")):
        raise UsageError(f"{name!r:.120} is an address; name what follows the host in it: OWNER/NAME")
    repo_id, colon, wanted = name.removeprefix("hf://").partition(":")
    if colon and not wanted.strip():
        raise UsageError(
            f"{name!r:.120}: no model is named after the colon; name one, or leave the colon out"
        )
    return repo_id, wanted or None


def check_repo_id(repo_id: str) -> None:
    """Raise UsageError for what cannot be the name of a repository."""
    if not _REPO_ID.fullmatch(repo_id) or ".." in repo_id or "--" in repo_id:
        raise UsageError(
            f"{repo_id!r:.120} is no repository; expected OWNER/NAME, such as unsloth/Qwen3-30B-A3B-GGUF"
        )


def wrong_bytes(repo: HubRepo, file: HubFile, found: str) -> HubError:
    """Say that a file is not what the hub says it is."""
    return HubError(
        f"{repo.repo_id}: {file.path}: the bytes that came hash to {found[:12]}…, the hub says "
        f"{file.expected_digest[:12]}…; run it again, or without the proxy or mirror between"
    )


def _parse_entry(entry: dict[str, Any]) -> HubFile | None:
    if entry["type"] != "file":
        return None
    path = check_relative_path(entry["path"], "path")
    nbytes = check_int(entry["size"], f"{path}: size")
    blob_id = check_pattern(entry["oid"], _OBJECT_ID, f"{path}: oid", "a git object id")
    lfs = entry.get("lfs")
    return HubFile(path, nbytes, blob_id, check_sha256(lfs["oid"], f"{path}: lfs oid") if lfs else None)

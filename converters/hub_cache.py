"""HubCache: huggingface_hub's folder of downloaded files, which other programs look into too."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import (
    constants,
    get_hf_file_metadata,
    hf_hub_download,
    hf_hub_url,
    try_to_load_from_cache,
)
from huggingface_hub.file_download import repo_folder_name

from converters.hub_download import download, missing_nbytes
from lmpack.errors import HubError

if TYPE_CHECKING:
    from collections.abc import Callable

    from converters.hub_repo import HubFile, HubRepo


class HubCache:
    """The cached files of one repository; files come by our own downloads, which resume and check them."""

    def __init__(self, repo: HubRepo, folder: Path | None = None) -> None:
        """Use the folder given, or the one that HF_HUB_CACHE and HF_HOME name."""
        self.repo = repo
        self.folder = folder or Path(constants.HF_HUB_CACHE)

    def missing_nbytes(self, file: HubFile) -> int:
        """Return how many bytes of a file are still to come."""
        return 0 if self._find(file) else missing_nbytes(file, self._blob(file))

    def fetch(self, file: HubFile, progress: Callable[[int], None]) -> Path:
        """Return where a file is, after downloading what is missing; raises as download() does.

        Raises HubError before that when the hub does not name the file as huggingface_hub's cache needs it.
        """
        found = self._find(file)
        if found is not None:
            self._check(file, found)
            return found
        self._check_naming(file)
        download(self.repo, file, self._blob(file), progress)
        client = self.repo.client
        return Path(  # finds the blob, and gives it its name in the snapshot of this commit
            client.retry(
                f"{self.repo.repo_id}: {file.path}",
                lambda: hf_hub_download(
                    self.repo.repo_id,
                    file.path,
                    revision=self.repo.commit,
                    cache_dir=self.folder,
                    endpoint=client.endpoint,
                    token=client.token or False,
                ),
            )
        )

    def _check_naming(self, file: HubFile) -> None:
        client, where = self.repo.client, f"{self.repo.repo_id}: {file.path}"
        url = hf_hub_url(self.repo.repo_id, file.path, revision=self.repo.commit, endpoint=client.endpoint)
        found = client.retry(
            where,
            lambda: get_hf_file_metadata(url, token=client.token or False, endpoint=client.endpoint),
        )
        named = {
            "X-Repo-Commit": (found.commit_hash, self.repo.commit),
            "ETag": (found.etag, file.expected_digest),
            "Content-Length": (found.size, file.nbytes),
        }
        for header, (value, wanted) in named.items():
            if value != wanted:
                found_there = f"no {header}" if value is None else f"{header} {value!s:.80}"
                raise HubError(
                    f"{where}: {client.endpoint} answers with {found_there}, expected {wanted}, so huggingface_hub's cache "
                    "cannot keep the file; use --discard-source, which needs no cache, or another HF_ENDPOINT"
                )

    def _find(self, file: HubFile) -> Path | None:
        found = try_to_load_from_cache(
            self.repo.repo_id, file.path, cache_dir=self.folder, revision=self.repo.commit
        )
        path = Path(found) if isinstance(found, str) else None
        return path if path is not None and path.stat().st_size == file.nbytes else None

    def _blob(self, file: HubFile) -> Path:
        name = repo_folder_name(repo_id=self.repo.repo_id, repo_type="model")
        return self.folder / name / "blobs" / file.expected_digest

    def _check(self, file: HubFile, path: Path) -> None:
        digest = file.new_digest()
        with path.open("rb") as opened:
            while chunk := opened.read(1 << 20):
                digest.update(chunk)
                self.repo.client.check_stopped(file.path)
        if digest.hexdigest() != file.expected_digest:
            raise HubError(
                f"{path}: damaged, its hash is not the hub's {file.expected_digest[:12]}…; delete it"
            )

"""HubOrigin: a repository as the place where bytes of a pack can be had again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from converters.hub_model import choose_model, models_in
from converters.hub_repo import DEFAULT_REVISION, HubRepo, split_model_name
from lmpack.errors import PackError

if TYPE_CHECKING:
    from converters.hub_client import HubClient
    from converters.hub_model import HubModel
    from converters.hub_repo import HubFile
    from lmpack.source_file import Source


class HubOrigin:
    """The files of one model in a repository, read by byte ranges: a ByteOrigin."""

    def __init__(self, repo: HubRepo, model: HubModel, source: Source | None) -> None:
        """Know the model's files by the names that the pack's source gives them."""
        self.name = f"{repo.repo_id}:{model.name}"
        self.is_pack = model.kind == "pack"
        self._repo = repo
        self._files = {file.path.removeprefix(model.folder): file for file in model.weights + model.others}
        if source is not None and not self.is_pack and len(self._files) == len(source.files) == 1:
            self._files = dict.fromkeys([source.files[0].name], *self._files.values())  # it may be renamed

    def nbytes(self, file: str) -> int:
        """Return a file's size."""
        return self._file(file).nbytes

    def read(self, file: str, offset: int, view: memoryview) -> None:
        """Fill view with bytes of a file."""
        found = self._file(file)
        if offset + view.nbytes > found.nbytes:
            raise PackError(f"{self.name}: {file} ends at byte {found.nbytes}")
        for chunk in self._repo.stream(found, offset, offset + view.nbytes):
            view[: len(chunk)] = chunk
            view = view[len(chunk) :]

    def _file(self, name: str) -> HubFile:
        found = self._files.get(name)
        if found is None:
            raise PackError(f"{self.name}: has no file {name}")
        return found


def open_hub_origin(
    client: HubClient, name: str, source: Source | None, revision: str | None = None
) -> HubOrigin:
    """Open REPO or REPO:NAME; without a name the model whose weight files are called like the source's is taken.

    Raises HubError, or UsageError when the repository offers several models and none or all of them fit.
    """
    repo_id, wanted = split_model_name(name)
    repo = HubRepo.open(client, repo_id, revision or DEFAULT_REVISION)
    if wanted is None and source is not None:
        names = {file.name for file in source.files if file.segments}
        fitting = [model for model in models_in(repo) if names <= {file.name for file in model.weights}]
        if len(fitting) == 1:
            return HubOrigin(repo, fitting[0], source)
    return HubOrigin(repo, choose_model(repo, wanted), source)

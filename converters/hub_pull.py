"""Pull: a model from a hub becomes a pack on this drive, planned to the last byte before the first large download."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Literal

from converters.conversion import convert
from converters.conversion_plan import plan_conversion
from converters.hub_cache import HubCache
from converters.hub_download import download_all, missing_nbytes
from converters.hub_model import indexed_weights, left_out_files
from converters.hub_source import HubSource
from lmpack.alignment import DEFAULT_PAGE_SIZE
from lmpack.drive import alone_in, check_space, existing_parent, storage_errors, sync_path, sync_tree
from lmpack.errors import CheckpointError, HubError, PackError, UnsupportedError, UsageError
from lmpack.layer_entry import lay_out_parts
from lmpack.manifest import MANIFEST_FILE, MAX_MANIFEST_NBYTES, PROFILES_FOLDER, Manifest
from lmpack.pack_files import FOLDER, expected_files, found_files
from lmpack.partial_folder import PartialFolder, check_destination
from lmpack.tensor_info import lay_out_shared
from lmpack.validation import validate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from converters.conversion import ConversionReport
    from converters.conversion_plan import ConversionPlan
    from converters.hub_model import HubModel
    from converters.hub_repo import HubFile, HubRepo

DOWNLOAD_SUFFIX = ".download"


@dataclass(frozen=True, slots=True)
class PullReport:
    """What came from where."""

    path: Path
    repo_id: str
    commit: str
    kind: Literal["pack", "gguf", "safetensors"]
    pack_id: str
    architecture: str
    num_experts: int
    nbytes: int  # of the repository's files
    downloaded_nbytes: int  # that came through the network this time
    left_out: tuple[str, ...]  # files beside the checkpoint that are no part of it
    missing: tuple[str, ...]  # what the checkpoint lacks, and a run needs
    seconds: float


def download_folder(dst: Path) -> Path:
    """Return the folder beside dst that holds what an unfinished pull has fetched."""
    return dst.with_name(dst.name + DOWNLOAD_SUFFIX)


def pull(
    repo: HubRepo,
    model: HubModel,
    dst: Path | str,
    *,
    discard_source: bool = False,
    cache_folder: Path | None = None,
    page_size: int = DEFAULT_PAGE_SIZE,
    jobs: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> PullReport:
    """Make the pack dst from a model of a repository; progress gets the bytes that just came (fewer than none again).

    A ready pack is fetched and validated. A checkpoint is converted file by file while it comes; its files stay in
    huggingface_hub's cache, or with discard_source are deleted one by one, at most two of them being on the drive.
    Interrupted, the same call goes on where it stopped. Raises UsageError when dst exists or is inside of a pack,
    HubError, StorageError before the first large download when the drive has no room, and what convert() raises.
    """
    dst = Path(dst)
    check_destination(dst)
    started, count = time.perf_counter(), _Count(progress)
    folder = download_folder(dst)
    left_out: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with alone_in(folder, "another pull is fetching into it; wait for it"):
        try:
            if model.kind == "pack":
                pulled: Manifest | ConversionReport = _pull_pack(repo, model, dst, folder, count)
            else:
                weights = indexed_weights(repo, model) if model.kind == "safetensors" else model.weights
                left_out = left_out_files(repo, model, weights)
                pulled, missing = _pull_checkpoint(
                    repo,
                    weights,
                    model.others,
                    dst,
                    folder,
                    None if discard_source else HubCache(repo, cache_folder),
                    page_size,
                    jobs,
                    count,
                )
        finally:
            with suppress(OSError):  # there is something in it, or it has become the pack
                folder.rmdir()
    shutil.rmtree(folder, ignore_errors=True)
    return PullReport(
        path=dst,
        repo_id=repo.repo_id,
        commit=repo.commit,
        kind=model.kind,
        pack_id=pulled.pack_id,
        architecture=pulled.architecture,
        num_experts=pulled.num_experts,
        nbytes=model.nbytes,
        downloaded_nbytes=count.nbytes,
        left_out=left_out,
        missing=missing,
        seconds=time.perf_counter() - started,
    )


class _Count:
    """Adds up what came, for the report, and passes it on."""

    def __init__(self, progress: Callable[[int], None] | None) -> None:
        self.nbytes = 0
        self._progress = progress

    def __call__(self, nbytes: int) -> None:
        self.nbytes += max(nbytes, 0)
        if self._progress is not None:
            self._progress(nbytes)


def _pull_checkpoint(
    repo: HubRepo,
    weights: tuple[HubFile, ...],
    others: tuple[HubFile, ...],
    dst: Path,
    folder: Path,
    cache: HubCache | None,
    page_size: int,
    jobs: int | None,
    count: _Count,
) -> tuple[ConversionReport, tuple[str, ...]]:
    with (
        HubSource(repo, weights, others, folder=folder, cache=cache, progress=count) as source,
        _told_as_the_repositorys(repo, source.stand_ins),
    ):
        checkpoint = source.open()
        _check_room(source, weights, plan_conversion(checkpoint), dst, cache, page_size)
        report = convert(checkpoint, dst, page_size=page_size, jobs=jobs, resume=True, files=source)
        return report, checkpoint.missing


@contextmanager
def _told_as_the_repositorys(repo: HubRepo, stand_ins: Path) -> Iterator[None]:
    """Say of what is wrong with a checkpoint where it is so: what stands in for it here nobody can mend."""
    try:
        yield
    except (CheckpointError, UnsupportedError, UsageError) as error:
        text, here = str(error), os.fspath(stand_ins)
        if here not in text and not text.startswith(f"{repo.repo_id}: "):
            raise
        text = text.replace(f"{here}/", f"{repo.repo_id}: ").replace(here, repo.repo_id)
        raise type(error)(f"{text} (so it is in the repository: tell its owner, or pull another)") from error


def _check_room(
    source: HubSource,
    weights: tuple[HubFile, ...],
    plan: ConversionPlan,
    dst: Path,
    cache: HubCache | None,
    page_size: int,
) -> None:
    """Raise StorageError when the pack and the downloads do not fit beside each other."""
    missing = sorted((source.missing_nbytes(file) for file in weights), reverse=True)
    download_nbytes = sum(missing[:2] if cache is None else missing)
    downloads = dst if cache is None else cache.folder
    pack_nbytes = plan.kept_nbytes + lay_out_shared(plan.shared, page_size)[1]
    num_files = len(plan.files) + 5
    for experts in plan.layers.values():
        pack_nbytes += lay_out_parts(experts.parts, page_size)[1] * experts.num_experts
        num_files += experts.num_experts + 1
    used_nbytes, used_files = PartialFolder(dst, resume=True).used()  # by an interrupted pull
    pack_nbytes, num_files = pack_nbytes - used_nbytes, num_files - used_files
    if existing_parent(dst).stat().st_dev == existing_parent(downloads).stat().st_dev:
        check_space(dst, pack_nbytes + download_nbytes, num_files + 2 * len(weights))
    else:
        check_space(dst, pack_nbytes, num_files)
        check_space(downloads, download_nbytes, 2 * len(weights))


def _pull_pack(repo: HubRepo, model: HubModel, dst: Path, folder: Path, count: _Count) -> Manifest:
    files = {file.path.removeprefix(model.folder): file for file in model.weights}
    raw = repo.read(files[MANIFEST_FILE], most=MAX_MANIFEST_NBYTES)
    count(len(raw))
    manifest = Manifest.parse(raw, Path(repo.repo_id, files[MANIFEST_FILE].path))
    if manifest.is_reference:
        raise PackError(
            f"{repo.repo_id}: {MANIFEST_FILE} is of a pack that refers to files on its maker's drive; ask for the pack "
            "that lmpack unpack makes of it"
        )
    wanted = []
    for name, expected in expected_files(manifest).items():
        found = files.get(name)
        if found is None or found.nbytes != expected.nbytes:
            what = "is missing" if found is None else f"has {found.nbytes} bytes"
            raise PackError(
                f"{repo.repo_id}: {model.folder}{name}: {what}, the manifest says {expected.nbytes} bytes; the upload "
                "is not complete: ask its owner, or name another --revision"
            )
        wanted.append((found, folder / name))
    wanted += [(file, folder / name) for name, file in files.items() if name.startswith(PROFILES_FOLDER)]
    nbytes = sum(missing_nbytes(file, path) for file, path in wanted)
    check_space(dst, nbytes, len(wanted))
    download_all(repo, wanted, count)
    with storage_errors(folder):
        _remove_strangers(folder, {path.relative_to(folder).as_posix() for _, path in wanted})
        (folder / MANIFEST_FILE).write_bytes(raw)
    report = validate(folder)
    if not report.ok:
        for problem in report.problems:
            (folder / problem.file).unlink(missing_ok=True)
        raise HubError(
            f"{repo.repo_id}: {len(report.problems)} file(s) do not fit the manifest: {report.problems[0]}; run it "
            "again to fetch them again, or ask the owner"
        )
    with storage_errors(dst):
        sync_tree(folder)
        os.rename(folder, dst)
        sync_path(dst.absolute().parent)
    return manifest


def _remove_strangers(folder: Path, wanted: set[str]) -> None:
    """Delete what an earlier pull to this name left of another revision or model."""
    found = found_files(folder)
    parents = {parent.as_posix() for name in wanted for parent in PurePosixPath(name).parents}
    for name in sorted(
        found.keys() - wanted - parents, reverse=True
    ):  # what is in a folder before the folder
        if found[name] == FOLDER:
            (folder / name).rmdir()
        else:
            (folder / name).unlink()

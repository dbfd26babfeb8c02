"""HubModel: one of the models that a repository offers: a ready pack, a GGUF in one quantization, or safetensors."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from converters.json_object import MAX_JSON_NBYTES
from converters.safetensors_checkpoint import (
    INDEX_ENDING,
    MAX_KEPT_FILE_NBYTES,
    WEIGHT_ENDINGS,
)
from lmpack.byte_size import format_nbytes
from lmpack.errors import HubError, UsageError
from lmpack.manifest import MANIFEST_FILE, SHARED_FILE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from converters.hub_repo import HubFile, HubRepo

_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
# Q4_K_M, UD-IQ2_XXS, MXFP4_MOE, BF16 as a word of a file's name; the last one counts
_QUANT = re.compile(
    r"(?<![a-z0-9])((?:UD-)?(?:I?Q[1-8](?:_[A-Z0-9]+)*|TQ[12]_[01]|MXFP4(?:_MOE)?|NVFP4|BF16|F16|F32))(?![a-z0-9])",
    re.IGNORECASE,
)
_NO_MODEL = re.compile(r"mmproj|imatrix", re.IGNORECASE)  # GGUF files that hold something else
_MAX_LISTED = 30


@dataclass(frozen=True, slots=True)
class HubModel:
    """What to fetch of a repository; name is what comes after the colon of REPO:NAME."""

    kind: Literal["pack", "gguf", "safetensors"]
    name: str
    folder: str  # the common start of the files' paths: "" or "some/folder/"
    weights: tuple[HubFile, ...]
    others: tuple[HubFile, ...] = ()  # small files that belong to the weights

    @property
    def nbytes(self) -> int:
        """The bytes of all files."""
        return sum(file.nbytes for file in self.weights + self.others)

    def __str__(self) -> str:
        """Give the model as one entry of a list."""
        return f"{self.name} ({self.kind}, {format_nbytes(self.nbytes)})"


def models_in(repo: HubRepo) -> list[HubModel]:
    """List what a repository offers: packs first, then GGUF by name, then safetensors."""
    return [*_packs(repo), *_ggufs(repo), *_safetensors(repo)]


def choose_model(repo: HubRepo, wanted: str | None) -> HubModel:
    """Return the model named `wanted`, in any case, or the only one; raises UsageError that lists what there is."""
    models = models_in(repo)
    if not models:
        some = ", ".join(file.path for file in repo.files[:5]) or "no files at all"
        raise HubError(
            f"{repo.repo_id}: holds no pack, no *.gguf and no *.safetensors ({some}); look for a repository of the "
            "model in one of these"
        )
    found = _matching(models, wanted.lower()) if wanted else models
    if len(found) != 1:
        listed = ", ".join(str(model) for model in (found or models)[:_MAX_LISTED])
        what = f"has no {wanted!r:.80}" if wanted and not found else f"offers {len(found)} models"
        raise UsageError(f"{repo.repo_id}: {what}; name one as {repo.repo_id}:NAME, of: {listed}")
    return found[0]


def _matching(models: list[HubModel], wanted: str) -> list[HubModel]:
    exact = [model for model in models if model.name.lower() == wanted]
    return exact or [
        model
        for model in models
        if model.name.lower().endswith("-" + wanted)
        or wanted in (model.weights[0].path.lower(), model.weights[0].name.lower().removesuffix(".gguf"))
    ]


def _packs(repo: HubRepo) -> Iterator[HubModel]:
    paths = {file.path for file in repo.files}
    for manifest in repo.files:
        folder = manifest.path.removesuffix(MANIFEST_FILE)
        if manifest.name == MANIFEST_FILE and folder + SHARED_FILE in paths:
            inside = tuple(file for file in repo.files if file.path.startswith(folder))
            name = folder.rstrip("/").rpartition("/")[2] or repo.repo_id.rpartition("/")[2]
            yield HubModel("pack", name.removesuffix(".lmpack"), folder, inside)


def _ggufs(repo: HubRepo) -> Iterator[HubModel]:
    sets: dict[str, list[HubFile]] = {}
    for file in sorted(repo.files, key=lambda file: file.path):
        if file.name.lower().endswith(".gguf") and not _NO_MODEL.search(file.name):
            match = _SHARD.fullmatch(file.path)
            sets.setdefault(f"{match['stem']}-of-{match['count']}" if match else file.path, []).append(file)
    quants: list[str] = []
    for files in sets.values():
        match = _SHARD.fullmatch(files[0].name)
        found = _QUANT.findall(match["stem"] if match else files[0].name[: -len(".gguf")])
        quants.append(found[-1] if found else "")
    for quant, files in zip(quants, sets.values(), strict=True):
        # a repository of two models in one quantization: only their files' names tell them apart
        is_clear = quant and [name.lower() for name in quants].count(quant.lower()) == 1
        name = quant if is_clear else files[0].name[: -len(".gguf")]
        yield HubModel("gguf", name, files[0].path.removesuffix(files[0].name), tuple(files))


def _safetensors(repo: HubRepo) -> Iterator[HubModel]:
    weights = tuple(
        file for file in repo.files if file.path.endswith(".safetensors") and "/" not in file.path
    )
    if weights:
        others = tuple(file for file in repo.files if _goes_along(file))
        yield HubModel("safetensors", "safetensors", "", weights, others)


def _goes_along(file: HubFile) -> bool:
    return (
        not _is_hidden(file)
        and not file.path.endswith(WEIGHT_ENDINGS)
        and file.nbytes <= MAX_KEPT_FILE_NBYTES
    )


def _is_hidden(file: HubFile) -> bool:
    return any(part.startswith(".") for part in file.path.split("/")[:-1])


def left_out_files(repo: HubRepo, model: HubModel, weights: tuple[HubFile, ...]) -> tuple[str, ...]:
    """Name what lies beside a checkpoint without being part of it; beside a GGUF only other models do."""
    if model.kind != "safetensors":
        return ()
    taken = {*weights, *model.others}
    return tuple(sorted(file.path for file in repo.files if file not in taken and not _is_hidden(file)))


def indexed_weights(repo: HubRepo, model: HubModel) -> tuple[HubFile, ...]:
    """Return the weight files of a safetensors model: those its index names, all of them when it has none."""
    indexes = [file for file in model.others if file.path.endswith(INDEX_ENDING) and "/" not in file.path]
    if len(indexes) != 1:
        return model.weights
    try:
        named = set(json.loads(repo.read(indexes[0], most=MAX_JSON_NBYTES))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return model.weights  # opening the checkpoint says what is wrong with its index
    return tuple(file for file in model.weights if file.path in named)

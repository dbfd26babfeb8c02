"""GGUFCheckpoint: one GGUF file or a split set, opened by any of its shards or by their folder."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence  # noqa: TC003
from dataclasses import dataclass
from pathlib import Path  # noqa: TC003
from typing import Literal

from converters.checkpoint import (
    CheckpointFile,
    CheckpointTensor,
    check_name,
    check_no_duplicates,
    check_no_overlap,
)
from converters.gguf_header import GGUFHeader, read_gguf_header
from converters.model_config import ModelDescription, config_from_gguf
from converters.tensor_role import TensorRole, sort_gguf_tensors
from lmpack.drive import storage_errors
from lmpack.dtype import GGML_DTYPES, WITHDRAWN_GGML_DTYPES, dtype_nbytes
from lmpack.errors import CheckpointError, UnsupportedError, UsageError

_SHARD_NAME = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf")
MAX_SHARDS = 10_000


@dataclass(frozen=True, slots=True)
class GGUFCheckpoint:
    """A complete GGUF set; the first shard's metadata is the model's."""

    path: Path
    files: tuple[CheckpointFile, ...]
    tensors: tuple[CheckpointTensor, ...]
    header: GGUFHeader
    left_out: tuple[str, ...] = ()
    kind: Literal["gguf"] = "gguf"

    @classmethod
    def open(cls, path: Path) -> GGUFCheckpoint:
        """Find all shards, parse their headers, and check every tensor's place.

        Raises CheckpointError when a shard is missing, truncated or of another model, UnsupportedError
        for a tensor type whose size is not known, UsageError for a folder with several models.
        """
        shards = _find_shards(path)
        files = tuple(CheckpointFile.of(shard, shard.name) for shard in shards)
        headers = [read_gguf_header(shard) for shard in shards]
        _check_set(shards, headers)
        tensors: list[CheckpointTensor] = []
        for number, (file, header) in enumerate(zip(files, headers, strict=True)):
            placed = [_place(info_at, number, file, header) for info_at in range(len(header.tensors))]
            tensors += sorted(placed, key=lambda tensor: (tensor.offset, tensor.nbytes, tensor.name))
        check_no_duplicates(tensors, files)
        check_no_overlap(tensors, files)
        return cls(path, files, tuple(tensors), headers[0])

    @property
    def missing(self) -> tuple[str, ...]:
        """What a pack can be made without, but not run without."""
        has_vocabulary = "tokenizer.ggml.model" in self.header.metadata
        return () if has_vocabulary else ("a tokenizer (the metadata have no tokenizer.ggml.model)",)

    def roles(self) -> Sequence[TensorRole]:
        """Say for each tensor what it is; raises CheckpointError for one that no rule claims."""
        return sort_gguf_tensors([(tensor.name, tensor.shape) for tensor in self.tensors], str(self.path))

    def describe(self) -> ModelDescription:
        """Return the architecture and the config in Hugging Face's words."""
        shapes = {tensor.name: tensor.shape for tensor in self.tensors}
        return config_from_gguf(self.header, shapes, where=str(self.path))


def _find_shards(path: Path) -> list[Path]:
    """List the files of the set in order; links are followed for bytes, never for names."""
    if path.is_dir():
        path = _only_model_in(path)
    match = _SHARD_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    stem, count = match["stem"], int(match["count"])
    if not 1 <= count <= MAX_SHARDS:
        raise CheckpointError(
            f"{path}: the name claims {count} shards, expected 1 to {MAX_SHARDS}; "
            "keep the names that llama-gguf-split gave"
        )
    _refuse_extra_shards(path.parent, stem, count)
    shards = [path.with_name(f"{stem}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    missing = [shard.name for shard in shards if not shard.exists()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(f"{path.parent}: shard {missing[0]}{more} is missing; download it again")
    return shards


def _refuse_extra_shards(folder: Path, stem: str, count: int) -> None:
    with storage_errors(folder):
        names = sorted(os.listdir(folder))
    for match in filter(None, map(_SHARD_NAME.fullmatch, names)):
        is_of_set = match["stem"] == stem and int(match["count"]) == count
        if is_of_set and not 1 <= int(match["number"]) <= count:
            raise CheckpointError(
                f"{folder / match[0]}: the name claims shard {int(match['number'])} of {count}, so this is not one whole "
                "set; move it away if it is left over, or download the set again"
            )


def _only_model_in(folder: Path) -> Path:
    models: dict[str, Path] = {}
    for path in sorted(folder.glob("*.gguf")):
        match = _SHARD_NAME.fullmatch(path.name)
        models[f"{match['stem']}-of-{match['count']}" if match else path.name] = path
    if not models:
        raise UsageError(f"{folder}: no *.gguf in this folder")
    if len(models) > 1:
        raise UsageError(f"{folder}: holds {len(models)} models; name one: {', '.join(sorted(models))[:400]}")
    return next(iter(models.values()))


def _check_set(shards: Sequence[Path], headers: Sequence[GGUFHeader]) -> None:
    count = headers[0].metadata.get("split.count", 0)
    if len(shards) == 1 and count in (0, 1):
        return
    total = headers[0].metadata.get("split.tensors.count")
    for number, (shard, header) in enumerate(zip(shards, headers, strict=True)):
        found = header.metadata.get("split.count")
        if found != len(shards):
            hint = "; keep the names that llama-gguf-split gave" if len(shards) == 1 else ""
            raise CheckpointError(f"{shard}: split.count is {found}, the set has {len(shards)} file(s){hint}")
        if header.metadata.get("split.no") != number:
            raise CheckpointError(
                f"{shard}: split.no is {header.metadata.get('split.no')}, its name says {number}; "
                "the file was renamed or belongs to another set"
            )
        if header.metadata.get("split.tensors.count") != total or header.endian != headers[0].endian:
            raise CheckpointError(f"{shard}: is a shard of another model than {shards[0].name}")
    num_tensors = sum(len(header.tensors) for header in headers)
    if total is not None and total != num_tensors:
        raise CheckpointError(
            f"{shards[0]}: split.tensors.count is {total}, the {len(shards)} shards hold {num_tensors} tensors; "
            "one of them belongs to another model or version"
        )


def _place(info_at: int, number: int, file: CheckpointFile, header: GGUFHeader) -> CheckpointTensor:
    info = header.tensors[info_at]
    check_name(info.name, file.path)
    dtype = GGML_DTYPES.get(info.ggml_type) or WITHDRAWN_GGML_DTYPES.get(info.ggml_type)
    if dtype is None:
        raise UnsupportedError(
            f"{file.path}: tensor {info.name} has ggml type {info.ggml_type}, which this version does not know"
        )
    try:
        nbytes = dtype_nbytes(dtype, info.shape)
    except UnsupportedError as error:
        raise CheckpointError(f"{file.path}: tensor {info.name}: {error}") from error
    offset = header.data_offset + info.offset
    if nbytes and offset + nbytes > file.nbytes:
        raise CheckpointError(
            f"{file.path}: tensor {info.name} ends at byte {offset + nbytes}, the file at {file.nbytes}; "
            "it is truncated or damaged: download it again"
        )
    return CheckpointTensor(info.name, dtype, info.shape, number, min(offset, file.nbytes), nbytes)

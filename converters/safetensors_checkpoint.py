"""SafetensorsCheckpoint: a Hugging Face folder, or one safetensors file, its headers parsed from untrusted bytes.

The format is an 8-byte little-endian header length, a JSON header, and the tensors' bytes without gaps
(github.com/huggingface/safetensors, README, "Format"). The headers are the truth; an index only says which
files belong to the checkpoint.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from converters.checkpoint import (
    CheckpointFile,
    CheckpointTensor,
    check_name,
    check_no_duplicates,
    wrong_magic,
)
from converters.hf_names import canonical_names
from converters.json_object import read_json_object
from converters.model_config import ModelDescription, config_from_hf, hf_architecture
from converters.tensor_role import SharedTensor, SinglePart, TensorRole, sort_hf_tensors
from lmpack.dtype import dtype_nbytes
from lmpack.errors import CheckpointError, ManifestError, UnsupportedError, UsageError
from lmpack.layer_entry import MAX_DIMS
from lmpack.pack import read_manifest
from lmpack.strict_json import JsonError, parse_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

MAX_HEADER_NBYTES = 100_000_000  # safetensors' own limit
MAX_KEPT_FILE_NBYTES = 256 << 20  # tokenizers take up to 40 MB; more is another copy of the weights
_SHARD_NAME = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.safetensors")
WEIGHT_ENDINGS = (
    ".safetensors",
    ".gguf",
    ".bin",
    ".pt",
    ".pth",
    ".h5",
    ".msgpack",
    ".onnx",
    ".npz",
    ".ckpt",
)
INDEX_ENDING = ".safetensors.index.json"
_MAX_FOLDER_DEPTH = 8
_MAX_NAMED_LAYERS = 1024  # the table of names has 300 for each; the deepest models have some 130 layers


@dataclass(frozen=True)  # no slots: the roles of 90,000 tensors are found once and kept
class SafetensorsCheckpoint:
    """A complete safetensors checkpoint with the small files of its folder."""

    path: Path
    files: tuple[CheckpointFile, ...]
    tensors: tuple[CheckpointTensor, ...]
    config_json: Mapping[str, Any]
    left_out: tuple[str, ...]
    kind: Literal["safetensors"] = "safetensors"

    @classmethod
    def open(cls, path: Path) -> SafetensorsCheckpoint:
        """Find the files, parse the headers, and check every tensor's place.

        Raises CheckpointError for a missing shard, a header that lies, or an index that names tensors no
        header has; UnsupportedError for a dtype of unknown size.
        """
        if path.name.endswith(INDEX_ENDING) or _SHARD_NAME.fullmatch(path.name):
            path = path.parent
        weights, indexed = _weight_files(path) if path.is_dir() else ([path.name], None)
        folder = path if path.is_dir() else path.parent
        files = [CheckpointFile.of(folder / name, name) for name in weights]
        tensors: list[CheckpointTensor] = []
        for number, file in enumerate(files):
            tensors += read_safetensors_header(file, number)
        check_no_duplicates(tensors, files)
        if indexed is not None:
            _check_index(indexed, tensors, folder)
        left_out: list[str] = []
        config_json: Mapping[str, Any] = {}
        has_config = (folder / "config.json").exists()
        if has_config:
            config_json = read_json_object(folder / "config.json")
        # a lone file is taken with its folder's small files only when the folder is a model's
        if path.is_dir() or has_config:
            for name, small in _other_files(folder, folder, set(weights)):
                if small.is_dir():
                    left_out.append(name)
                    continue
                file = CheckpointFile.of(small, name)
                if file.nbytes > MAX_KEPT_FILE_NBYTES or name.endswith(WEIGHT_ENDINGS):
                    left_out.append(name)
                    continue
                _check_stays(small, folder, files[: len(weights)])
                file.check_fetched()
                files.append(file)
        return cls(path, tuple(files), tuple(tensors), config_json, tuple(left_out))

    @property
    def missing(self) -> tuple[str, ...]:
        """What a pack can be made without, but not run without."""
        names = {file.name for file in self.files}
        no_config = () if "config.json" in names else ("its config.json",)
        has_tokenizer = not names.isdisjoint({"tokenizer.json", "tokenizer.model"})
        return no_config if has_tokenizer else (*no_config, "a tokenizer.json or tokenizer.model")

    def roles(self) -> Sequence[TensorRole]:
        """Say for each tensor what it is; raises CheckpointError for one that no rule claims."""
        return self._roles

    @cached_property
    def _roles(self) -> Sequence[TensorRole]:
        ffn_config = self._text_config().get("ffn_config")
        num_experts = ffn_config.get("moe_num_experts") if isinstance(ffn_config, dict) else None
        roles = sort_hf_tensors(
            [(tensor.name, tensor.shape) for tensor in self.tensors],
            str(self.path),
            num_hidden_layers=self._num_hidden_layers(),
            num_experts=num_experts if type(num_experts) is int and num_experts > 0 else None,
        )
        canonical = canonical_names(
            (role.name for role in roles if isinstance(role, SharedTensor)),
            hf_architecture(str(self._text_config().get("model_type", ""))),
            min(self._num_hidden_layers(), len(self.tensors), _MAX_NAMED_LAYERS),
        )
        return [
            SharedTensor(canonical[role.name]) if isinstance(role, SharedTensor) else role for role in roles
        ]

    def describe(self) -> ModelDescription:
        """Return the architecture and the config; the shapes of tensors fill what config.json leaves out."""
        shapes: dict[str, tuple[int, ...]] = {}
        for tensor, role in zip(self.tensors, self.roles(), strict=True):
            if isinstance(role, SharedTensor):
                shapes[role.name] = tensor.shape
            elif isinstance(role, SinglePart) and role.role == "down":
                shapes.setdefault(f"blk.{role.layer}.ffn_down_exps.weight", (0, *role.shape))
        return config_from_hf(self.config_json, shapes)

    def _text_config(self) -> Mapping[str, Any]:
        text = self.config_json.get("text_config")
        return {**self.config_json, **text} if isinstance(text, dict) else self.config_json

    def _num_hidden_layers(self) -> int:
        found = self._text_config().get("num_hidden_layers", 0)
        if isinstance(found, int) and 0 < found < 100_000:
            return found
        deepest = 0
        for tensor in self.tensors:
            numbers = [int(word) for word in tensor.name.split(".") if word.isdecimal() and len(word) < 6]
            deepest = max(deepest, numbers[0] + 1 if numbers else 0)
        return deepest


def read_safetensors_header(file: CheckpointFile, number: int) -> list[CheckpointTensor]:
    """Parse one file's header strictly; `number` is the file's place in its checkpoint.

    The tensors come in the order of their bytes, which they cover from the header to the end of the file.
    """
    where = file.path
    with file.path.open("rb") as opened:
        start = opened.read(8)
        if len(start) < 8 or file.nbytes < 10:
            raise wrong_magic(where, start, "a safetensors file (at least 10 bytes)")
        header_nbytes = int.from_bytes(start, "little")
        if header_nbytes > min(MAX_HEADER_NBYTES, file.nbytes - 8):
            start += opened.read(56)
            if start.startswith(b"version ") or start.lstrip()[:1] == b"<":
                raise wrong_magic(where, start, "a safetensors file")
            raise CheckpointError(
                f"{where}: the header is said to have {header_nbytes} bytes, expected at most "
                f"{min(MAX_HEADER_NBYTES, file.nbytes - 8)}; truncated, or not a safetensors file"
            )
        raw = opened.read(header_nbytes)
    if len(raw) < header_nbytes or raw[:1] != b"{":
        raise CheckpointError(f"{where}: the header must start with {{, it starts with {raw[:8]!r}")
    header = _parse_object(raw, where)
    header.pop("__metadata__", None)
    data_offset = 8 + header_nbytes
    tensors = [_place(name, info, file, number, data_offset) for name, info in header.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes, tensor.name))
    end = data_offset
    for tensor in tensors:
        if tensor.offset != end:
            what = "overlaps the one before it" if tensor.offset < end else "leaves a gap before it"
            raise CheckpointError(
                f"{where}: tensor {tensor.name!r:.200} {what}, expected to start at byte {end}"
            )
        end += tensor.nbytes
    if end != file.nbytes:
        what = "is truncated" if end > file.nbytes else "goes on after its tensors"
        raise CheckpointError(
            f"{where}: {what}: {file.nbytes} bytes, its header describes {end}; download it again"
        )
    return tensors


def _place(name: str, info: Any, file: CheckpointFile, number: int, data_offset: int) -> CheckpointTensor:
    check_name(name, file.path)
    where = f"{file.path}: tensor {name!r:.200}"
    if not isinstance(info, dict) or info.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where}: expected dtype, shape and data_offsets, got {info!r:.100}")
    dtype, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
    if not isinstance(dtype, str) or not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{where}: dtype, shape or data_offsets is malformed: {info!r:.100}")
    if len(shape) > MAX_DIMS:
        raise CheckpointError(f"{where}: {len(shape)} dimensions, a pack can hold at most {MAX_DIMS}")
    begin, end = offsets
    if not begin <= end <= file.nbytes - data_offset:
        raise CheckpointError(
            f"{where}: data_offsets {offsets} lie outside the file ({file.nbytes - data_offset} bytes of data); "
            "it is truncated or damaged: download it again"
        )
    try:
        nbytes = dtype_nbytes(dtype, shape)
    except UnsupportedError as error:
        raise UnsupportedError(f"{where}: {error}") from error
    if nbytes != end - begin:
        raise CheckpointError(f"{where}: {end - begin} bytes, but {dtype} of shape {shape} takes {nbytes}")
    return CheckpointTensor(name, dtype, tuple(shape), number, data_offset + begin, nbytes)


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _weight_files(folder: Path) -> tuple[list[str], list[str] | None]:
    """Return the weight files by name, and the tensor names of the index when there is one."""
    indexes = sorted(folder.glob("*" + INDEX_ENDING))
    if len(indexes) > 1:
        names = ", ".join(index.name for index in indexes)
        raise UsageError(f"{folder}: holds {len(indexes)} indexes ({names}); keep the one to convert")
    if not indexes:
        found = sorted(path.name for path in folder.glob("*.safetensors"))
        if not found:
            raise UsageError(f"{folder}: no *.safetensors in this folder")
        _check_shards(found, folder)
        return found, None
    weight_map = read_json_object(indexes[0]).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{indexes[0]}: has no weight_map; delete the index to use every file's header")
    named = set(weight_map.values())
    for name in named:
        if not isinstance(name, str) or "/" in name or "\\" in name or not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{indexes[0]}: names the file {name!r:.100}, expected one of its own folder"
            )
        if not (folder / name).exists():
            raise CheckpointError(
                f"{folder}: shard {name} is missing, {indexes[0].name} names it; download it"
            )
    return sorted(named), list(weight_map)


def _check_shards(found: Sequence[str], folder: Path) -> None:
    """Hold the shards' names against each other, which nothing else does where there is no index."""
    counts: dict[str, str] = {}
    for match in filter(None, map(_SHARD_NAME.fullmatch, found)):
        stem, number, count = match["stem"], match["number"], match["count"]
        if not 1 <= int(number) <= int(count):
            raise CheckpointError(
                f"{folder / match[0]}: the name claims shard {number} of {count}; download the files again with the "
                "names they have there"
            )
        if counts.setdefault(stem, count) != count:
            raise CheckpointError(
                f"{folder}: shards of two sets are mixed, {stem}-*-of-{counts[stem]} and {stem}-*-of-{count}; keep those "
                "of one"
            )
    for stem, count in counts.items():
        names = [f"{stem}-{number:05}-of-{count}.safetensors" for number in range(1, int(count) + 1)]
        missing = sorted(set(names).difference(found))
        if missing:
            listed = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
            raise CheckpointError(
                f"{folder}: lacks {listed} of {int(count)} shards, and has no index; download what is missing"
            )


def _check_index(indexed: Sequence[str], tensors: Sequence[CheckpointTensor], folder: Path) -> None:
    absent = sorted(set(indexed) - {tensor.name for tensor in tensors})
    if absent:
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise CheckpointError(
            f"{folder}: the index names tensor {absent[0]!r:.200}{more}, but no file holds it: a shard is of another "
            "version, or the index is stale; download again, or delete the index to use the headers alone"
        )


def _other_files(folder: Path, root: Path, weights: set[str], depth: int = 0) -> Iterator[tuple[str, Path]]:
    """Walk what is beside the weights, sorted: files, and folders that are not gone into, linked ones or too deep.

    Hidden folders and packs are passed over.
    """
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        path = Path(entry.path)
        name = path.relative_to(root).as_posix()
        if entry.is_dir(follow_symlinks=False):
            is_foreign = entry.name.startswith(".") or entry.name.endswith((".lmpack", ".partial"))
            if is_foreign or _is_pack(path):
                continue
            if depth < _MAX_FOLDER_DEPTH:
                yield from _other_files(path, root, weights, depth + 1)
            else:
                yield name, path
        elif name not in weights:
            yield name, path


def _is_pack(folder: Path) -> bool:
    with suppress(ManifestError):  # there is none, or another program's
        read_manifest(folder)
        return True
    return False


def _check_stays(path: Path, folder: Path, weights: Sequence[CheckpointFile]) -> None:
    """Raise CheckpointError for a link that leads to where neither the folder nor the weights' own bytes are.

    The Hub's cache is a folder of links to blobs that lie side by side; a link in somebody else's folder that leads
    anywhere else could carry a file of this machine into a pack that is then given away.
    """
    if not path.is_symlink():
        return
    target = path.resolve()
    homes = {file.path.resolve().parent for file in weights}
    if target.parent not in homes and not target.is_relative_to(folder.resolve()):
        raise CheckpointError(
            f"{path}: is a link to {target}, outside of the checkpoint; copy the file here if it is the model's"
        )


def _parse_object(raw: bytes, where: Path) -> dict[str, Any]:
    try:
        found = parse_json(raw)
    except JsonError as error:
        raise CheckpointError(f"{where}: header: {error}; the file is damaged: download it again") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{where}: the header is not a JSON object")
    return found

"""Manifest: what a pack holds, parsed strictly from a manifest.json that nobody vouches for.

FORMAT.md is the specification; this module writes and reads the JSON and knows nothing about files.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from lmpack.alignment import MAX_PAGE_SIZE, MIN_PAGE_SIZE, is_page_size
from lmpack.converted_tensor import ConvertedTensor, as_in_source, parse_converted
from lmpack.errors import ManifestError, PackError, UnsupportedError
from lmpack.layer_entry import ExpertEntry, ExpertPart, LayerEntry, parse_layers
from lmpack.source_file import Source, SourceFile, SourceSegment, parse_source
from lmpack.source_places import check_covered
from lmpack.storage import RAW_STORAGE, REFERENCE_STORAGE, STORAGES, ZSTD_STORAGE
from lmpack.strict_json import (
    MAX_INTEGER,
    JsonError,
    check_bool,
    check_float,
    check_int,
    check_list,
    check_object,
    check_pattern,
    check_sha256,
    check_str,
    parse_json,
    shown,
)
from lmpack.tensor_info import TensorInfo, parse_shared

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

__all__ = [
    "ConfigValue",
    "ConvertedTensor",
    "ExpertEntry",
    "ExpertPart",
    "LayerEntry",
    "Manifest",
    "Source",
    "SourceFile",
    "SourceSegment",
    "TensorInfo",
    "check_description",
]

FORMAT_NAME = "lmpack"
FORMAT_VERSIONS = (1, 2)
MANIFEST_FILE = "manifest.json"
SHARED_FILE = "shared.bin"
PROFILES_FOLDER = "profiles/"
MAX_MANIFEST_NBYTES = 64 * 1024 * 1024
"""60 layers of 384 experts with six tensors each take 13 MB; more than this is an attack or a mistake."""
MAX_CONFIG_KEYS = 1024
MAX_CONFIG_LIST = 65_536
MAX_TEXT = 4096

ConfigScalar = bool | int | float | str
ConfigValue = ConfigScalar | list[ConfigScalar]

_PREFIXES = {
    version: f'{{"format": "{FORMAT_NAME}", "version": {version}, "pack_id": "'.encode()
    for version in FORMAT_VERSIONS
}
_PREFIX_NBYTES = 47  # of each
_NO_ID = b"0" * 64
_MANIFEST_KEYS = frozenset(
    {
        "format",
        "version",
        "pack_id",
        "page_size",
        "architecture",
        "config",
        "reproducible",
        "reason",
        "source",
        "layers",
        "shared_nbytes",
        "shared",
    }
)
_MANIFEST_KEYS_2 = _MANIFEST_KEYS | {"storage", "converted"}
_ARCHITECTURE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}")
_CONFIG_KEY = re.compile(r"[A-Za-z0-9_.-]{1,128}")


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything a reader needs to find, check and map the bytes of a pack."""

    page_size: int
    architecture: str
    config: Mapping[str, ConfigValue]
    layers: tuple[LayerEntry, ...]  # only those with routed experts, sorted
    shared: tuple[TensorInfo, ...]
    shared_nbytes: int
    source: Source
    reproducible: bool
    reason: str
    pack_id: str
    storage: str = RAW_STORAGE
    converted: tuple[ConvertedTensor, ...] = ()  # tensors whose bytes are not the source's
    _layer_index: dict[int, LayerEntry] = field(init=False, repr=False, compare=False)
    _tensor_index: dict[str, TensorInfo] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Index layers by number and shared tensors by name."""
        object.__setattr__(self, "_layer_index", {entry.layer: entry for entry in self.layers})
        object.__setattr__(self, "_tensor_index", {tensor.name: tensor for tensor in self.shared})

    @property
    def version(self) -> int:
        """The oldest format version that can say all this."""
        return 1 if self.storage == RAW_STORAGE and not self.converted else 2

    @property
    def is_compressed(self) -> bool:
        """Tell whether files must be decompressed before their bytes mean anything."""
        return self.storage == ZSTD_STORAGE

    @property
    def is_reference(self) -> bool:
        """Tell whether the weights lie in the files of the source, and not in the pack."""
        return self.storage == REFERENCE_STORAGE

    @property
    def shared_file_nbytes(self) -> int:
        """The size of shared.bin as it lies in the folder; a reference pack has none, and this is what it would be."""
        if not self.is_compressed:
            return self.shared_nbytes
        return sum(tensor.stored.nbytes for tensor in self.shared if tensor.stored is not None)

    def uncompressed(self) -> Manifest:
        """Return the manifest, pack id and all, of the same pack with every file as it is."""
        first_with: dict[str, str] = {}  # sha256 -> file; compressed, identical experts may have several
        layers = tuple(
            replace(
                layer,
                experts=tuple(
                    ExpertEntry(first_with.setdefault(e.sha256, e.file), e.nbytes, e.sha256)
                    for e in layer.experts
                ),
            )
            for layer in self.layers
        )
        shared = tuple(replace(tensor, stored=None) for tensor in self.shared)
        source = replace(self.source, folder="")
        plain = replace(self, storage=RAW_STORAGE, layers=layers, shared=shared, source=source)
        return replace(plain, pack_id=pack_id_of(_dump(plain)))

    @property
    def num_experts(self) -> int:
        """How many routed experts all layers have together."""
        return sum(entry.num_experts for entry in self.layers)

    def layer(self, layer: int) -> LayerEntry:
        """Return a layer's entry; raise PackError when it has no routed experts."""
        entry = self._layer_index.get(layer)
        if entry is None:
            raise PackError(f"layer {layer} of the pack {self.pack_id[:12]} has no routed experts")
        return entry

    def tensor(self, name: str) -> TensorInfo:
        """Return a shared tensor's entry; raise PackError when the pack has none of this name."""
        tensor = self._tensor_index.get(name)
        if tensor is None:
            raise PackError(f"the pack {self.pack_id[:12]} has no shared tensor {name!r}")
        return tensor

    def has_tensor(self, name: str) -> bool:
        """Tell whether the pack has a shared tensor of this name."""
        return name in self._tensor_index

    @classmethod
    def parse(cls, raw: bytes, where: Path) -> Manifest:
        """Check every value of manifest.json; raise ManifestError, naming the file `where`, on the first bad one."""
        try:
            return _parse(raw)
        except JsonError as error:
            raise ManifestError(f"{where}: {error}") from None

    def to_bytes(self) -> bytes:
        """Return the bytes of manifest.json, the same on every machine; pack_id is computed, not copied."""
        raw = _dump(self)
        return raw[:_PREFIX_NBYTES] + pack_id_of(raw).encode() + raw[_PREFIX_NBYTES + len(_NO_ID) :]


def pack_id_of(raw: bytes) -> str:
    """Return the SHA-256 of manifest.json with the digits of its pack_id set to zero, in hex."""
    end = _PREFIX_NBYTES + len(_NO_ID)
    return hashlib.sha256(raw[:_PREFIX_NBYTES] + _NO_ID + raw[end:]).hexdigest()


def check_description(architecture: str, config: Mapping[str, ConfigValue]) -> None:
    """Raise UnsupportedError when a manifest cannot hold this architecture or config; ask before a long conversion."""
    try:
        _parse_architecture(architecture)
        _parse_config(dict(config))
    except JsonError as error:
        raise UnsupportedError(f"the manifest cannot hold {error}") from None


def _fields(raw: bytes) -> tuple[int, dict[str, Any]]:
    """Return the format version, and the values of a manifest that has the keys and the pack id of its version."""
    if len(raw) > MAX_MANIFEST_NBYTES:
        raise JsonError(f"{len(raw)} bytes, the largest allowed manifest has {MAX_MANIFEST_NBYTES}")
    document = parse_json(raw)
    if not isinstance(document, dict) or document.get("format") != FORMAT_NAME:
        raise JsonError(f'not an lmpack manifest: "format" must be "{FORMAT_NAME}"')
    version = check_int(document.get("version"), "version")
    if version not in FORMAT_VERSIONS:
        known = " and ".join(map(str, FORMAT_VERSIONS))
        raise JsonError(
            f"format version {version} is not known, this lmpack reads versions {known}; "
            "convert the model again, or use the lmpack that wrote it"
        )
    fields = check_object(document, _MANIFEST_KEYS if version == 1 else _MANIFEST_KEYS_2, "manifest")
    if not raw.startswith(_PREFIXES[version]):
        raise JsonError(f"must begin with the bytes {_PREFIXES[version].decode()}")
    pack_id = check_sha256(fields["pack_id"], "pack_id")
    if pack_id != pack_id_of(raw):
        raise JsonError(
            f"pack_id is {pack_id[:12]}…, the manifest's bytes give {pack_id_of(raw)[:12]}…; it was changed"
        )
    return version, fields


def _parse(raw: bytes) -> Manifest:
    version, fields = _fields(raw)
    page_size = check_int(fields["page_size"], "page_size", least=MIN_PAGE_SIZE, most=MAX_PAGE_SIZE)
    if not is_page_size(page_size):
        raise JsonError(f"page_size: expected a power of two, got {page_size}")
    storage = RAW_STORAGE if version == 1 else _parse_storage(fields["storage"])
    layers = parse_layers(fields["layers"], page_size, storage)
    shared, shared_nbytes = parse_shared(fields, page_size, storage)
    converted = () if version == 1 else parse_converted(fields["converted"], layers, shared)
    source_layers, source_shared = as_in_source(layers, shared, converted)
    reproducible = check_bool(fields["reproducible"], "reproducible")
    reason = check_str(fields["reason"], "reason", shortest=0, longest=MAX_TEXT)
    if reproducible == bool(reason):
        raise JsonError("reason: must say why a pack is not reproducible, and be empty when it is")
    if reproducible and converted:
        raise JsonError("reproducible: true, but tensors were converted")
    is_reference = storage == REFERENCE_STORAGE
    source = parse_source(fields["source"], source_layers, source_shared, is_reference=is_reference)
    if is_reference:
        if not reproducible:
            raise JsonError("reproducible: false, but a reference pack has its source's bytes")
        check_covered(source, layers, shared)
    manifest = Manifest(
        page_size=page_size,
        architecture=check_pattern(
            fields["architecture"], _ARCHITECTURE, "architecture", "a name like qwen3moe"
        ),
        config=_parse_config(fields["config"]),
        layers=layers,
        shared=shared,
        shared_nbytes=shared_nbytes,
        source=source,
        reproducible=reproducible,
        reason=reason,
        pack_id=fields["pack_id"],
        storage=storage,
        converted=converted,
    )
    if manifest.version != version:
        raise JsonError(f"version: {version}, but a pack like this is of version {manifest.version}")
    return manifest


def _parse_storage(value: object) -> str:
    storage = check_str(value, "storage", longest=32)
    if storage not in STORAGES:
        raise JsonError(f"storage: expected {' or '.join(STORAGES)}, got {shown(storage)}")
    return storage


def _parse_architecture(value: object) -> str:
    return check_pattern(value, _ARCHITECTURE, "architecture", "a name like qwen3moe")


def _parse_config(value: object) -> dict[str, ConfigValue]:
    if not isinstance(value, dict) or len(value) > MAX_CONFIG_KEYS:
        raise JsonError(f"config: expected an object of at most {MAX_CONFIG_KEYS} keys, got {shown(value)}")
    config: dict[str, ConfigValue] = {}
    for key, item in value.items():
        check_pattern(key, _CONFIG_KEY, "config key", "letters, digits and _.-")
        at = f"config {key}"
        if isinstance(item, list):
            check_list(item, at, longest=MAX_CONFIG_LIST)
            config[key] = [_parse_scalar(element, at) for element in item]
        else:
            config[key] = _parse_scalar(item, at)
    return config


def _parse_scalar(value: object, at: str) -> ConfigScalar:
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return check_int(value, at, least=-MAX_INTEGER)
    if isinstance(value, float):
        return check_float(value, at)
    if isinstance(value, str):
        return check_str(value, at, shortest=0, longest=MAX_TEXT)
    raise JsonError(f"{at}: expected true, false, a number, a string or a list of those, got {shown(value)}")


def _dump(manifest: Manifest) -> bytes:
    """Write the manifest with pack_id 0…0: one line for each expert, tensor and segment, ASCII only."""
    values: dict[str, str] = {
        "page_size": _json(manifest.page_size),
        "architecture": _json(manifest.architecture),
        "config": _json(dict(sorted(manifest.config.items()))),
        "reproducible": _json(manifest.reproducible),
        "reason": _json(manifest.reason),
        **(_dump_version_2(manifest) if manifest.version == 2 else {}),
        "source": _dump_source(manifest.source),
        "layers": _rows(
            _open_ended(entry.to_json(), "experts", _dump_experts(entry.experts)) for entry in manifest.layers
        ),
        "shared_nbytes": _json(manifest.shared_nbytes),
        "shared": _rows(_json(tensor.to_json()) for tensor in manifest.shared),
    }
    lines = [f'"{key}": {value}' for key, value in values.items()]
    return _PREFIXES[manifest.version] + _NO_ID + ('",\n' + ",\n".join(lines) + "\n}\n").encode("ascii")


def _dump_version_2(manifest: Manifest) -> dict[str, str]:
    return {
        "storage": _json(manifest.storage),
        "converted": _rows(_json(entry.to_json()) for entry in manifest.converted),
    }


def _dump_source(source: Source) -> str:
    files = (
        _open_ended(
            {
                "name": file.name,
                "nbytes": file.nbytes,
                "sha256": file.sha256,
                "kept": file.kept,
                "kept_nbytes": file.kept_nbytes,
                "kept_sha256": file.kept_sha256,
            },
            "segments",
            _rows(_json({"offset": s.offset, "nbytes": s.nbytes, "tensor": s.tensor}) for s in file.segments),
        )
        for file in source.files
    )
    folder = {"folder": source.folder} if source.folder else {}
    return _open_ended({"kind": source.kind, **folder}, "files", _rows(files))


def _dump_experts(experts: Sequence[ExpertEntry]) -> str:
    return _rows(_json(expert.to_json()) for expert in experts)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=True, allow_nan=False)


def _rows(rows: Iterable[str]) -> str:
    text = ",\n".join(rows)
    return f"[\n{text}\n]" if text else "[]"


def _open_ended(fields: Mapping[str, object], key: str, rows: str) -> str:
    return f'{_json(fields)[:-1]}, "{key}": {rows}}}'

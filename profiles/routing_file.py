"""Routing file: a safetensors file whose metadata is one JSON document; FORMAT.md is the specification."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from safetensors import SafetensorError, safe_open

from lmpack.errors import ProfileError
from lmpack.strict_json import (
    JsonError,
    check_int,
    check_list,
    check_object,
    check_sha256,
    check_str,
    parse_json,
)
from lmpack.whole_file import whole_file
from profiles.routing_origin import RoutingOrigin
from profiles.routing_shape import MAX_EXPERTS, MAX_LAYERS, MAX_TOP_K, RoutingShape

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

VERSION = 1
METADATA_KEY = "lmpack"
MAX_TOKENS = 2**40
"""Keeps every sum of counts within int64."""
MAX_SOURCES = 65_536

_SAFETENSORS_DTYPES = {"int16": "I16", "int32": "I32", "int64": "I64", "float32": "F32"}


@dataclass(frozen=True, slots=True)
class RoutingDescription:
    """The metadata of a routing file."""

    shape: RoutingShape
    origin: RoutingOrigin
    totals: Mapping[str, int]  # tokens, prompts: which ones depends on the kind


def write_routing_file(
    path: Path, kind: str, description: RoutingDescription, tensors: Mapping[str, NDArray[Any]]
) -> None:
    """Write a file that appears whole or not at all; one already there is replaced. Raises StorageError."""
    document = json.dumps(
        {
            "kind": kind,
            "version": VERSION,
            "architecture": description.origin.architecture,
            "pack_ids": description.origin.pack_ids,
            "tokenizers_sha256": description.origin.tokenizers_sha256,
            "prompt_sets_sha256": description.origin.prompt_sets_sha256,
            "layers": description.shape.layers,
            "num_experts": description.shape.num_experts,
            "top_k": description.shape.top_k,
            **description.totals,
        }
    )
    with whole_file(path) as file:
        _write_safetensors(file, document, tensors)


def _write_safetensors(file: BinaryIO, document: str, tensors: Mapping[str, NDArray[Any]]) -> None:
    """Write tensor by tensor: safetensors' own writer hides the file from others (mode 0600) or doubles it."""
    header: dict[str, Any] = {"__metadata__": {METADATA_KEY: document}}
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))  # keeps each aligned
    offset = 0
    for name, tensor in ordered:
        header[name] = {
            "dtype": _SAFETENSORS_DTYPES[tensor.dtype.name],
            "shape": tensor.shape,
            "data_offsets": (offset, offset + tensor.nbytes),
        }
        offset += tensor.nbytes
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    file.write(len(raw).to_bytes(8, "little") + raw)
    for _, tensor in ordered:
        file.write(np.ascontiguousarray(tensor, tensor.dtype.newbyteorder("<")).data)


def is_routing_file(path: Path) -> bool:
    """Tell profiles and traces from everything else; raises OSError when a file cannot be read."""
    if not path.is_file():
        return False
    try:
        opened = _open_safetensors(path)
    except SafetensorError:
        return False
    return METADATA_KEY in (opened.metadata() or {})


def _open_safetensors(path: Path) -> Any:
    """Open a file by the library, which raises SafetensorError; OSError when it cannot be read."""
    with open(path, "rb"):  # safetensors' own error would lack the name of the file
        pass
    return safe_open(path, framework="np")


class RoutingFile:
    """An open routing file whose metadata has been checked; tensors are read one by one."""

    def __init__(self, path: Path, kind: str, totals: frozenset[str]) -> None:
        """Open a file of this kind; raises ProfileError when it is none, OSError when it cannot be read."""
        self.path = path
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait for its other end
            raise ProfileError(f"{path}: not a regular file; name a file that lmpack profile wrote")
        try:
            opened = _open_safetensors(path)
        except SafetensorError as error:
            raise ProfileError(
                f"{path}: not a safetensors file, or cut short ({error}); record it again"
            ) from None
        self._file = opened
        metadata: dict[str, str] | None = opened.metadata()
        document = (metadata or {}).get(METADATA_KEY)
        if document is None:
            raise ProfileError(
                f"{path}: a safetensors file, but not one of lmpack's {kind.replace('_', ' ')}s"
            )
        try:
            self.description = _parse(document.encode(), kind, totals)
        except (JsonError, ProfileError) as error:
            raise ProfileError(f"{path}: {error}") from None

    def read(self, dtypes_and_shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, NDArray[Any]]:
        """Every tensor of the file; checks before it allocates that there are these and no others."""
        found = set(self._file.keys())
        if found != dtypes_and_shapes.keys():
            raise ProfileError(
                f"{self.path}: expected the tensors {', '.join(sorted(dtypes_and_shapes))}, "
                f"got {', '.join(sorted(found)[:8]) or 'none'}"
            )
        for name, (dtype, shape) in dtypes_and_shapes.items():
            header = self._file.get_slice(name)
            got_dtype, got_shape = header.get_dtype(), tuple(header.get_shape())
            if (got_dtype, got_shape) != (_SAFETENSORS_DTYPES[dtype], shape):
                raise ProfileError(
                    f"{self.path}: tensor {name} is {got_dtype} {list(got_shape)}, "
                    f"the metadata asks for {_SAFETENSORS_DTYPES[dtype]} {list(shape)}"
                )
        return {name: self._file.get_tensor(name) for name in dtypes_and_shapes}


def _parse(raw: bytes, kind: str, totals: frozenset[str]) -> RoutingDescription:
    document = parse_json(raw)
    if not isinstance(document, dict) or document.get("kind") != kind:
        found = document.get("kind") if isinstance(document, dict) else document
        raise JsonError(f"expected the kind {kind}, got {str(found)[:40]!r}")
    version = check_int(document.get("version"), "version")
    if version != VERSION:
        raise JsonError(
            f"version {version} is not known, this lmpack reads version {VERSION}; "
            "profile again, or use the lmpack that wrote it"
        )
    fields = check_object(
        document,
        totals
        | {
            *("kind", "version", "architecture", "pack_ids", "tokenizers_sha256", "prompt_sets_sha256"),
            *("layers", "num_experts", "top_k"),
        },
        "metadata",
    )
    layers = check_list(fields["layers"], "layers", longest=MAX_LAYERS)
    num_experts = check_list(fields["num_experts"], "num_experts", longest=MAX_LAYERS)
    return RoutingDescription(
        RoutingShape(
            tuple(check_int(layer, "layers") for layer in layers),
            tuple(check_int(number, "num_experts", most=MAX_EXPERTS) for number in num_experts),
            check_int(fields["top_k"], "top_k", most=MAX_TOP_K),
        ),
        RoutingOrigin(
            check_str(fields["architecture"], "architecture", longest=64),
            *(
                tuple(
                    check_sha256(value, name) for value in check_list(fields[name], name, longest=MAX_SOURCES)
                )
                for name in ("pack_ids", "tokenizers_sha256", "prompt_sets_sha256")
            ),
        ),
        {name: check_int(fields[name], name, most=MAX_TOKENS) for name in sorted(totals)},
    )

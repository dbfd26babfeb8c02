"""Source: what the manifest keeps about the checkpoint a pack was made from, so that it can be given back."""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmpack.strict_json import (
    JsonError,
    check_int,
    check_list,
    check_object,
    check_sha256,
    check_str,
    shown,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lmpack.layer_entry import LayerEntry

SOURCE_KINDS = ("gguf", "safetensors")
KEPT_FOLDER = "source/"
REST_SUFFIX = ".rest"
MAX_NAME_NBYTES = 255  # what file systems hold
MAX_PATH = 1024
MAX_FOLDER = 4096
"""The longest path that Linux opens."""
MAX_SOURCE_FILES = 65_536
MAX_SEGMENTS = 1_048_576

_SOURCE_KEYS = frozenset({"kind", "files"})
_FILE_KEYS = frozenset({"name", "nbytes", "sha256", "kept", "kept_nbytes", "kept_sha256", "segments"})
_SEGMENT_KEYS = frozenset({"offset", "nbytes", "tensor"})
_NUMBER = re.compile(r"0|[1-9][0-9]{0,5}")


@dataclass(frozen=True, slots=True)
class SourceSegment:
    """Bytes [offset, offset + nbytes) of a source file, which the pack keeps as the tensor named here.

    tensor is "shared:NAME", "experts:LAYER:ROLE" (that part of expert 0, 1, 2, ... one after the other) or
    "expert:LAYER:EXPERT:ROLE".
    """

    offset: int
    nbytes: int
    tensor: str


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of the source: its identity, and where each of its bytes is kept.

    The file `kept` holds, in order, every byte that no segment covers.
    """

    name: str  # relative to the source's folder, with /
    nbytes: int
    sha256: str
    kept: str  # source/NAME, or source/NAME.rest when there are segments
    kept_nbytes: int
    kept_sha256: str
    segments: tuple[SourceSegment, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """The checkpoint a pack was made from."""

    kind: str  # "gguf" or "safetensors"
    files: tuple[SourceFile, ...]
    folder: str = ""  # of a reference pack: where the files are, from the pack's folder


def kept_path_of(name: str, *, has_segments: bool) -> str:
    """Return where a pack keeps a source file, or what is left of it when segments cover the rest."""
    return f"{KEPT_FOLDER}{name}{REST_SUFFIX if has_segments else ''}"


def check_relative_path(value: object, at: str) -> str:
    """Return value as a path that stays inside the folder it is joined to, on every operating system."""
    path = check_str(value, at, longest=MAX_PATH)
    parts = path.split("/")
    if (
        "\\" in path
        or path[1:2] == ":"
        or any(part in ("", ".", "..") or len(part.encode()) > MAX_NAME_NBYTES for part in parts)
    ):
        raise JsonError(
            f"{at}: expected a relative path with / that stays inside its folder, of names of at most {MAX_NAME_NBYTES} "
            f"bytes, got {shown(path)}"
        )
    return path


def check_folder(value: object, at: str) -> str:
    """Return value as the path of a folder outside the pack: absolute, or relative and beginning with ".."."""
    path = check_str(value, at, longest=MAX_FOLDER)
    if posixpath.normpath(path) != path or not f"{path}/".startswith(("/", "../")) or path.startswith("//"):
        raise JsonError(
            f"{at}: expected /a/b or ../a/b without detours, a folder outside the pack, got {shown(path)}"
        )
    return path


def parse_source(
    value: object,
    layers: Sequence[LayerEntry],
    shared_nbytes: Mapping[str, int],
    *,
    is_reference: bool = False,
) -> Source:
    """Check the manifest's "source"; shared_nbytes maps the name of each shared tensor to its size."""
    fields = check_object(value, _SOURCE_KEYS | {"folder"} if is_reference else _SOURCE_KEYS, "source")
    kind = check_str(fields["kind"], "source kind", longest=32)
    if kind not in SOURCE_KINDS:
        raise JsonError(f"source kind: expected {' or '.join(SOURCE_KINDS)}, got {shown(kind)}")
    sizes = _TensorSizes(layers, shared_nbytes)
    files: list[SourceFile] = []
    names: set[str] = set()
    kept: set[str] = set()
    for item in check_list(fields["files"], "source files", shortest=1, longest=MAX_SOURCE_FILES):
        file = _parse_file(item, f"source file {len(files)}", sizes)
        if file.name in names or file.kept in kept:
            raise JsonError(f"source file {file.name!r}: its name or {file.kept!r} stands twice")
        names.add(file.name)
        kept.add(file.kept)
        files.append(file)
    return Source(kind, tuple(files), check_folder(fields["folder"], "source folder") if is_reference else "")


def _parse_file(value: object, at: str, sizes: _TensorSizes) -> SourceFile:
    fields = check_object(value, _FILE_KEYS, at)
    name = check_relative_path(fields["name"], f"{at} name")
    at = f"source file {name!r}"
    nbytes = check_int(fields["nbytes"], f"{at} nbytes")
    segments: list[SourceSegment] = []
    end = covered = 0
    for item in check_list(fields["segments"], f"{at} segments", longest=MAX_SEGMENTS):
        segment = _parse_segment(item, f"{at} segment {len(segments)}", end, nbytes, sizes)
        segments.append(segment)
        end = segment.offset + segment.nbytes
        covered += segment.nbytes
    kept = kept_path_of(name, has_segments=bool(segments))
    check_relative_path(kept, f"{at} kept")
    if fields["kept"] != kept:
        raise JsonError(f"{at} kept: expected {kept!r}, got {shown(fields['kept'])}")
    kept_nbytes = check_int(fields["kept_nbytes"], f"{at} kept_nbytes")
    if kept_nbytes != nbytes - covered:
        raise JsonError(
            f"{at} kept_nbytes: {kept_nbytes}, but its segments leave {nbytes - covered} of {nbytes}"
        )
    sha256 = check_sha256(fields["sha256"], f"{at} sha256")
    kept_sha256 = check_sha256(fields["kept_sha256"], f"{at} kept_sha256")
    if not segments and kept_sha256 != sha256:
        raise JsonError(f"{at} kept_sha256: differs from sha256, but the file is kept whole")
    return SourceFile(name, nbytes, sha256, kept, kept_nbytes, kept_sha256, tuple(segments))


def _parse_segment(
    value: object, at: str, least: int, file_nbytes: int, sizes: _TensorSizes
) -> SourceSegment:
    fields = check_object(value, _SEGMENT_KEYS, at)
    offset = check_int(fields["offset"], f"{at} offset (sorted, no overlap)", least=least, most=file_nbytes)
    nbytes = check_int(fields["nbytes"], f"{at} nbytes", most=file_nbytes - offset)
    tensor = check_str(fields["tensor"], f"{at} tensor", longest=MAX_PATH)
    wanted = sizes.nbytes_of(tensor)
    if wanted is None:
        raise JsonError(f"{at} tensor: the pack holds no {shown(tensor)}")
    if wanted != nbytes:
        raise JsonError(f"{at} nbytes: {nbytes}, but {shown(tensor)} has {wanted}")
    return SourceSegment(offset, nbytes, tensor)


class _TensorSizes:
    """The sizes of everything a segment can name."""

    def __init__(self, layers: Sequence[LayerEntry], shared_nbytes: Mapping[str, int]) -> None:
        self._shared = shared_nbytes
        self._num_experts = {str(layer.layer): layer.num_experts for layer in layers}
        self._parts = {(str(layer.layer), part.role): part.nbytes for layer in layers for part in layer.parts}

    def nbytes_of(self, tensor: str) -> int | None:
        """Return the bytes of "shared:...", "experts:...", "expert:..."; None when the pack does not hold it."""
        kind, _, rest = tensor.partition(":")
        if kind == "shared":
            return self._shared.get(rest)
        names = rest.split(":")
        nbytes = self._parts.get((names[0], names[-1]))
        if nbytes is None:
            return None
        if kind == "experts" and len(names) == 2:
            return nbytes * self._num_experts[names[0]]
        if kind == "expert" and len(names) == 3 and _NUMBER.fullmatch(names[1]):
            return nbytes if int(names[1]) < self._num_experts[names[0]] else None
        return None

"""The round trip every checkpoint must survive: convert, validate, export, compare byte for byte."""

from __future__ import annotations

from typing import TYPE_CHECKING

from converters.conversion import convert
from converters.export import export
from lmpack.pack import Pack
from lmpack.validation import validate

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def files_below(folder: Path) -> dict[str, bytes]:
    """Return every file of a folder by its path inside it."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def round_trip(src: Path, work: Path, *, names: Sequence[str] | None = None, jobs: int | None = None) -> Pack:
    """Convert src into work, check the pack, export it and compare; names are the files a lone file stands for.

    Do so again with a pack that refers to src: it must stand for the same pack.
    """
    path = work / "round.lmpack"
    convert(src, path, jobs=jobs)
    report = validate(path)
    assert report.ok, report.problems
    export(path, work / "exported")
    if names is None and src.is_dir():
        wanted = files_below(src)
    else:
        folder = src if src.is_dir() else src.parent
        wanted = {name: (folder / name).read_bytes() for name in names or [src.name]}
    assert files_below(work / "exported") == wanted
    pack = Pack.open(path)
    convert(src, work / "reference.lmpack", jobs=jobs, reference=True)
    assert Pack.open(work / "reference.lmpack").manifest.uncompressed().pack_id == pack.manifest.pack_id
    report = validate(work / "reference.lmpack")
    assert report.ok, report.problems
    export(work / "reference.lmpack", work / "exported again")
    assert files_below(work / "exported again") == wanted
    return pack

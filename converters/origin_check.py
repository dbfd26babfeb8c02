"""OriginCheck: is this the checkpoint that a pack was made from, or a copy of the pack?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lmpack.errors import ManifestError, PackError, UsageError
from lmpack.manifest import MANIFEST_FILE, MAX_MANIFEST_NBYTES, Manifest
from lmpack.storage import RAW_STORAGE, REFERENCE_STORAGE, ZSTD_STORAGE

if TYPE_CHECKING:
    from converters.byte_origin import ByteOrigin
    from lmpack.source_file import Source

_FORMS = {RAW_STORAGE: "plain", ZSTD_STORAGE: "compressed", REFERENCE_STORAGE: "without weights"}


def refuse_other_checkpoint(origin: ByteOrigin, source: Source, pack: Path) -> None:
    """Raise UsageError when a file with weights of the pack's source is missing, or has another size."""
    for file in source.files:
        if not file.segments:
            continue
        try:
            nbytes: int | None = origin.nbytes(file.name)
        except PackError:
            nbytes = None
        if nbytes != file.nbytes:
            found = "is missing" if nbytes is None else f"has {nbytes} bytes"
            raise UsageError(
                f"{origin.name}: is not what {pack} was made from: {file.name} {found}, the source's has {file.nbytes} bytes; "
                "name that checkpoint"
            )


def refuse_other_pack(origin: ByteOrigin, manifest: Manifest, pack: Path) -> None:
    """Raise UsageError when a pack is of another model, or of the same one in another form.

    One whose own manifest is damaged is let through: its other files may be good.
    """
    try:
        _, other = origin_manifest(origin)
    except PackError:
        return
    if other.pack_id == manifest.pack_id:
        return
    ours, theirs = ({(file.name, file.sha256) for file in m.source.files} for m in (manifest, other))
    if ours != theirs:
        name, _ = min(ours ^ theirs)
        raise UsageError(
            f"{origin.name}: is no copy of {pack}: the sources differ in {name}; name a copy, or the checkpoint that the "
            "pack was made from"
        )
    exported = " (lmpack export gives it back)" if other.reproducible else ""
    raise UsageError(
        f"{origin.name}: is {_form(other)}, and {pack}, of the same source, is {_form(manifest)}: its files are others; "
        f"name a copy in the same form, or the checkpoint{exported}"
    )


def origin_manifest(origin: ByteOrigin) -> tuple[memoryview, Manifest]:
    """Return the manifest of an origin that is a pack, raw and parsed; raises ManifestError."""
    nbytes = origin.nbytes(MANIFEST_FILE)
    if nbytes > MAX_MANIFEST_NBYTES:
        raise ManifestError(
            f"{origin.name}: its manifest has {nbytes} bytes, expected at most {MAX_MANIFEST_NBYTES}"
        )
    raw = memoryview(bytearray(nbytes))
    origin.read(MANIFEST_FILE, 0, raw)
    return raw, Manifest.parse(bytes(raw), Path(origin.name) / MANIFEST_FILE)


def _form(manifest: Manifest) -> str:
    quantized = "quantized, " if manifest.converted else ""
    return f"{_FORMS[manifest.storage]}, {quantized}in pages of {manifest.page_size}"

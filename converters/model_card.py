"""Model card: the README.md of a pack on a hub, made from its manifest and from what the source says of itself."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from converters.gguf_header import read_gguf_header
from lmpack.byte_size import format_nbytes
from lmpack.pack_files import expected_files, read_regular_file

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lmpack.manifest import Manifest
    from lmpack.pack import Pack

CARD_FILE = "README.md"
MAX_CARD_NBYTES = 4 << 20
_FRONT_MATTER = re.compile(r"---\n(.*?)\n---\n", re.DOTALL)
_FIELD = re.compile(
    r"^(license|license_name|license_link|base_model): *[\"']?([\w.+:/#-]+)[\"']? *$", re.MULTILINE
)
_SAFE = re.compile(r"[A-Za-z0-9][\w.+:/#-]{0,299}", re.ASCII)  # cannot end a quoted YAML string
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_HUB_URL = re.compile(r"https://huggingface\.co/([\w.-]+/[\w.-]+)/?", re.ASCII)
_GGUF_FIELDS = {
    "license": "general.license",
    "license_name": "general.license.name",
    "license_link": "general.license.link",
    "base_model": "general.base_model.0.repo_url",
}


@dataclass(frozen=True, slots=True)
class SourceClaims:
    """What a checkpoint says of its own origin; each may be missing."""

    name: str | None
    fields: Mapping[str, str]  # license, license_name, license_link, base_model

    @classmethod
    def of(cls, pack: Pack) -> SourceClaims:
        """Read the GGUF metadata or the model card that the pack keeps; a claim that is no plain word is left out."""
        name, found = _from_gguf(pack) if pack.manifest.source.kind == "gguf" else _from_card(pack)
        if base := _HUB_URL.fullmatch(found.get("base_model", "")):
            found["base_model"] = base[1]
        elif not _REPO.fullmatch(found.get("base_model", "")):
            found.pop("base_model", None)
        return cls(name, {key: value for key, value in found.items() if _SAFE.fullmatch(value)})


def model_card(pack: Pack, repo_id: str) -> str:
    """Return the card: base model, licence, architecture, sizes, source files, and how to run it."""
    manifest, claims = pack.manifest, SourceClaims.of(pack)
    folder = repo_id.rpartition("/")[2].removesuffix(".lmpack") + ".lmpack"
    front = ["library_name: lmpack", "pipeline_tag: text-generation", "tags:", "- lmpack"]
    front += ["- moe"] if manifest.layers else []
    front += [f'{key}: "{value}"' for key, value in sorted(claims.fields.items())]
    rows = "\n".join(f"| {what} | {value} |" for what, value in _rows(manifest, claims))
    files = "\n".join(
        f"| `{file.name}` | {format_nbytes(file.nbytes)} | `{file.sha256}` |"
        for file in manifest.source.files
        if file.segments
    )
    return f"""---
{chr(10).join(front)}
---

# {_cell(claims.name or repo_id)}

An lmpack pack: one page-aligned file per expert and a manifest with a checksum for each, to run the model on a
machine whose memory is smaller than the weights.

| | |
|---|---|
{rows}

## Run it

```sh
pip install lmpack-moe
lmpack pull {repo_id} {folder}
lmpack run {folder} -p "Once upon a time"
```

## Where it comes from

Every byte of the source is in the pack: `lmpack export {folder} restored` gives these files back.

| file | size | SHA-256 |
|---|---|---|
{files}
"""


def _rows(manifest: Manifest, claims: SourceClaims) -> list[tuple[str, str]]:
    nbytes = sum(file.nbytes for file in expected_files(manifest).values())
    rows = [("architecture", f"`{manifest.architecture}`")]
    if base := claims.fields.get("base_model"):
        rows.append(("base model", f"[{base}](https://huggingface.co/{base})"))
    if manifest.layers:
        per_token = manifest.config.get("num_experts_per_tok")
        chosen = f", {per_token} of them chosen for a token" if isinstance(per_token, int) else ""
        most = max(layer.num_experts for layer in manifest.layers)
        rows.append(("experts", f"{most} in each of {len(manifest.layers)} layers{chosen}"))
        largest = max(layer.stride for layer in manifest.layers)
        rows.append(("an expert", f"up to {format_nbytes(largest)}"))
    dtypes = sorted({part.dtype for layer in manifest.layers for part in layer.parts})
    rows.append(("weights", ", ".join(dtypes or sorted({tensor.dtype for tensor in manifest.shared}))))
    rows.append(("resident", format_nbytes(manifest.shared_nbytes)))
    rows.append(("size", format_nbytes(nbytes)))
    rows.append(("pack id", f"`{manifest.pack_id}`"))
    return rows


def _from_gguf(pack: Pack) -> tuple[str | None, dict[str, str]]:
    first = next(file for file in pack.manifest.source.files if file.name.endswith(".gguf"))
    metadata = read_gguf_header(pack.kept_path(first)).metadata
    found = {ours: metadata.get(theirs) for ours, theirs in _GGUF_FIELDS.items()}
    name = metadata.get("general.name")
    return name if isinstance(name, str) else None, {
        key: value for key, value in found.items() if isinstance(value, str)
    }


def _from_card(pack: Pack) -> tuple[str | None, dict[str, str]]:
    path = pack.kept_file(CARD_FILE)
    if path is None:
        return None, {}
    text = read_regular_file(path, most=MAX_CARD_NBYTES).decode("utf-8", "replace").replace("\r\n", "\n")
    front = _FRONT_MATTER.match(text)
    return None, dict(_FIELD.findall(front[1])) if front else {}


def _cell(text: str) -> str:
    return "".join(char if char.isprintable() and char not in "|<>`" else " " for char in text)[:200].strip()

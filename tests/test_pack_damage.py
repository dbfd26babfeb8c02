"""Damage at random: every changed byte of a pack is found in its file, a changed manifest is refused or harmless."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from random import Random
from typing import TYPE_CHECKING

import pytest

from converters.conversion import convert
from converters.export import export
from fuzz.json_mutation import mutate_json
from lmpack.errors import LmpackError, PackError
from lmpack.expert_key import ExpertKey
from lmpack.manifest import MANIFEST_FILE
from lmpack.pack import Pack
from lmpack.validation import validate
from tests import gguf_matrix, safetensors_matrix
from tests.compressed_packs import trained_tensors, write_gguf
from tests.gguf_matrix import Writing, write_gguf_model
from tests.manifest_forgery import seal
from tests.round_trip import files_below

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conftest import TinyPack


def gguf_pack(work: Path, content: str, split: str) -> Path:
    """Convert a model of the GGUF matrix."""
    src = write_gguf_model(work / "src", gguf_matrix.CONTENTS[content], split, Writing(32, 3, "little"))
    convert(src, work / "m.lmpack")
    return work / "m.lmpack"


def safetensors_pack(work: Path, content: str, layout: str) -> Path:
    """Convert a model of the safetensors matrix."""
    safetensors_matrix.LAYOUTS[layout].write(work / "src", safetensors_matrix.CONTENTS[content].tensors)
    convert(work / "src", work / "m.lmpack")
    return work / "m.lmpack"


def compressed_pack(work: Path) -> Path:
    """Convert a model with weights that shrink, compressed."""
    (work / "src").mkdir()
    convert(write_gguf(work / "src" / "m.gguf", trained_tensors()), work / "m.lmpack", compress=True)
    return work / "m.lmpack"


PACKS: dict[str, Callable[[Path], Path]] = {
    "a split GGUF": lambda work: gguf_pack(work, "everything at once", "gate, up and down apart"),
    "a GGUF of unlike layers": lambda work: gguf_pack(work, "another number of experts in each layer", "one file"),
    "a dense GGUF": lambda work: gguf_pack(work, "no experts", "one file"),
    "a safetensors folder": lambda work: safetensors_pack(work, "per expert", "an index"),
    "a compressed GGUF": lambda work: compressed_pack(work),
    "gpt-oss": lambda work: safetensors_pack(work, "gpt-oss blocks and scales", "one file in a folder"),
}  # fmt: skip


def expert_of(pack: Pack) -> dict[str, ExpertKey]:
    """Say whose file each expert file is: of identical experts, the first one's."""
    found: dict[str, ExpertKey] = {}
    for layer in pack.manifest.layers:
        for expert, entry in enumerate(layer.experts):
            found.setdefault(entry.file, ExpertKey(layer.layer, expert))
    return found


def change_a_byte(path: Path, at: int, mask: int) -> None:
    """Flip the bits of a mask in one byte."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ mask]))


def check_flips(path: Path, num_flips: int, random: Random) -> None:
    """Change a byte, find it, change it back; every byte of the pack has the same chance."""
    keys = expert_of(Pack.open(path))
    files = {name: len(raw) for name, raw in files_below(path).items() if raw}
    for name in random.choices(list(files), list(files.values()), k=num_flips):
        at, mask = random.randrange(files[name]), random.randint(1, 255)
        change_a_byte(path / name, at, mask)
        problems = validate(path, jobs=1).problems
        assert [(p.file, p.key) for p in problems] == [(name, keys.get(name))], f"{name}: byte {at} ^ {mask}"
        change_a_byte(path / name, at, mask)
    assert validate(path).ok


@pytest.mark.parametrize("name", PACKS)
def test_every_one_of_120_flips_is_found_in_the_right_file(tmp_path: Path, name: str) -> None:
    check_flips(PACKS[name](tmp_path), 20, Random(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKS)
def test_every_one_of_12_000_flips_is_found_in_the_right_file(tmp_path: Path, name: str) -> None:
    check_flips(PACKS[name](tmp_path), 2000, Random(f"slow {name}"))


def outcome_of(path: Path, raw: bytes, originals: dict[str, bytes], work: Path) -> str:
    """Give a pack this manifest and do everything with it; "harmless" when what comes out is what went in."""
    (path / MANIFEST_FILE).write_bytes(raw)
    try:
        pack = Pack.open(path)
        report = validate(path, jobs=1)
        if not report.ok:
            raise PackError(str(report.problems[0]))
        for file in expert_of(pack):
            assert (path / file).resolve().is_relative_to(path.resolve())
        export(pack, work / "out")
    except LmpackError:
        return "refused"
    finally:
        exported = files_below(work / "out") if (work / "out").exists() else {}
        shutil.rmtree(work / "out", ignore_errors=True)
    assert exported == originals
    return "harmless"


def check_mutations(pack: Path, seeds: range, work: Path) -> Counter[str]:
    """Mutate the manifest with each seed and seal it; nothing but the pack and the export may be touched."""
    raw = (pack / MANIFEST_FILE).read_bytes()
    before = {name: found for name, found in files_below(pack).items() if name != MANIFEST_FILE}
    export(pack, work / "original")
    originals = files_below(work / "original")
    outcomes: Counter[str] = Counter()
    for seed in seeds:
        mutated = mutate_json(raw, Random(seed))
        outcomes[outcome_of(pack, seal(mutated), originals, work)] += 1
    (pack / MANIFEST_FILE).write_bytes(raw)
    assert {name: found for name, found in files_below(pack).items() if name != MANIFEST_FILE} == before
    assert sorted(os.listdir(work)) == sorted(
        {"original", *(path.name for path in (pack, *pack.parent.glob("src")))}
    )
    return outcomes


def test_a_mutated_manifest_is_refused_or_harmless(tiny_pack: TinyPack, tmp_path: Path) -> None:
    outcomes = check_mutations(tiny_pack.path, range(150), tmp_path)
    assert outcomes.total() == 150
    assert outcomes["refused"] > 100


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKS)
def test_1_200_mutated_manifests_are_refused_or_harmless(tmp_path: Path, name: str) -> None:
    outcomes = check_mutations(PACKS[name](tmp_path), range(1000, 1200), tmp_path)
    assert outcomes.total() == 200
    assert outcomes["refused"] > 100

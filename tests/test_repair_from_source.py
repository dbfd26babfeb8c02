"""Repair of packs that do not hold the source's bytes: what was quantized or compressed is so again, to the bit."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zstandard

from converters.byte_origin import open_local_origin
from converters.conversion import convert
from converters.importance_matrix import ImportanceMatrix
from converters.quantization import Quantization
from converters.repair import RepairReport, repair
from lmpack.cli.main import run
from lmpack.expert_key import ExpertKey
from lmpack.pack import Pack, read_manifest
from lmpack.validation import validate
from tests.compressed_packs import trained_tensors, write_gguf
from tests.gguf_fixtures import Tensor
from tests.manifest_forgery import put
from tests.round_trip import files_below
from tests.test_compression import forge, frames_of, replace_frames
from tests.test_importance_matrix import gguf_imatrix
from tests.test_repair import state
from tests.test_validation import flip

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

RULES = "experts=q8_0,experts:*:down=iq4_nl,shared=q4_0"
MAKES: dict[str, dict[str, Any]] = {
    "compressed": {"compress": True},
    "quantized": {"quantization": Quantization.parse(RULES)},
    "quantized and compressed": {"quantization": Quantization.parse("bf16"), "compress": True},
}
DOWN = "blk.1.ffn_down_exps.weight"
EXPERTS = ("experts/L000/E0001.bin", "experts/L001/E0002.bin")
UNUSED = Tensor("empty.weight", "F32", (0,), b"")


@pytest.fixture
def src(tmp_path: Path) -> Path:
    """A model of F32 numbers, one of whose tensors is empty."""
    return write_gguf(tmp_path / "model.gguf", [*trained_tensors("F32"), UNUSED])


def mend(pack: Path, origin: Path, imatrix: ImportanceMatrix | None = None) -> RepairReport:
    report = validate(pack)
    assert not report.ok
    source = read_manifest(pack).source
    return repair(pack, open_local_origin(origin, source), report.problems, imatrix=imatrix)


@pytest.mark.parametrize("make", MAKES)
def test_bad_files_and_no_others_are_made_again(src: Path, tmp_path: Path, make: str) -> None:
    pack = tmp_path / "m.lmpack"
    convert(src, pack, **MAKES[make])
    wanted, before = files_below(pack), state(pack)
    (pack / EXPERTS[0]).unlink()
    flip(pack / EXPERTS[1], 50)
    (pack / "shared.bin").unlink()
    report = mend(pack, src)
    assert (set(report.repaired), report.failed) == ({*EXPERTS, "shared.bin"}, ())
    assert report.validation.ok
    assert files_below(pack) == wanted
    after = state(pack)
    assert all(after[name] == before[name] for name in wanted.keys() - set(report.repaired))


@pytest.mark.parametrize("make", MAKES)
def test_every_single_bad_tensor_of_shared_bin_is_made_again(src: Path, tmp_path: Path, make: str) -> None:
    pack = tmp_path / "m.lmpack"
    convert(src, pack, **MAKES[make])
    manifest, wanted = read_manifest(pack), files_below(pack)
    for tensor in manifest.shared:
        place = tensor.stored or tensor
        if place.nbytes:
            flip(pack / "shared.bin", place.offset + place.nbytes // 2)
            assert mend(pack, src).repaired == ("shared.bin",)
    assert files_below(pack) == wanted


@pytest.mark.parametrize("make", MAKES)
def test_a_pack_without_a_good_file_of_tensors_is_made_again(src: Path, tmp_path: Path, make: str) -> None:
    pack = tmp_path / "m.lmpack"
    convert(src, pack, **MAKES[make])
    wanted = files_below(pack)
    for name in wanted:
        if name.endswith(".bin"):
            (pack / name).unlink()
    assert mend(pack, src).validation.ok
    assert files_below(pack) == wanted


def test_an_empty_tensor_is_no_obstacle(src: Path, tmp_path: Path) -> None:
    pack = tmp_path / "m.lmpack"
    convert(src, pack)
    (pack / "shared.bin").unlink()
    assert mend(pack, src).validation.ok


def test_what_another_zstd_wrote_is_said_to_be_so(src: Path, tmp_path: Path) -> None:
    convert(src, tmp_path / "m.lmpack", compress=True)
    without_checksum = zstandard.ZstdCompressor(level=1)
    pack = replace_frames(
        Pack.open(tmp_path / "m.lmpack"),
        ExpertKey(1, 2),
        lambda frames: b"".join(map(without_checksum.compress, frames_of(frames))),
    )
    assert validate(pack.path).ok
    flip(pack.path / EXPERTS[1], 50)
    before = state(pack.path)
    report = mend(pack.path, src)
    version = ".".join(map(str, zstandard.ZSTD_VERSION))
    assert str(report.failed[0]) == (
        f"expert L001/E0002 ({EXPERTS[1]}): zstd {version} does not give the compressed bytes that the manifest wants, "
        "another version of it wrote them; name another copy of the pack, or unpack a good one"
    )
    assert state(pack.path) == before


@pytest.mark.parametrize("make", MAKES)
def test_another_checkpoint_is_not_taken(src: Path, tmp_path: Path, make: str) -> None:
    pack = tmp_path / "m.lmpack"
    convert(src, pack, **MAKES[make])
    other = [
        replace(tensor, data=b"\x01" + tensor.raw[1:]) if tensor.raw else tensor
        for tensor in [*trained_tensors("F32"), UNUSED]
    ]
    write_gguf(src, other)
    flip(pack / "experts/L000/E0000.bin", 50)
    before = state(pack)
    (problem,) = mend(pack, src).failed
    wanted = "gives other bytes: sha256 .*is another checkpoint, or ggml .*install that, or name another copy"
    assert re.search(wanted if "quantized" in make else "has other bytes: sha256", problem.message)
    assert state(pack) == before


FORGERIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "another library": put("converted", 0, "library", "torch"),
    "a type ggml cannot read": put("converted", 0, "source_dtype", "I32"),
}


@pytest.mark.parametrize("what", FORGERIES)
def test_a_conversion_that_cannot_be_repeated_is_named(src: Path, tmp_path: Path, what: str) -> None:
    pack = tmp_path / "m.lmpack"
    convert(src, pack, **MAKES["quantized"])
    (pack / "manifest.json").write_bytes(forge(read_manifest(pack), FORGERIES[what]))
    flip(pack / "experts/L000/E0000.bin", 50)
    (problem,) = mend(pack, src).failed
    assert re.search(
        r"experts:0:\w+ was made Q8_0 from .* cannot be repeated here; name another copy", problem.message
    )


def test_the_importance_matrix_is_asked_for_by_its_hash(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    src = write_gguf(tmp_path / "model.gguf", trained_tensors("F32", width=256))
    paths = [tmp_path / "a.imatrix.gguf", tmp_path / "b.imatrix.gguf"]
    for seed, path in enumerate(paths):
        sums = np.random.default_rng(seed).random((4, 256), np.float32)
        path.write_bytes(gguf_imatrix({DOWN: (sums, np.array([1, 2, 3, 4], np.float32))}))
    matrix = ImportanceMatrix.read(paths[0])
    pack = tmp_path / "m.lmpack"
    convert(src, pack, quantization=Quantization.parse("experts:1:down=iq2_xxs", matrix))
    wanted = files_below(pack)
    flip(pack / EXPERTS[1], 50)
    repair_it = ["validate", str(pack), "--repair", str(src)]
    sha256 = hashlib.sha256(paths[0].read_bytes()).hexdigest()
    asked = f"experts:1:down was quantized with the importance matrix {sha256[:12]}… (SHA-256)"
    assert run(repair_it) == 1
    assert f"{asked}; name its file with --imatrix, or another copy" in capsys.readouterr().out
    assert run([*repair_it, "--imatrix", str(paths[1])]) == 1
    assert (
        f"{asked}, and {paths[1]} is {hashlib.sha256(paths[1].read_bytes()).hexdigest()[:12]}…"
        in capsys.readouterr().out
    )
    assert run([*repair_it, "--imatrix", str(paths[0]), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["repaired"] == [EXPERTS[1]]
    assert files_below(pack) == wanted
    assert run(["validate", str(pack), "--imatrix", str(paths[0])]) == 2
    assert run([*repair_it, "--revision", "v2"]) == 2

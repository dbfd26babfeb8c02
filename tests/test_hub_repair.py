"""Repairing a pack from a local hub: only the bytes of bad files come, and none is trusted before its hash."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from converters.conversion import convert
from converters.quantization import Quantization
from lmpack.cli.main import run
from lmpack.validation import validate
from tests.compressed_packs import trained_tensors, write_gguf
from tests.gguf_fixtures import METADATA, gguf_bytes, moe_tensors
from tests.round_trip import files_below

if TYPE_CHECKING:
    from pathlib import Path

    from tests.hub_server import HubServer

REPO = "owner/model"


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    """A good pack; its source is in memory alone."""
    source = tmp_path / "local name.gguf"
    source.write_bytes(gguf_bytes(moe_tensors(), METADATA))
    convert(source, tmp_path / "m.lmpack")
    source.unlink()
    return tmp_path / "m.lmpack"


def damage(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[100] ^= 0xFF
    path.write_bytes(raw)


def asked_nbytes(hub: HubServer) -> int:
    """How many bytes the store was asked for."""
    ranges = [
        request.range.removeprefix("bytes=").split("-")
        for request in hub.requests
        if request.server == "store" and request.range
    ]
    return sum(int(stop) - int(start) + 1 for start, stop in ranges)


def test_a_bad_expert_comes_from_the_gguf_by_its_byte_ranges(hub: HubServer, pack: Path) -> None:
    hub.add(REPO, {"m-F16.gguf": gguf_bytes(moe_tensors(), METADATA), "m-Q8_0.gguf": b"GGUF, another one"})
    damage(pack / "experts/L001/E0002.bin")
    assert run(["validate", str(pack), "--repair", f"{REPO}:f16"]) == 0
    assert validate(pack).ok
    assert asked_nbytes(hub) == 3 * 32 * 64 * 2  # gate, up and down in F16


def test_a_bad_file_comes_from_another_copy_of_the_pack(hub: HubServer, pack: Path) -> None:
    hub.add(REPO, files_below(pack) | {"README.md": b"# a card"})
    damage(pack / "experts/L001/E0002.bin")
    (pack / "experts/L000/E0000.bin").unlink()
    assert run(["validate", str(pack), "--repair", f"hf://{REPO}"]) == 0
    assert validate(pack).ok
    assert asked_nbytes(hub) == sum(
        (pack / f"experts/L00{n}").joinpath(name).stat().st_size
        for n, name in ((1, "E0002.bin"), (0, "E0000.bin"))
    )


def test_the_model_of_the_packs_source_is_found_among_several(hub: HubServer, pack: Path) -> None:
    hub.add(
        REPO, {"local name.gguf": gguf_bytes(moe_tensors(), METADATA), "m-Q8_0.gguf": b"GGUF, another one"}
    )
    damage(pack / "experts/L001/E0002.bin")
    assert run(["validate", str(pack), "--repair", REPO]) == 0


def test_another_revision_is_asked_by_its_name(hub: HubServer, pack: Path) -> None:
    hub.add(REPO, {"m-F16.gguf": b"not this one"})
    hub.set_branch(REPO, "v2", {"m-F16.gguf": gguf_bytes(moe_tensors(), METADATA)})
    damage(pack / "experts/L001/E0002.bin")
    assert run(["validate", str(pack), "--repair", REPO]) == 2
    assert run(["validate", str(pack), "--repair", REPO, "--revision", "v2"]) == 0
    assert validate(pack).ok


def test_a_quantized_and_compressed_expert_is_made_again_from_its_byte_ranges(
    hub: HubServer, tmp_path: Path
) -> None:
    source = write_gguf(tmp_path / "source.gguf", trained_tensors("BF16"))
    hub.add(REPO, {"m-BF16.gguf": source.read_bytes()})
    made = tmp_path / "m.lmpack"
    convert(source, made, quantization=Quantization.parse("experts=q8_0"), compress=True)
    damage(made / "experts/L001/E0002.bin")
    assert run(["validate", str(made), "--repair", REPO]) == 0
    assert validate(made).ok
    assert asked_nbytes(hub) == sum(
        tensor.nbytes // 4
        for tensor in trained_tensors("BF16")
        if tensor.name.startswith("blk.1.ffn") and "_exps" in tensor.name
    )


def test_other_bytes_are_refused_and_the_bad_file_stays(
    hub: HubServer, pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add(REPO, {"m-F16.gguf": bytes(len(gguf_bytes(moe_tensors(), METADATA)))})
    damage(pack / "experts/L001/E0002.bin")
    damaged = (pack / "experts/L001/E0002.bin").read_bytes()
    assert run(["validate", str(pack), "--repair", REPO]) == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert "owner/model:F16: is not what " in error
    assert (pack / "experts/L001/E0002.bin").read_bytes() == damaged


def test_neither_here_nor_a_name_of_a_repository(
    hub: HubServer, pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["validate", str(pack), "--repair", "nowhere.gguf"]) == 2
    assert "does not exist" in capsys.readouterr().err
    damage(pack / "experts/L001/E0002.bin")
    assert run(["validate", str(pack), "--repair", "owner/nothing"]) == 1
    assert "owner/nothing: no such repository" in capsys.readouterr().err

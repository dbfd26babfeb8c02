"""lmpack diff: which experts and tensors differ, and by how much; the numbers' oracle is gguf's own codecs."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from converters.conversion import convert
from converters.pack_diff import diff_packs
from lmpack.cli.main import run
from lmpack.expert_key import ExpertKey
from lmpack.pack import Pack
from tests.gguf_fixtures import METADATA, Tensor, gguf_bytes, moe_tensors
from tests.safetensors_fixtures import with_header

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray


def pack_of(path: Path, tensors: list[Tensor], **options: Any) -> Pack:
    """Convert tensors written as path.gguf."""
    metadata = options.pop("metadata", METADATA)
    path.with_suffix(".gguf").write_bytes(gguf_bytes(tensors, metadata))
    return Pack.open(convert(path.with_suffix(".gguf"), path.with_suffix(".lmpack"), **options).path)


def stored(values: NDArray[np.float32], dtype: str) -> bytes:
    return bytes(quantize(values, GGMLQuantizationType[dtype]).tobytes())


def test_equal_packs_have_nothing_to_tell_whatever_their_page_size(tmp_path: Path) -> None:
    tensors = moe_tensors(extras=("bias", "shexp"))
    a = pack_of(tmp_path / "a", tensors)
    b = pack_of(tmp_path / "b", tensors, page_size=16384)
    assert a.manifest.pack_id != b.manifest.pack_id
    assert diff_packs(a, b).equal
    done: list[int] = []
    diff_packs(a, b, progress=done.append)
    assert sum(done) == a.manifest.num_experts + len(a.manifest.shared)


@pytest.mark.parametrize("dtype", ["F16", "BF16", "Q8_0", "Q4_0", "Q5_1"])
def test_errors_are_those_of_the_dequantised_numbers(tmp_path: Path, dtype: str) -> None:
    rng = np.random.default_rng(0)
    up = rng.normal(size=(3, 40, 64)).astype(np.float32)
    embd = rng.normal(size=(50, 64)).astype(np.float32)

    def tensors(of: str) -> list[Tensor]:
        return [
            Tensor("token_embd.weight", of, embd.shape, stored(embd, of)),
            Tensor("blk.0.ffn_up_exps.weight", of, up.shape, stored(up, of)),
        ]

    diff = diff_packs(pack_of(tmp_path / "a", tensors("F32")), pack_of(tmp_path / "b", tensors(dtype)))
    assert [(d.key, d.name) for d in diff.tensors] == [
        *((ExpertKey(0, expert), "up") for expert in range(3)),
        (None, "token_embd.weight"),
    ]
    for difference, values in zip(diff.tensors, [*up, embd], strict=True):
        assert difference.a == ("F32", values.shape)
        assert difference.b == (dtype, values.shape)
        back = dequantize(quantize(values, GGMLQuantizationType[dtype]), GGMLQuantizationType[dtype])
        error = back.astype(np.float64).reshape(values.shape) - values
        assert difference.max_error == pytest.approx(np.abs(error).max())
        assert difference.relative_error == pytest.approx(np.linalg.norm(error) / np.linalg.norm(values))


def test_chunks_do_not_change_the_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).normal(size=(50, 64)).astype(np.float32)
    packs = [
        pack_of(tmp_path / dtype, [Tensor("t", dtype, values.shape, stored(values, dtype))])
        for dtype in ("F32", "Q4_0")
    ]
    (whole,) = diff_packs(*packs).tensors
    monkeypatch.setattr("converters.pack_diff.CHUNK_ELEMENTS", 256)
    (chunked,) = diff_packs(*packs).tensors
    assert chunked.max_error == whole.max_error
    assert chunked.relative_error == pytest.approx(whole.relative_error)


def test_one_changed_value_is_named_with_its_size(tmp_path: Path) -> None:
    values = np.ones((2, 4, 8), np.float32)
    changed = values.copy()
    changed[1, 2, 3] = 1.5
    name = "blk.7.ffn_down_exps.weight"
    a = pack_of(tmp_path / "a", [Tensor(name, "F32", values.shape, values.tobytes())])
    b = pack_of(tmp_path / "b", [Tensor(name, "F32", values.shape, changed.tobytes())])
    (difference,) = diff_packs(a, b).tensors
    assert (difference.key, difference.name) == (ExpertKey(7, 1), "down")
    assert difference.max_error == 0.5
    assert difference.relative_error == pytest.approx(0.5 / np.sqrt(32))


def test_what_one_pack_lacks_and_other_shapes_are_named(tmp_path: Path) -> None:
    def up(layer: int, experts: int, rows: int = 4) -> Tensor:
        return Tensor(f"blk.{layer}.ffn_up_exps.weight", "F32", (experts, rows, 8))

    a = pack_of(tmp_path / "a", [up(0, 3), up(1, 1), Tensor("x", "F32", (4,)), Tensor("s", "F32", (4,))])
    b = pack_of(tmp_path / "b", [up(0, 2), up(2, 1), Tensor("y", "F32", (4,)), Tensor("s", "F32", (2, 2))])
    found = {(d.key, d.name): (d.a is None, d.b is None, d.max_error) for d in diff_packs(a, b).tensors}
    assert found == {
        (ExpertKey(0, 2), "up"): (False, True, None),
        (ExpertKey(1, 0), "up"): (False, True, None),
        (ExpertKey(2, 0), "up"): (True, False, None),
        (None, "x"): (False, True, None),
        (None, "y"): (True, False, None),
        (None, "s"): (False, False, None),
    }


@pytest.mark.parametrize(("dtype", "nan"), [("F8_E4M3", False), ("F32", True)])
def test_numbers_that_cannot_be_compared_have_no_error(tmp_path: Path, dtype: str, nan: bool) -> None:
    packs = []
    for number in (1, 2):
        raw = np.array([np.nan, number], np.float32).tobytes() if nan else bytes([number] * 8)
        path = tmp_path / f"{number}.safetensors"
        header = {"t": {"dtype": dtype, "shape": [2 if nan else 8], "data_offsets": [0, 8]}}
        path.write_bytes(with_header(header, raw))
        packs.append(Pack.open(convert(path, tmp_path / f"{number}.lmpack").path))
    (difference,) = diff_packs(*packs).tensors
    assert (difference.max_error, difference.relative_error) == (None, None)


def test_config_and_metadata_are_compared_and_a_renamed_source_is_not_another(tmp_path: Path) -> None:
    tensors = [Tensor("t", "F32", (4,))]
    a = pack_of(tmp_path / "a", tensors)
    b = pack_of(tmp_path / "b", tensors)
    c = pack_of(tmp_path / "c", tensors, metadata={**METADATA, "general.architecture": "other"})
    assert diff_packs(a, b).equal
    diff = diff_packs(a, c)
    assert "architecture" in diff.config_keys
    assert diff.source_files == ("a.gguf", "c.gguf")


def test_the_command_says_which_by_how_much_and_with_its_exit_code(
    tmp_path: Path, demo_gguf: Path, demo_pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy.lmpack"
    shutil.copytree(demo_pack, copy)
    assert run(["diff", str(demo_pack), str(copy)]) == 0
    assert capsys.readouterr().out == "equal\n"
    raw = bytearray(demo_gguf.read_bytes())
    raw[10_000_000:10_000_004] = b"xxxx"
    (tmp_path / demo_gguf.name).write_bytes(raw)
    convert(tmp_path / demo_gguf.name, tmp_path / "other.lmpack")
    assert run(["diff", str(demo_pack), str(tmp_path / "other.lmpack")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("expert L002/E0017 down (Q6_K 256x256): up to 0.0")
    assert lines[1] == "different: 1 expert, 0 shared tensors, 0 config values, 0 source files"
    assert run(["diff", str(demo_pack), str(tmp_path / "other.lmpack"), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["equal"] is False
    (tensor,) = document["tensors"]
    assert (tensor["layer"], tensor["expert"], tensor["name"]) == (2, 17, "down")
    assert 0 < tensor["relative_error"] < 0.01

"""lmpack inspect: what a pack and a checkpoint say about themselves."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from lmpack.cli.main import run
from lmpack.manifest import Source, SourceFile
from lmpack.pack_writer import PackWriter

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from tests.conftest import TinyPack


def test_a_pack_is_shown_with_its_layers_parts_and_sizes(
    tiny_pack: TinyPack, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["inspect", str(tiny_pack.path)]) == 0
    out = capsys.readouterr().out
    assert f"{tiny_pack.path}: lmpack format 1, tinymoe" in out
    assert f"pack id    {tiny_pack.manifest.pack_id}" in out
    assert "experts    5 in 2 layers, 4 files, 40.0 KiB" in out
    assert "shared     3 tensors, 16.0 KiB" in out
    assert "layer 3: 2 experts of 16.0 KiB\n  gate_up  BF16     4x1100           8.6 KiB" in out
    assert "rms_norm_eps  1e-06" in out


def test_layers_that_look_alike_are_one_block(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with PackWriter(tmp_path / "a.lmpack") as writer:
        layers = (0, 1, 2, 4, 6, 7)
        for layer in layers:
            writer.add_layer(layer, 1, [("up", "U8", (1, 4))])
        for layer in layers:
            writer.write_part(layer, 0, "up", b"four")
        kept = writer.keep("source/a", b"a")
        file = SourceFile("a", *kept, "source/a", *kept, ())
        writer.finish(architecture="x", config={}, source=Source("gguf", (file,)))
    assert run(["inspect", str(tmp_path / "a.lmpack")]) == 0
    out = capsys.readouterr().out
    assert "layers 0-2, 4, 6-7: 1 expert of 4.0 KiB" in out
    assert "experts    6 in 6 layers, 1 file, 4.0 KiB" in out


def test_a_pack_as_json_has_every_layer_and_tensor(
    tiny_pack: TinyPack, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["inspect", str(tiny_pack.path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["kind"] == "lmpack"
    assert document["pack_id"] == tiny_pack.manifest.pack_id
    assert document["num_experts"] == 5
    assert document["num_expert_files"] == 4
    assert document["dtypes"] == {"BF16": 26400, "U8": 5000, "F32": 192, "F16": 96, "I64": 8}
    assert [layer["num_experts"] for layer in document["layers"]] == [3, 2]
    assert [tensor["name"] for tensor in document["shared"]] == [
        "token_embd.weight",
        "scale",
        "output.weight",
    ]
    assert document["source"]["files"][2]["name"] == "config.json"


def test_a_checkpoint_is_shown_before_it_is_packed(
    demo_gguf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["inspect", str(demo_gguf)]) == 0
    out = capsys.readouterr().out
    assert f"{demo_gguf}: gguf, qwen3moe" in out
    assert "num_experts" in out
    assert run(["inspect", str(demo_gguf), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["kind"] == "gguf"
    assert document["config"]["num_experts"] == 32
    assert sum(document["dtypes"].values()) <= document["files"][0]["nbytes"]


def test_a_broken_pack_is_one_line_and_exit_code_1(
    tiny_pack: TinyPack, capsys: pytest.CaptureFixture[str]
) -> None:
    (tiny_pack.path / "shared.bin").unlink()
    assert run(["inspect", str(tiny_pack.path)]) == 1
    err = capsys.readouterr().err
    assert "shared.bin: missing" in err
    assert err.count("\n") == 1

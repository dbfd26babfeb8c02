"""convert --quantize: llama.cpp's blocks where the rules say so, a manifest that owns up to it, and no way back."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest

from converters.checkpoint import open_checkpoint
from converters.conversion import convert
from converters.export import export
from converters.importance_matrix import ImportanceMatrix
from converters.quantization import Quantization
from converters.quantizer import as_floats, load_quantizer
from lmpack.cli.main import run
from lmpack.converted_tensor import part_name, shared_name
from lmpack.errors import CheckpointError, ManifestError, UnsupportedError, UsageError
from lmpack.expert_key import ExpertKey
from lmpack.manifest import Manifest
from lmpack.pack import Pack
from lmpack.unpacking import unpack
from lmpack.validation import validate
from runtime.engine import Engine
from tests.compressed_packs import trained_tensors, write_gguf
from tests.manifest_forgery import put
from tests.round_trip import files_below
from tests.test_compression import forge
from tests.test_importance_matrix import gguf_imatrix
from tests.test_manifest import WHERE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

DOWN = "blk.1.ffn_down_exps.weight"


@pytest.fixture
def src(tmp_path: Path) -> Path:
    """A BF16 model with rows of 64 and 96 numbers."""
    return write_gguf(tmp_path / "model.gguf", trained_tensors("BF16"))


def quantized(src: Path, dst: Path, rules: str, **options: Any) -> Pack:
    convert(src, dst, quantization=Quantization.parse(rules), **options)
    return Pack.open(dst)


def part_bytes(pack: Pack, layer: int, expert: int, role: str) -> bytes:
    part = pack.manifest.layer(layer).part(role)
    return pack.read_expert(ExpertKey(layer, expert))[part.offset : part.offset + part.nbytes]


def test_a_model_quantized_as_llama_quantize_did_it_has_the_same_blocks(
    models_dir: Path, tmp_path: Path
) -> None:
    convert(models_dir / "tiny" / "tiny-Q4_K_M.gguf", tmp_path / "theirs.lmpack")
    theirs = Pack.open(tmp_path / "theirs.lmpack")
    layers = theirs.manifest.layers
    rules = [f"{part_name(layer.layer, p.role)}={p.dtype}" for layer in layers for p in layer.parts]
    matrices = [t for t in theirs.manifest.shared if t.dtype != "F32"]
    rules += [f"{shared_name(tensor.name)}={tensor.dtype}" for tensor in matrices]
    ours = quantized(models_dir / "tiny" / "hf", tmp_path / "ours.lmpack", ",".join(rules))
    assert len(ours.manifest.converted) == len(rules)
    for layer in layers:
        for part in layer.parts:
            for expert in range(layer.num_experts):
                key = (layer.layer, expert, part.role)
                assert part_bytes(ours, *key) == part_bytes(theirs, *key)
    for tensor in matrices:
        assert np.array_equal(ours.read_tensor(tensor.name), theirs.read_tensor(tensor.name))


def test_rules_choose_by_kind_role_layer_and_name(src: Path, tmp_path: Path) -> None:
    rules = "experts=q4_0,experts:*:down=q8_0,experts:1:up=keep,shared=q5_0,shared:token_embd.weight=f16"
    pack = quantized(src, tmp_path / "q.lmpack", rules)
    dtypes = {
        part_name(layer.layer, part.role): part.dtype
        for layer in pack.manifest.layers
        for part in layer.parts
    }
    assert dtypes == {
        **{f"experts:{layer}:{role}_bias": "F32" for layer in (0, 1) for role in ("gate", "up", "down")},
        **{f"experts:{layer}:down": "Q8_0" for layer in (0, 1)},
        **{f"experts:{layer}:gate": "Q4_0" for layer in (0, 1)},
        "experts:0:up": "Q4_0",
        "experts:1:up": "BF16",
    }
    shared = {tensor.name: tensor.dtype for tensor in pack.manifest.shared}
    assert shared["token_embd.weight"] == "F16"
    assert shared["blk.0.ffn_up_shexp.weight"] == "Q5_0"
    assert {shared[name] for name in ("output_norm.weight", "blk.0.ffn_gate_inp.weight")} == {"F32"}


def test_the_manifest_lists_each_conversion_with_its_error(src: Path, tmp_path: Path) -> None:
    pack = quantized(src, tmp_path / "q.lmpack", "experts:*:up=q4_0,experts:*:gate=q8_0")
    manifest = pack.manifest
    assert (manifest.version, manifest.reproducible, manifest.storage) == (2, False, "raw")
    assert "quantized" in manifest.reason
    assert [entry.tensor for entry in manifest.converted] == [
        f"experts:{layer}:{role}" for layer in (0, 1) for role in ("gate", "up")
    ]
    originals = {tensor.name: tensor for tensor in trained_tensors("BF16")}
    for entry in manifest.converted:
        assert (entry.source_dtype, entry.library, entry.imatrix_sha256) == ("BF16", "ggml", "")
        assert entry.library_version == load_quantizer().version
        _, layer, role = entry.tensor.split(":")
        original = originals[f"blk.{layer}.ffn_{role}_exps.weight"]
        rows = as_floats(memoryview(original.raw), "BF16").reshape(4, *original.shape[1:])
        dtype = gguf.GGMLQuantizationType[manifest.layer(int(layer)).part(role).dtype]
        worst = 0.0
        for expert in range(4):
            raw = np.frombuffer(part_bytes(pack, int(layer), expert, role), np.uint8)
            back = gguf.quants.dequantize(raw.reshape(len(rows[expert]), -1), dtype)
            errors = np.abs(back - rows[expert]).max(axis=1) / np.abs(rows[expert]).max(axis=1)
            worst = max(worst, float(errors.max()))
        assert entry.relative_error == pytest.approx(worst, rel=1e-5)


def test_it_validates_but_does_not_give_its_source_back(src: Path, tmp_path: Path) -> None:
    pack = quantized(src, tmp_path / "q.lmpack", "q8_0")
    assert validate(pack.path).ok
    with pytest.raises(UnsupportedError, match="cannot give its source back: tensors were quantized"):
        export(pack, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_threads_and_interruptions_do_not_change_the_pack(src: Path, tmp_path: Path) -> None:
    wanted = quantized(src, tmp_path / "one.lmpack", "q8_0", jobs=1)
    assert files_below(quantized(src, tmp_path / "five.lmpack", "q8_0", jobs=5).path) == files_below(
        wanted.path
    )
    shutil.copytree(wanted.path, tmp_path / "again.lmpack.partial")  # killed before its last step
    convert(src, tmp_path / "again.lmpack", quantization=Quantization.parse("q8_0"), resume=True)
    assert files_below(tmp_path / "again.lmpack") == files_below(wanted.path)
    shutil.copytree(wanted.path, tmp_path / "other.lmpack.partial")
    with pytest.raises(UsageError, match="other settings"):
        convert(src, tmp_path / "other.lmpack", quantization=Quantization.parse("q5_0"), resume=True)


def test_a_quantized_pack_can_be_compressed_and_unpacked(src: Path, tmp_path: Path) -> None:
    plain = quantized(src, tmp_path / "q.lmpack", "experts=q8_0")
    compressed = quantized(src, tmp_path / "zstd.lmpack", "experts=q8_0", compress=True)
    assert compressed.manifest.converted == plain.manifest.converted
    unpack(compressed, tmp_path / "unpacked.lmpack")
    assert files_below(tmp_path / "unpacked.lmpack") == files_below(plain.path)


def test_every_expert_gets_its_own_weights_of_the_importance_matrix(tmp_path: Path) -> None:
    src = write_gguf(tmp_path / "model.gguf", trained_tensors("F32", width=256))
    random = np.random.default_rng(3)
    sums, counts = random.random((4, 256), np.float32), np.array([1, 2, 3, 4], np.float32)
    (tmp_path / "imatrix.gguf").write_bytes(gguf_imatrix({DOWN: (sums, counts)}))
    matrix = ImportanceMatrix.read(tmp_path / "imatrix.gguf")
    with pytest.raises(
        UsageError, match=r"experts:1:down: IQ2_XXS needs an importance matrix .* none was given"
    ):
        quantized(src, tmp_path / "no.lmpack", "experts:1:down=iq2_xxs")
    with pytest.raises(UsageError, match=r"experts:0:down: IQ2_XXS needs .*imatrix.gguf has none for it"):
        convert(
            src, tmp_path / "no.lmpack", quantization=Quantization.parse("experts:*:down=iq2_xxs", matrix)
        )
    with pytest.raises(UsageError, match=r"--imatrix .*imatrix.gguf: has nothing for any tensor"):
        convert(src, tmp_path / "no.lmpack", quantization=Quantization.parse("experts:*:up=q8_0", matrix))
    convert(src, tmp_path / "q.lmpack", quantization=Quantization.parse("experts:1:down=iq2_xxs", matrix))
    pack = Pack.open(tmp_path / "q.lmpack")
    assert pack.manifest.converted[0].imatrix_sha256 == matrix.sha256
    original = next(t for t in trained_tensors("F32", width=256) if t.name == DOWN)
    for expert in range(4):
        part = memoryview(original.raw[expert * original.nbytes // 4 : (expert + 1) * original.nbytes // 4])
        weights = sums[expert] / counts[expert]
        wanted, _ = load_quantizer().convert(part, "F32", "IQ2_XXS", 256, weights)
        assert part_bytes(pack, 1, expert, "down") == wanted.tobytes()


def test_shared_tensors_larger_than_a_buffer_are_cut_between_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    src = write_gguf(tmp_path / "model.gguf", trained_tensors("F32"))
    wanted = quantized(src, tmp_path / "one.lmpack", "shared=q8_0")
    monkeypatch.setattr("converters.conversion.BUFFER_NBYTES", 1000)
    small = quantized(src, tmp_path / "cut.lmpack", "shared=q8_0")
    assert small.manifest.pack_id == wanted.manifest.pack_id


REFUSALS: dict[str, tuple[str, type[Exception], str]] = {
    "a type that is none": ("q4_K_M", UsageError, "'q4_K_M' is none of Q4_0"),
    "a type that cannot be written": ("experts=q8_K", UsageError, "'q8_K' is none of"),
    "nothing": ("", UsageError, "'': a rule has no type; expected"),
    "nothing twice": (",", UsageError, "',': a rule has no type; expected"),
    "no type": ("experts=", UsageError, "'experts=': a rule has no type; expected"),
    "no names": ("=q8_0", UsageError, "=q8_0: expected experts, shared, experts:LAYER:ROLE"),
    "names that are none": ("attn=q8_0", UsageError, "expected experts, shared, experts:LAYER:ROLE"),
    "names that fit nothing": (
        "experts:7:up=q8_0",
        UsageError,
        "experts:7:up: .* has no matrix of this name",
    ),
    "names of which one fits nothing": (
        "experts=q8_0,shared:none*=q8_0",
        UsageError,
        "shared:none.*: .* has no matrix of this name",
    ),
    "the type that is there": (
        "experts=bf16",
        UsageError,
        "changes nothing in .*; leave it out, or name other",
    ),
    "nothing but what is kept": ("keep", UsageError, "changes nothing in"),
    "a norm": ("shared:output_norm.weight=q8_0", UsageError, "has no matrix of this name"),
    "rows that are too short": (
        "experts:*:up=q4_K",
        UnsupportedError,
        "rows of 64 numbers, Q4_K needs multiples of 256",
    ),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_what_cannot_be_quantized_is_refused_before_anything_is_written(
    src: Path, tmp_path: Path, what: str
) -> None:
    rules, error, message = REFUSALS[what]
    with pytest.raises(error, match=message):
        quantized(src, tmp_path / "q.lmpack", rules)
    assert not list(tmp_path.glob("q.lmpack*"))


def test_a_quantized_source_is_not_quantized_again(demo_gguf: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"is Q4_K already, .*=keep"):
        quantized(demo_gguf, tmp_path / "q.lmpack", "experts=q4_0")


def test_numbers_that_are_not_finite_are_an_error_with_the_tensors_name(tmp_path: Path) -> None:
    tensors = trained_tensors("F32")
    at = next(i for i, tensor in enumerate(tensors) if tensor.name == DOWN)
    tensors[at] = replace(tensors[at], data=b"\xff" * tensors[at].nbytes)
    with pytest.raises(CheckpointError, match=r"experts:1:down: holds numbers that are not finite"):
        quantized(write_gguf(tmp_path / "model.gguf", tensors), tmp_path / "q.lmpack", "experts=q8_0")


FORGERIES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "reproducible": (lambda d: d.update(reproducible=True, reason=""), "true, but tensors were converted"),
    "a tensor that is not there": (put("converted", 0, "tensor", "experts:9:up"), "is not in the pack"),
    "twice": (lambda d: d["converted"].append(d["converted"][0]), "stands twice, or is out of order"),
    "a negative error": (put("converted", 0, "relative_error", -0.5), "relative_error: expected at least 0"),
    "an error that is an integer": (put("converted", 0, "relative_error", 1), "expected a finite number"),
    "an unknown dtype": (
        put("converted", 0, "source_dtype", "F11"),
        "source_dtype: dtype 'F11' is not known",
    ),
    "another size in the source": (put("converted", 0, "source_dtype", "F32"), "segment .* nbytes"),
    "a hash that is none": (put("converted", 0, "imatrix_sha256", "x"), "imatrix_sha256: expected 64"),
    "without conversions": (put("converted", []), "segment .* nbytes"),
}


@pytest.mark.parametrize("what", FORGERIES)
def test_a_sealed_forgery_is_refused_for_what_it_is(src: Path, tmp_path: Path, what: str) -> None:
    manifest = quantized(src, tmp_path / "q.lmpack", "experts=q8_0").manifest
    assert Manifest.parse(manifest.to_bytes(), WHERE) == manifest
    change, message = FORGERIES[what]
    with pytest.raises(ManifestError, match=message):
        Manifest.parse(forge(manifest, change), WHERE)


def test_a_quantized_model_runs_and_says_almost_the_same(models_dir: Path, tmp_path: Path) -> None:
    hf = models_dir / "tiny" / "hf"
    convert(hf, tmp_path / "bf16.lmpack")
    quantized(hf, tmp_path / "q.lmpack", "experts=q8_0,shared=q8_0")
    choices = []
    for name in ("bf16.lmpack", "q.lmpack"):
        with Engine.load(tmp_path / name, num_threads=1, context_length=64) as engine:
            ids = engine.tokenizer.encode("Once upon a time there was a small fox who lived in the forest")
            choices.append(engine.forward(ids, engine.new_kv(), all_logits=True).argmax(-1).tolist())
    assert np.mean(np.equal(choices[0], choices[1])) > 0.8


def test_the_command_says_what_it_did(src: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["convert", str(src), str(tmp_path / "q.lmpack"), "--quantize", "experts=q8_0"]) == 0
    assert "quantized 6 tensors, largest relative error of a row 0.0" in capsys.readouterr().out
    assert run(["inspect", str(tmp_path / "q.lmpack")]) == 0
    assert "no way back: tensors were quantized" in capsys.readouterr().out
    assert run(["convert", str(src), str(tmp_path / "r.lmpack"), "--imatrix", str(src)]) == 2
    assert "--imatrix: is for --quantize" in capsys.readouterr().err


def test_the_plan_names_what_will_be_converted(src: Path) -> None:
    from converters.conversion_plan import plan_conversion

    plan = Quantization.parse("shared=q8_0").plan(plan_conversion(open_checkpoint(src)), "model")
    assert set(plan.tensors) == {
        "shared:token_embd.weight",
        *(f"shared:blk.{n}.ffn_up_shexp.weight" for n in (0, 1)),
    }

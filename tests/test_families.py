"""Every family that runs, from both containers, against transformers' and llama.cpp's own answers.

The references are all logits of four sequences by transformers in float32 (`ref_hf.safetensors`), and
llama.cpp's best log-probabilities on the bf16 GGUF (`ref_llamacpp.json`).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file

from converters.conversion import convert
from lmpack.errors import UnsupportedError
from runtime.engine import Engine
from runtime.sampler import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

FAMILIES = ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "llama", "qwen3")
GIB = 1 << 30


@pytest.fixture(
    scope="module", params=[(name, kind) for name in FAMILIES for kind in ("hf", "gguf")], ids="-".join
)
def family(
    request: pytest.FixtureRequest, models_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A family's folder and a pack of it, from its safetensors or its bf16 GGUF."""
    name, kind = request.param
    folder = models_dir / "families" / name
    pack = tmp_path_factory.mktemp("families") / f"{name}-{kind}.lmpack"
    convert(folder / "hf" if kind == "hf" else folder / f"{name}-bf16.gguf", pack)
    return folder, pack


def load_exact(pack: Path) -> Engine:
    return Engine.load(pack, ram=2 * GIB, kernels="torch", kv_dtype="f32", context_length=256)


def sequences(folder: Path) -> list[dict[str, torch.Tensor]]:
    tensors = load_file(folder / "ref_hf.safetensors")
    names = sorted({name.split(".")[0] for name in tensors})
    return [
        {key.split(".", 1)[1]: value for key, value in tensors.items() if key.startswith(f"{name}.")}
        for name in names
    ]


def test_logits_are_those_of_transformers(family: tuple[Path, Path]) -> None:
    folder, pack = family
    with load_exact(pack) as engine:
        for sequence in sequences(folder):
            logits = engine.forward(sequence["ids"].tolist(), engine.new_kv(), all_logits=True)
            torch.testing.assert_close(
                logits.log_softmax(-1), sequence["logits"].log_softmax(-1), atol=2e-4, rtol=0
            )


def test_greedy_continuations_are_those_of_transformers(family: tuple[Path, Path]) -> None:
    folder, pack = family
    with load_exact(pack) as engine:
        for sequence in sequences(folder):
            greedy = SamplingParams(max_tokens=24, ignore_eos=True)
            generated = [token.token_id for token in engine.generate(sequence["ids"].tolist(), greedy)]
            assert generated == sequence["greedy24"].tolist()


def test_ggml_kernels_are_as_close_to_llamacpp_as_bf16_allows(family: tuple[Path, Path]) -> None:
    folder, pack = family
    answers = json.loads((folder / "ref_llamacpp.json").read_text())["bf16"]["seqs"]
    with Engine.load(pack, ram=2 * GIB, kernels="ggml", context_length=256) as engine:
        for answer in answers:
            logits = engine.forward(answer["ids"], engine.new_kv())[0]
            assert _mean_difference(logits.log_softmax(-1), answer["top20"]) < 0.2


def _mean_difference(logprobs: torch.Tensor, top: Sequence[tuple[int, float]]) -> float:
    ids, expected = zip(*top, strict=True)
    return float((logprobs[list(ids)] - torch.tensor(expected)).abs().mean())


@pytest.mark.parametrize("name", ["kimi_linear", "nemotron_h", "gpt_oss", "qwen4_exp"])
def test_a_family_that_cannot_run_is_refused_by_its_architecture(
    models_dir: Path, tmp_path: Path, name: str
) -> None:
    pack = tmp_path / "m.lmpack"
    convert(models_dir / "families" / name / f"{name}-bf16.gguf", pack)
    with pytest.raises(UnsupportedError, match="can be packed but not run yet"):
        Engine.load(pack)

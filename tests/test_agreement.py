"""Our numbers are llama.cpp's and transformers', as close as rounding allows.

`python -m benchmarks.agreement` measures the same over more text and prints it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from converters.conversion import convert
from runtime.engine import Engine
from runtime.perplexity import measure_perplexity
from tests.agreement import Agreement
from tests.engine_answers import score_windows, split_windows
from tests.family_agreement import compare_with_hf, compare_with_stored_llamacpp
from tests.family_reference import RUNNABLE, load_hf_answers
from tests.gguf_agreement import Task, ask_llamacpp, compare_with_llamacpp
from tests.llamacpp_oracle import LlamaCppOracle
from tests.tiny_ggufs import write_tiny_gguf
from tests.transformers_oracle import TransformersOracle

WINDOW = 128  # tokens
CONTEXT = 512  # tokens
HELDOUT = Path(__file__).parents[1] / "lmpack" / "demo" / "heldout.txt"


@pytest.fixture(scope="module")
def text() -> str:
    return HELDOUT.read_bytes().decode("utf-8")


@pytest.fixture(scope="module")
def token_ids(demo_gguf: Path, text: str) -> list[int]:
    with LlamaCppOracle(demo_gguf) as oracle:
        return oracle.tokenize(text)


@pytest.fixture(scope="module", params=["Q4_K_M", "BF16", "Q8_0"])
def tiny_gguf(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained model as GGUF: the embedded one, and two made from its safetensors."""
    if request.param == "Q4_K_M":
        demo_gguf: Path = request.getfixturevalue("demo_gguf")
        return demo_gguf
    models_dir: Path = request.getfixturevalue("models_dir")
    folder = tmp_path_factory.mktemp("tiny")
    return write_tiny_gguf(models_dir / "tiny", request.param, folder / f"tiny-{request.param}.gguf")


@pytest.fixture(scope="module")
def tiny_pack(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(tiny_gguf, tmp_path_factory.mktemp("tiny") / "tiny.lmpack").path


@pytest.fixture(scope="module")
def safetensors_pack(models_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(models_dir / "tiny" / "hf", tmp_path_factory.mktemp("tiny") / "hf.lmpack").path


def test_a_gguf_predicts_and_continues_text_as_in_llamacpp(
    tiny_gguf: Path, tiny_pack: Path, token_ids: list[int]
) -> None:
    prompts = [window[:24] for window in split_windows(token_ids, 4 * WINDOW, WINDOW)]
    task = Task(split_windows(token_ids, 2 * WINDOW, WINDOW), prompts, num_tokens=24)
    reference = ask_llamacpp(tiny_gguf, task, kv_dtype="f32")
    found = compare_with_llamacpp(reference, tiny_pack, task, kv_dtype="f32")
    assert found.text.top1 >= 0.98
    assert found.text.mean_kl <= 0.01
    assert all(parting.is_near_tie for parting in found.partings), found.partings


def test_a_text_has_the_token_ids_and_the_perplexity_it_has_in_llamacpp(
    tiny_gguf: Path, tiny_pack: Path, text: str, token_ids: list[int]
) -> None:
    with LlamaCppOracle(tiny_gguf) as oracle:
        expected = oracle.perplexity(token_ids, CONTEXT, num_chunks=1)
    with Engine.load(tiny_pack, context_length=CONTEXT, num_threads=1) as engine:
        assert engine.tokenizer.encode(text) == token_ids
        found = measure_perplexity(engine, token_ids, CONTEXT, num_chunks=1)
    assert found.perplexity == pytest.approx(expected, rel=0.005)


def test_safetensors_predict_text_as_in_transformers(
    models_dir: Path, safetensors_pack: Path, token_ids: list[int]
) -> None:
    windows = split_windows(token_ids, 2 * WINDOW, WINDOW)
    oracle = TransformersOracle(models_dir / "tiny" / "hf")
    expected = np.concatenate([oracle.logits(window) for window in windows])
    with Engine.load(safetensors_pack, context_length=CONTEXT, num_threads=1) as engine:
        found = Agreement.of_logits(expected, score_windows(engine, windows))
    assert found.top1 >= 0.99
    assert found.mean_kl <= 1e-3


@pytest.mark.parametrize("tiny_gguf", ["BF16"], indirect=True)
def test_a_gguf_and_the_safetensors_of_one_model_give_the_same_logits(
    tiny_pack: Path, safetensors_pack: Path, token_ids: list[int]
) -> None:
    logits = []
    for pack in (tiny_pack, safetensors_pack):
        with Engine.load(pack, context_length=CONTEXT, num_threads=1) as engine:
            logits.append(score_windows(engine, [token_ids[:WINDOW]]))
    np.testing.assert_allclose(logits[0], logits[1], rtol=0, atol=1e-3)


@pytest.mark.parametrize("family", RUNNABLE)
def test_every_family_gives_transformers_logits_and_experts(
    models_dir: Path, tmp_path: Path, family: str
) -> None:
    source = models_dir / "families" / family
    pack = convert(source / "hf", tmp_path / "hf.lmpack").path
    found = compare_with_hf(source, pack, kernels="torch")
    assert found.text.top1 == 1
    assert found.max_difference <= 1e-3
    assert found.experts == 1
    assert found.num_greedy_identical == found.num_greedy


@pytest.mark.parametrize("family", RUNNABLE)
def test_every_family_gives_llamacpp_probabilities(models_dir: Path, tmp_path: Path, family: str) -> None:
    source = models_dir / "families" / family
    gguf = source / f"{family}-bf16.gguf"
    pack = convert(gguf, tmp_path / "bf16.lmpack").path
    sequences = [answer.token_ids for answer in load_hf_answers(source)]
    task = Task(sequences, sequences[:1], num_tokens=8)
    found = compare_with_llamacpp(ask_llamacpp(gguf, task, kv_dtype="f32"), pack, task, kv_dtype="f32")
    assert found.text.top1 >= 0.98
    assert found.text.mean_kl <= 1e-4
    assert all(parting.is_near_tie for parting in found.partings), found.partings
    assert compare_with_stored_llamacpp(source, pack, "bf16").mean_kl <= 1e-3


def test_the_two_references_agree_with_each_other(
    models_dir: Path, tmp_path: Path, token_ids: list[int]
) -> None:
    window = token_ids[-WINDOW:]  # a story, where nothing is nearly tied
    with LlamaCppOracle(write_tiny_gguf(models_dir / "tiny", "BF16", tmp_path / "bf16.gguf")) as oracle:
        candidates = oracle.teacher_forced(window, 512)
    found = Agreement.of_candidates(candidates, TransformersOracle(models_dir / "tiny" / "hf").logits(window))
    assert found.top1 == 1
    assert found.mean_kl <= 1e-4

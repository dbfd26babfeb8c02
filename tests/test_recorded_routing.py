"""What the recorder counts in the engine is what transformers' routers choose for the same tokens.

Both widen the same bf16 weights to float32; sums in another order move a router's logits by about 1e-6. Only where
the last expert chosen and the first one left out are closer than that may the two disagree, and in these texts none
are: the counts must be equal, not nearly so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from safetensors.numpy import load_file

from converters.conversion import convert
from lmpack.pack import Pack
from profiles.routing_recorder import RoutingRecorder
from profiles.routing_shape import RoutingShape
from runtime.engine import Engine
from tests.tiny_routing import ORIGIN
from tests.transformers_oracle import TransformersOracle

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from profiles.routing_trace import RoutingTrace


def record_with_engine(
    pack: Path, texts_ids: Sequence[Sequence[int]]
) -> tuple[RoutingRecorder, RoutingTrace]:
    """Prefill texts with the torch kernels in float32."""
    recorder = RoutingRecorder(RoutingShape.of_manifest(Pack.open(pack).manifest), keep_trace=True)
    with Engine.load(pack, kernels="torch", kv_dtype="f32", recorder=recorder) as engine:
        for ids in texts_ids:
            engine.hidden(ids, engine.new_kv())
            recorder.end_prompt(ids, len(ids))
    return recorder, recorder.trace(ORIGIN)


def counts_of(topk_ids: NDArray[np.integer], num_experts: int) -> NDArray[np.int64]:
    """Counts [num_layers, num_experts] of choices [num_tokens, num_layers, top_k]."""
    return np.stack([np.bincount(layer.ravel(), minlength=num_experts) for layer in topk_ids.swapaxes(0, 1)])


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "mixtral", "olmoe"])
def test_every_choice_and_weight_equals_transformers(models_dir: Path, tmp_path: Path, family: str) -> None:
    folder = models_dir / "families" / family
    convert(folder / "hf", tmp_path / "m.lmpack")
    reference = load_file(folder / "ref_hf.safetensors")
    recorder, trace = record_with_engine(
        tmp_path / "m.lmpack", [reference[f"seq{number}.ids"].tolist() for number in range(4)]
    )

    def of_reference(what: str) -> np.ndarray:
        layers = [
            np.concatenate([reference[f"seq{number}.layer{layer}.{what}"] for number in range(4)])
            for layer in trace.shape.layers
        ]
        return np.stack(layers, 1)

    assert np.array_equal(trace.topk_ids, of_reference("experts"))
    np.testing.assert_allclose(trace.topk_weights, of_reference("weights"), atol=2e-5)
    counts = counts_of(of_reference("experts"), 8)
    assert np.array_equal(recorder.profile(ORIGIN).counts, counts)


def test_counts_of_the_trained_model_equal_those_of_transformers_router_logits(
    models_dir: Path, tmp_path: Path
) -> None:
    folder = models_dir / "tiny" / "hf"
    convert(folder, tmp_path / "m.lmpack")
    with Engine.load(tmp_path / "m.lmpack", kernels="torch") as engine:
        text = (models_dir / "tiny" / "heldout.txt").read_text(encoding="utf-8")[:4000]
        ids = engine.tokenizer.encode(text)[:768]
    recorder, trace = record_with_engine(tmp_path / "m.lmpack", [ids])
    routing = TransformersOracle(folder).routing(ids)
    expected = np.stack([layer.topk_ids for layer in routing], 1)  # [num_tokens, num_layers, top_k]
    ordered = np.stack([np.sort(layer.router_logits, 1) for layer in routing], 1)
    assert (ordered[..., -4] - ordered[..., -5]).min() > 1e-5, "a near-tie: choose another text"
    assert np.array_equal(trace.topk_ids, expected)
    assert np.array_equal(recorder.profile(ORIGIN).counts, counts_of(expected, 32))

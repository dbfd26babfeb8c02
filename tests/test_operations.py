"""Each operation as ggml records it, against torch's of the same block; those are checked by formulas elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch

from runtime.kernels.kernels import load_kernels
from runtime.kv_cache import KV_DTYPES, KVCache
from runtime.model_config import ModelConfig
from runtime.rope import Rope
from runtime.router import Router
from runtime.step import Step

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from runtime.kernels.kernels import Block, Kernels
    from runtime.kernels.operations import Operations, T

HEADS, KV_HEADS, HEAD_DIM, CONTEXT = 6, 2, 32, 300
CONFIG = {
    "num_hidden_layers": 2,
    "hidden_size": HEADS * HEAD_DIM,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "rms_norm_eps": 1e-6,
    "vocab_size": 16,
    "max_position_embeddings": CONTEXT,
    "rope_theta": 10000.0,
}


@pytest.fixture(params=[1, 2], ids=lambda number: f"threads-{number}")
def ggml(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    kernels = load_kernels("ggml", num_threads=request.param)
    yield kernels
    kernels.close()


@pytest.fixture
def torch_kernels() -> Kernels:
    return load_kernels("torch", num_threads=1)


def floats(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True, eq=False)
class SelfAttention:
    """Rotate and attend: x [n, (HEADS + 2 KV_HEADS) * HEAD_DIM] would be split; q, k and v come apart here."""

    rope: Rope

    def __call__(self, ops: Operations[T], inputs: tuple[T, ...], step: Step | None) -> T:
        assert step is not None
        q, k, v = (ops.heads(x, HEAD_DIM) for x in inputs)
        return ops.attend(ops.rope(q, self.rope, step), ops.rope(k, self.rope, step), v, 1, step)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("rope_dim", [HEAD_DIM, 16])
def test_tokens_attend_to_their_past_as_torch_says(
    ggml: Kernels, torch_kernels: Kernels, kv_dtype: str, window: int | None, rope_dim: int
) -> None:
    config = ModelConfig.parse({**CONFIG, "rope_dim": rope_dim})
    device = torch.device("cpu")
    block = SelfAttention(Rope(config, CONTEXT, None, device))
    caches = [KVCache(config, CONTEXT, KV_DTYPES[kv_dtype], device) for _ in range(2)]
    # Many tokens, single ones on both sides of a border between recorded lengths, many again.
    for n in (120, *[1] * 12, 5, 1):
        inputs = [
            floats(n, heads * HEAD_DIM, seed=n + seed)
            for seed, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))
        ]
        ours, reference = (
            kernels.run(block, *inputs, step=Step(kv, n, window)).clone()
            for kernels, kv in zip((ggml, torch_kernels), caches, strict=True)
        )
        tolerance = {"f32": 2e-5, "f16": 2e-3, "bf16": 2e-2}[kv_dtype]
        torch.testing.assert_close(ours, reference, atol=tolerance, rtol=0)
        for kv in caches:
            kv.advance(range(n))
    torch.testing.assert_close(caches[0].keys.float(), caches[1].keys.float(), atol=2e-2, rtol=1e-2)
    assert torch.equal(caches[0].values, caches[1].values)


@dataclass(frozen=True, eq=False)
class Route:
    """The weights of the chosen experts; `seen` gets their ids."""

    router: Router
    seen: list[Tensor]

    def __call__(self, ops: Operations[T], inputs: tuple[T, ...], step: Step | None) -> T:
        topk_ids, topk_weights = ops.route(inputs[0], self.router)

        def note(topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
            self.seen.append(topk_ids.clone())
            return topk_weights.clone()

        return ops.host(note, (topk_ids, topk_weights), (3, self.router.top_k))


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_a_router_chooses_and_weighs_as_torchs(
    ggml: Kernels, torch_kernels: Kernels, norm_topk_prob: bool
) -> None:
    logits = floats(3, 40, seed=1)
    block = Route(Router(5, norm_topk_prob), [])
    weights = [kernels.run(block, logits).clone() for kernels in (ggml, torch_kernels)]
    torch.testing.assert_close(weights[0], weights[1], atol=1e-6, rtol=0)
    assert torch.equal(*block.seen)
    assert block.seen[0].tolist() == logits.topk(5).indices.tolist()


class Arithmetic:
    """Blocks of one operation each."""

    def add(self, ops: Operations[T], inputs: tuple[T, ...], step: Step | None) -> T:
        return ops.add(inputs[0], inputs[1])

    def swiglu(self, ops: Operations[T], inputs: tuple[T, ...], step: Step | None) -> T:
        return ops.swiglu(inputs[0], inputs[1])

    def gated(self, ops: Operations[T], inputs: tuple[T, ...], step: Step | None) -> T:
        return ops.gated(inputs[0], inputs[2])

    def mix(self, ops: Operations[T], inputs: tuple[T, ...], step: Step | None) -> T:
        outputs = ops.host(lambda x: torch.stack((x, 2 * x, -x), 1), (inputs[0],), (4, 3, 96))
        return ops.mix(outputs, inputs[3])

    def two_hosts(self, ops: Operations[T], inputs: tuple[T, ...], step: Step | None) -> T:
        x, y = inputs[0], inputs[1]
        kept = ops.add(x, y)  # made before the host's turns, used after them
        first = ops.host(lambda x: x.cumsum(0), (kept,), (4, 96))
        second = ops.host(lambda a, b: a * b, (ops.add(first, x), y), (4, 96))
        return ops.add(ops.add(second, kept), first)


@pytest.mark.parametrize("name", [name for name in vars(Arithmetic) if not name.startswith("_")])
def test_arithmetic_is_torchs(ggml: Kernels, torch_kernels: Kernels, name: str) -> None:
    inputs = [floats(4, 96, seed=1), floats(4, 96, seed=2), floats(4, 1, seed=3), floats(4, 3, seed=4)]
    block: Block = getattr(Arithmetic(), name)
    ours, reference = (kernels.run(block, *inputs).clone() for kernels in (ggml, torch_kernels))
    torch.testing.assert_close(ours, reference, atol=1e-5, rtol=1e-5)


def test_what_a_host_function_raises_reaches_the_caller_and_the_next_run_is_right(ggml: Kernels) -> None:
    calls: list[int] = []

    def fail_once(x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 1:
            raise KeyError("once")
        return x + 1

    class Failing:
        def __call__(self, ops: Operations[T], inputs: tuple[T, ...], step: Step | None) -> T:
            return ops.add(ops.host(fail_once, (inputs[0],), (2, 64)), inputs[0])

    block, x = Failing(), floats(2, 64, seed=5)
    with pytest.raises(KeyError, match="once"):
        ggml.run(block, x)
    torch.testing.assert_close(ggml.run(block, x), 2 * x + 1)

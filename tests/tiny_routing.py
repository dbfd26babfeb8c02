"""Routing of an imagined model of three uneven MoE layers, as the runtime would report it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from profiles.routing_origin import RoutingOrigin
from profiles.routing_recorder import RoutingRecorder
from profiles.routing_shape import RoutingShape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

SHAPE = RoutingShape(layers=(1, 2, 4), num_experts=(6, 4, 5), top_k=2)
ORIGIN = RoutingOrigin("tinymoe", ("aa" * 32,), ("bb" * 32,), ("cc" * 32,))


def random_choices(
    num_tokens: int, seed: int, shape: RoutingShape = SHAPE
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Distinct experts and weights of each token and layer, [num_tokens, num_layers, top_k] both."""
    rng = np.random.default_rng(seed)
    per_layer = [
        rng.random((num_tokens, num_experts)).argsort(1)[:, : shape.top_k]
        for num_experts in shape.num_experts
    ]
    ids = np.stack(per_layer, 1).astype(np.int32)
    return ids, rng.random(ids.shape).astype(np.float32)


def feed(
    recorder: RoutingRecorder,
    topk_ids: NDArray[np.int32],
    topk_weights: NDArray[np.float32],
    chunks: Sequence[int],
) -> None:
    """Report the choices chunk by chunk, through the same two arrays each time, as a runtime's arena would."""
    first = 0
    for num_tokens in chunks:
        for index, layer in enumerate(recorder.shape.layers):
            ids = topk_ids[first : first + num_tokens, index].copy()
            weights = topk_weights[first : first + num_tokens, index].copy()
            recorder.on_select(layer, ids, weights)
            ids[:] = -1
            weights[:] = np.nan
        first += num_tokens
    assert first == len(topk_ids)


def record(
    prompts: Sequence[Sequence[int]], *, seed: int = 0, shape: RoutingShape = SHAPE, keep_trace: bool = True
) -> RoutingRecorder:
    """Record prompts of random choices, each given as the lengths of its chunks; the first is the prompt's."""
    recorder = RoutingRecorder(shape, keep_trace=keep_trace)
    for number, chunks in enumerate(prompts):
        ids, weights = random_choices(sum(chunks), 100 * seed + number, shape)
        feed(recorder, ids, weights, chunks)
        recorder.end_prompt(range(sum(chunks)), chunks[0])
    return recorder

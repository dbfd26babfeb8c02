"""Routing recorder: the hook that the runtime calls with every layer's choices.

A chunk of tokens passes through the MoE layers in order, one `on_select` each, then the next chunk follows:
a prompt comes in one or more prefill chunks, generated tokens one by one. Per call the recorder only copies
into a buffer; it counts when a prompt ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from profiles.routing_counts import RoutingCounts
from profiles.routing_profile import RoutingProfile
from profiles.routing_trace import RoutingTrace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from profiles.routing_origin import RoutingOrigin
    from profiles.routing_shape import RoutingShape

_FIRST_CAPACITY = 512  # tokens


class RoutingRecorder:
    """Collects choices prompt by prompt; calls that do not fit the shape or each other raise ValueError."""

    def __init__(self, shape: RoutingShape, *, keep_trace: bool = False) -> None:
        self.shape = shape
        self.keep_trace = keep_trace
        self._layers = shape.layers
        self._counts = RoutingCounts(shape)
        self._num_tokens = 0  # of the prompts that ended
        self._num_prompt_tokens = 0
        # the open prompt
        self._ids: NDArray[np.int32]  # [capacity, num_layers, top_k]
        self._weights: NDArray[np.float32]  # [capacity, num_layers, top_k], empty without a trace
        self._allocate(_FIRST_CAPACITY)
        self._first = 0  # of the open chunk
        self._end = 0
        self._next = 0  # index of the layer that comes next
        self._chunk_lengths: list[int] = []
        # the trace of the prompts that ended
        self._traced: list[tuple[NDArray[np.int16], NDArray[np.float32], NDArray[np.int32]]] = []
        self._prompt_lengths: list[int] = []
        self._traced_chunk_lengths: list[int] = []

    @property
    def num_pending(self) -> int:
        """Tokens of the open prompt that have passed through all layers."""
        return self._first if self._next else self._end

    def on_select(self, layer: int, topk_ids: NDArray[np.int32], topk_weights: NDArray[np.float32]) -> None:
        """Note the choices [num_tokens, top_k] of a chunk in one layer; both arrays may be reused afterwards."""
        index = self._next
        if layer != self._layers[index]:
            raise ValueError(f"layer {layer} reported its choices where layer {self._layers[index]} was due")
        num_tokens = len(topk_ids)
        if index == 0:
            self._first = self._end
            self._end += num_tokens
            if self._end > len(self._ids):
                self._grow(self._end)
        elif num_tokens != self._end - self._first:
            raise ValueError(
                f"layer {layer} reported {num_tokens} tokens of a chunk of {self._end - self._first}"
            )
        self._ids[self._first : self._end, index] = topk_ids
        if self.keep_trace:
            self._weights[self._first : self._end, index] = topk_weights
        if index + 1 == len(self._layers):
            self._next = 0
            self._chunk_lengths.append(num_tokens)
        else:
            self._next = index + 1

    def end_prompt(self, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """Count the open prompt; `token_ids` are all that were run, the first ones from the prompt itself."""
        num_tokens = self.num_pending
        if self._next:
            raise ValueError(f"the prompt ended before layer {self._layers[self._next]} reported its choices")
        if len(token_ids) != num_tokens or not 1 <= num_prompt_tokens <= num_tokens:
            raise ValueError(
                f"{len(token_ids)} token ids, {num_prompt_tokens} of them of the prompt, for {num_tokens} "
                "tokens that passed through the layers"
            )
        ids = self._ids[:num_tokens]
        if ids.min() < 0 or (ids >= np.array(self.shape.num_experts)[:, None]).any():
            raise ValueError("an expert number is outside of its layer")
        self._counts.add(ids)
        self._num_tokens += num_tokens
        self._num_prompt_tokens += num_prompt_tokens
        if self.keep_trace:
            self._traced.append(
                (ids.astype(np.int16), self._weights[:num_tokens].copy(), np.array(token_ids, np.int32))
            )
            self._prompt_lengths.append(num_prompt_tokens)
            self._traced_chunk_lengths += self._chunk_lengths
        self._first = self._end = 0
        self._chunk_lengths = []

    def profile(self, origin: RoutingOrigin) -> RoutingProfile:
        """The counts of all prompts that ended."""
        return RoutingProfile(
            self.shape,
            origin,
            self._counts.counts.copy(),
            self._counts.transitions.copy(),
            self._num_tokens,
            self._num_prompt_tokens,
        )

    def trace(self, origin: RoutingOrigin) -> RoutingTrace:
        """The choices of all prompts that ended; ValueError when it was not asked to keep them."""
        if not self.keep_trace:
            raise ValueError("this recorder was made without keep_trace")
        choices = (0, self.shape.num_layers, self.shape.top_k)
        empty = (np.empty(choices, np.int16), np.empty(choices, np.float32), np.empty(0, np.int32))
        ids, weights, token_ids = zip(empty, *self._traced, strict=True)
        return RoutingTrace(
            self.shape,
            origin,
            topk_ids=np.concatenate(ids),
            topk_weights=np.concatenate(weights),
            token_ids=np.concatenate(token_ids),
            prompt_offsets=_offsets([len(tokens) for tokens in token_ids[1:]]),
            prompt_lengths=np.array(self._prompt_lengths, np.int64),
            chunk_offsets=_offsets(self._traced_chunk_lengths),
        )

    def _allocate(self, capacity: int) -> None:
        choices = (self.shape.num_layers, self.shape.top_k)
        self._ids = np.empty((capacity, *choices), np.int32)
        self._weights = np.empty((capacity if self.keep_trace else 0, *choices), np.float32)

    def _grow(self, num_tokens: int) -> None:
        """Make room for a longer prompt, in doubling steps, keeping what the open one has so far."""
        ids, weights = self._ids, self._weights
        self._allocate(max(num_tokens, 2 * len(ids)))
        self._ids[: len(ids)] = ids
        self._weights[: len(weights)] = weights


def _offsets(lengths: Sequence[int]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])

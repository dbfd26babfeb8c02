"""Routing trace: which experts every token took, layer by layer, in the order of the run.

It keeps what a simulator needs to replay the run: the ids and their weights, the tokens, and the borders of
prompts and of chunks (the tokens that went through the layers together, a whole prefill chunk or one decoded
token). FORMAT.md is the specification of the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from lmpack.errors import ProfileError
from profiles.routing_file import RoutingDescription, RoutingFile, write_routing_file

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from profiles.routing_origin import RoutingOrigin
    from profiles.routing_shape import RoutingShape

_CHECK_TOKENS = 16_384
"""Tokens whose ids are checked at a time, so that the check needs little memory."""


@dataclass(frozen=True, slots=True, eq=False)
class RoutingTrace:
    """The choices of every token; raises ProfileError when the arrays do not fit each other."""

    KIND: ClassVar[str] = "routing_trace"

    shape: RoutingShape
    origin: RoutingOrigin
    topk_ids: NDArray[np.int16]  # [num_tokens, num_layers, top_k], best first
    topk_weights: NDArray[np.float32]  # [num_tokens, num_layers, top_k]
    token_ids: NDArray[np.int32]  # [num_tokens], the tokens that were run, not those they led to
    prompt_offsets: NDArray[np.int64]  # [num_prompts + 1]: prompt i is tokens offsets[i] up to offsets[i + 1]
    prompt_lengths: NDArray[np.int64]  # [num_prompts]: how many of these came from the prompt, not generated
    chunk_offsets: NDArray[np.int64]  # [num_chunks + 1]; every prompt's border is a chunk's border

    def __post_init__(self) -> None:
        """Check dtypes, shapes and ranges."""
        choices = (len(self.token_ids), self.shape.num_layers, self.shape.top_k)
        _check_array("token_ids", self.token_ids, np.int32, (len(self.token_ids),))
        _check_array("topk_ids", self.topk_ids, np.int16, choices)
        _check_array("topk_weights", self.topk_weights, np.float32, choices)
        _check_array("prompt_offsets", self.prompt_offsets, np.int64, (len(self.prompt_offsets),))
        _check_array("prompt_lengths", self.prompt_lengths, np.int64, (len(self.prompt_offsets) - 1,))
        _check_array("chunk_offsets", self.chunk_offsets, np.int64, (len(self.chunk_offsets),))
        if self.num_tokens and self.token_ids.min() < 0:
            raise ProfileError(f"token_ids: expected numbers from 0, got {self.token_ids.min()}")
        _check_offsets("prompt_offsets", self.prompt_offsets, self.num_tokens)
        _check_offsets("chunk_offsets", self.chunk_offsets, self.num_tokens)
        self._check_borders()
        self._check_choices()

    @property
    def num_tokens(self) -> int:
        """How many tokens went through the layers."""
        return len(self.token_ids)

    @property
    def num_prompts(self) -> int:
        """How many prompts they belong to."""
        return len(self.prompt_lengths)

    @property
    def num_chunks(self) -> int:
        """In how many passes they went through the layers."""
        return len(self.chunk_offsets) - 1

    def __eq__(self, other: object) -> bool:
        """Traces are equal when all their values are."""
        if not isinstance(other, RoutingTrace):
            return NotImplemented
        return (self.shape, self.origin) == (other.shape, other.origin) and all(
            np.array_equal(mine, theirs)
            for mine, theirs in zip(self._tensors().values(), other._tensors().values(), strict=True)
        )

    __hash__ = None  # type: ignore[assignment]

    def save(self, path: Path) -> None:
        """Write the trace as a routing file; raises StorageError."""
        totals = {
            "num_tokens": self.num_tokens,
            "num_prompts": self.num_prompts,
            "num_chunks": self.num_chunks,
        }
        write_routing_file(
            path, self.KIND, RoutingDescription(self.shape, self.origin, totals), self._tensors()
        )

    @classmethod
    def load(cls, path: Path) -> RoutingTrace:
        """Read a trace; raises ProfileError naming the file when anything in it is wrong."""
        file = RoutingFile(path, cls.KIND, frozenset({"num_tokens", "num_prompts", "num_chunks"}))
        shape, totals = file.description.shape, file.description.totals
        choices = (totals["num_tokens"], shape.num_layers, shape.top_k)
        tensors = file.read(
            {
                "topk_ids": ("int16", choices),
                "topk_weights": ("float32", choices),
                "token_ids": ("int32", choices[:1]),
                "prompt_offsets": ("int64", (totals["num_prompts"] + 1,)),
                "prompt_lengths": ("int64", (totals["num_prompts"],)),
                "chunk_offsets": ("int64", (totals["num_chunks"] + 1,)),
            }
        )
        try:
            return cls(shape, file.description.origin, **tensors)
        except ProfileError as error:
            raise ProfileError(f"{path}: {error}") from None

    def _tensors(self) -> dict[str, NDArray[np.generic]]:
        return {
            "topk_ids": self.topk_ids,
            "topk_weights": self.topk_weights,
            "token_ids": self.token_ids,
            "prompt_offsets": self.prompt_offsets,
            "prompt_lengths": self.prompt_lengths,
            "chunk_offsets": self.chunk_offsets,
        }

    def _check_borders(self) -> None:
        if not np.isin(self.prompt_offsets, self.chunk_offsets).all():
            raise ProfileError("chunk_offsets: a chunk reaches over the border of two prompts")
        most = np.diff(self.prompt_offsets)
        if ((self.prompt_lengths < 1) | (self.prompt_lengths > most)).any():
            index = int(((self.prompt_lengths < 1) | (self.prompt_lengths > most)).argmax())
            raise ProfileError(
                f"prompt_lengths: prompt {index} has {self.prompt_lengths[index]}, "
                f"expected 1 to its {most[index]} tokens"
            )

    def _check_choices(self) -> None:
        num_experts = np.array(self.shape.num_experts)[:, None]
        for first in range(0, self.num_tokens, _CHECK_TOKENS):
            ids = self.topk_ids[first : first + _CHECK_TOKENS]
            outside = (ids < 0) | (ids >= num_experts)
            if outside.any():
                token, index, rank = np.argwhere(outside)[0]
                raise ProfileError(
                    f"topk_ids: token {first + token} has expert {ids[token, index, rank]} in layer "
                    f"{self.shape.layers[index]}, expected 0 to {self.shape.num_experts[index] - 1}"
                )
            ordered = np.sort(ids, axis=-1)
            twice = (ordered[..., 1:] == ordered[..., :-1]).any(-1)
            if twice.any():
                token, index = np.argwhere(twice)[0]
                raise ProfileError(
                    f"topk_ids: token {first + token} has an expert twice in layer {self.shape.layers[index]}"
                )
            if not np.isfinite(self.topk_weights[first : first + _CHECK_TOKENS]).all():
                raise ProfileError(f"topk_weights: not finite, at token {first} or after")


def _check_array(name: str, array: NDArray[np.generic], dtype: type, shape: tuple[int, ...]) -> None:
    if array.dtype != np.dtype(dtype) or array.shape != shape:
        raise ProfileError(
            f"{name}: expected {np.dtype(dtype)} {list(shape)}, got {array.dtype} {list(array.shape)}"
        )


def _check_offsets(name: str, offsets: NDArray[np.int64], num_tokens: int) -> None:
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != num_tokens or (np.diff(offsets) < 1).any():
        raise ProfileError(f"{name}: expected numbers that rise from 0 to num_tokens, {num_tokens}")

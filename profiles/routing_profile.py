"""Routing profile: which experts a workload uses, as counts that fit in a few megabytes.

Profiles of one model add up (`merge`) and can be compared (`divergence`), whatever quantization each was
recorded with: what must fit are architecture and shape. FORMAT.md is the specification of the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from lmpack.errors import ProfileError
from lmpack.expert_key import ExpertKey
from profiles.routing_counts import RoutingCounts
from profiles.routing_file import RoutingDescription, RoutingFile, write_routing_file
from profiles.routing_shape import RoutingShape

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from lmpack.manifest import Manifest
    from profiles.routing_origin import RoutingOrigin
    from profiles.routing_trace import RoutingTrace


@dataclass(frozen=True, slots=True, eq=False)
class RoutingProfile:
    """Choices per expert and per pair of experts; raises ProfileError when the numbers contradict each other.

    Layers with fewer experts than the widest are padded with zeros. The last token of an answer is chosen but
    never run, so it is not among the tokens.
    """

    KIND: ClassVar[str] = "routing_profile"

    shape: RoutingShape
    origin: RoutingOrigin
    counts: NDArray[np.int64]  # [num_layers, widest]: how many tokens took the expert
    # [num_layers - 1, widest, widest]: how many took one, then another in the next MoE layer
    transitions: NDArray[np.int64]
    num_tokens: int  # that passed through the layers
    num_prompt_tokens: int  # how many of these came from prompts, not generated

    def __post_init__(self) -> None:
        """Check dtypes, shapes, ranges and sums."""
        shape, widest = self.shape, self.shape.widest
        _check_counts("counts", self.counts, (shape.num_layers, widest), self.num_tokens)
        _check_counts(
            "transitions", self.transitions, (shape.num_layers - 1, widest, widest), self.num_tokens
        )
        if not 0 <= self.num_prompt_tokens <= self.num_tokens:
            raise ProfileError(
                f"num_prompt_tokens: expected 0 to num_tokens, {self.num_tokens}, got {self.num_prompt_tokens}"
            )
        if self.counts[shape.padding()].any():
            raise ProfileError("counts: a cell beyond a layer's num_experts is not 0")
        _check_sums("counts", self.counts.sum(1), np.int64(self.num_tokens * shape.top_k))
        _check_sums("transitions", self.transitions.sum(2), self.counts[:-1] * shape.top_k)
        _check_sums("transitions", self.transitions.sum(1), self.counts[1:] * shape.top_k)

    @classmethod
    def from_trace(cls, trace: RoutingTrace) -> RoutingProfile:
        """Count a trace's choices; the same as what was recorded beside it."""
        counted = RoutingCounts(trace.shape)
        counted.add(trace.topk_ids)
        return cls(
            trace.shape,
            trace.origin,
            counted.counts,
            counted.transitions,
            trace.num_tokens,
            int(trace.prompt_lengths.sum()),
        )

    def __eq__(self, other: object) -> bool:
        """Profiles are equal when all their values are."""
        if not isinstance(other, RoutingProfile):
            return NotImplemented
        return (
            (self.shape, self.origin, self.num_tokens, self.num_prompt_tokens)
            == (other.shape, other.origin, other.num_tokens, other.num_prompt_tokens)
            and np.array_equal(self.counts, other.counts)
            and np.array_equal(self.transitions, other.transitions)
        )

    __hash__ = None  # type: ignore[assignment]

    def layer_counts(self, index: int) -> NDArray[np.int64]:
        """Counts [num_experts] of the MoE layer at `index`, without padding."""
        return self.counts[index, : self.shape.num_experts[index]]

    def most_used(self) -> list[ExpertKey]:
        """Every expert that was chosen, the most chosen first; among equals in file order."""
        order = np.argsort(-self.counts, axis=None, kind="stable")
        rows, experts = np.unravel_index(order[: np.count_nonzero(self.counts)], self.counts.shape)
        return [
            ExpertKey(self.shape.layers[row], expert)
            for row, expert in zip(rows.tolist(), experts.tolist(), strict=True)
        ]

    def merge(self, other: RoutingProfile) -> RoutingProfile:
        """Both profiles' choices together; raises ProfileError that says what does not fit."""
        self.require_fit(other.origin.architecture, other.shape, "profiles cannot be merged")
        return RoutingProfile(
            self.shape,
            self.origin.merge(other.origin),
            self.counts + other.counts,
            self.transitions + other.transitions,
            self.num_tokens + other.num_tokens,
            self.num_prompt_tokens + other.num_prompt_tokens,
        )

    def divergence(self, other: RoutingProfile) -> NDArray[np.float64]:
        """Jensen-Shannon divergence of the two profiles' choices, in bits, per MoE layer (Lin 1991).

        0 when both spread their choices alike, 1 when they have no expert in common. Raises ProfileError when
        the profiles do not fit, or one has no tokens.
        """
        self.require_fit(other.origin.architecture, other.shape, "profiles cannot be compared")
        if not self.num_tokens or not other.num_tokens:
            raise ProfileError("profiles cannot be compared: one of them has no tokens")
        mine = self.counts / self.counts.sum(1, keepdims=True)
        theirs = other.counts / other.counts.sum(1, keepdims=True)
        middle = (mine + theirs) / 2
        bits = (_relative_entropy(mine, middle) + _relative_entropy(theirs, middle)) / 2
        return np.clip(bits, 0.0, 1.0)  # rounding may leave it by 1e-16

    def require_fit(self, architecture: str, shape: RoutingShape, complaint: str) -> None:
        """Raise ProfileError, the complaint and then what differs, unless it was recorded with such a model."""
        differences = self.shape.differences(shape)
        if self.origin.architecture != architecture:
            differences.insert(0, f"architecture {self.origin.architecture} and {architecture}")
        if differences:
            raise ProfileError(f"{complaint}: {'; '.join(differences)}")

    def save(self, path: Path) -> None:
        """Write the profile as a routing file; raises StorageError."""
        totals = {"num_tokens": self.num_tokens, "num_prompt_tokens": self.num_prompt_tokens}
        write_routing_file(
            path,
            self.KIND,
            RoutingDescription(self.shape, self.origin, totals),
            {"counts": self.counts, "transitions": self.transitions},
        )

    @classmethod
    def load(cls, path: Path) -> RoutingProfile:
        """Read a profile; raises ProfileError naming the file when anything in it is wrong."""
        file = RoutingFile(path, cls.KIND, frozenset({"num_tokens", "num_prompt_tokens"}))
        shape, totals = file.description.shape, file.description.totals
        tensors = file.read(
            {
                "counts": ("int64", (shape.num_layers, shape.widest)),
                "transitions": ("int64", (shape.num_layers - 1, shape.widest, shape.widest)),
            }
        )
        try:
            return cls(
                shape,
                file.description.origin,
                counts=tensors["counts"],
                transitions=tensors["transitions"],
                num_tokens=totals["num_tokens"],
                num_prompt_tokens=totals["num_prompt_tokens"],
            )
        except ProfileError as error:
            raise ProfileError(f"{path}: {error}") from None

    @classmethod
    def load_for(cls, manifest: Manifest, path: Path) -> RoutingProfile:
        """Read a profile that was recorded with a pack's model; raises ProfileError when it was another's."""
        profile = cls.load(path)
        shape = RoutingShape.of_manifest(manifest)
        profile.require_fit(manifest.architecture, shape, f"{path} is the profile of another model")
        return profile


def _check_counts(name: str, array: NDArray[np.generic], shape: tuple[int, ...], most: int) -> None:
    if array.dtype != np.int64 or array.shape != shape:
        raise ProfileError(f"{name}: expected int64 {list(shape)}, got {array.dtype} {list(array.shape)}")
    if array.size and (array.min() < 0 or array.max() > most):
        raise ProfileError(f"{name}: expected 0 to num_tokens, {most}, got {array.min()} to {array.max()}")


def _check_sums(name: str, sums: NDArray[np.int64], expected: NDArray[np.int64] | np.int64) -> None:
    if (sums != expected).any():
        raise ProfileError(f"{name}: sums do not agree with num_tokens x top_k choices per layer")


def _relative_entropy(some: NDArray[np.float64], other: NDArray[np.float64]) -> NDArray[np.float64]:
    """Kullback-Leibler divergence in bits of each row; `other` is positive where `some` is."""
    ratio = np.divide(some, other, out=np.ones_like(some), where=some > 0)
    bits: NDArray[np.float64] = (some * np.log2(ratio)).sum(1)
    return bits

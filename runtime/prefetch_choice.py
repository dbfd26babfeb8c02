"""Which predictor guesses for a run, by the name that a person gives."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lmpack.errors import UsageError
from profiles.routing_profile import RoutingProfile
from runtime.transition_predictor import TransitionPredictor

if TYPE_CHECKING:
    from lmpack.manifest import Manifest

DEFAULT_PREFETCH = "off"
"""Guesses read more and gained nothing that was beyond doubt; benchmarks/README.md has the figures."""


@dataclass(frozen=True, slots=True)
class PrefetchChoice:
    """`off`, `router` (the next layer's), or `profile` (the transitions of a file)."""

    name: str
    transitions: TransitionPredictor | None = None

    @classmethod
    def parse(cls, text: str, manifest: Manifest) -> PrefetchChoice:
        """From off, router or profile:FILE; raises UsageError, ProfileError for another model's profile."""
        if text in {"off", "router"}:
            return cls(text)
        kind, _, file = text.partition(":")
        if kind != "profile" or not file:
            raise UsageError(f"prefetch {text}: expected off, router or profile:FILE")
        return cls(kind, TransitionPredictor(RoutingProfile.load_for(manifest, Path(file))))

    @property
    def nbytes(self) -> int:
        """Memory that the predictor keeps to itself."""
        return self.transitions.nbytes if self.transitions is not None else 0

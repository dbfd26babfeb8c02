"""Warm start: the experts that a run reads in before its first token."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from profiles.last_session import LastSession
from profiles.routing_profile import RoutingProfile

if TYPE_CHECKING:
    from lmpack.expert_key import ExpertKey
    from lmpack.manifest import Manifest

LAST = "last"


@dataclass(frozen=True, slots=True)
class WarmStart:
    """Where a run begins, and where it leaves word for the next one."""

    keys: tuple[ExpertKey, ...] = ()  # the most used first
    session: LastSession | None = None  # to save at the end

    @classmethod
    def read(cls, warm: str | Path | None, manifest: Manifest) -> WarmStart:
        """From a profile's file, or from the pack's last session ("last"); None starts with nothing.

        Raises ProfileError for a file that is broken or another model's, StorageError for one that cannot be read.
        """
        if warm is None:
            return cls()
        if warm == LAST:
            session = LastSession(manifest)
            return cls(tuple(session.load()), session)
        return cls(tuple(RoutingProfile.load_for(manifest, Path(warm)).most_used()))

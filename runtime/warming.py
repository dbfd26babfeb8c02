"""Reads experts into the page cache ahead of a session, the most used ones first."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from lmpack.drive import read_into
from lmpack.expert_key import ExpertKey
from runtime.expert_files import ExpertFiles
from runtime.expert_readers import NUM_READERS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lmpack.pack import Pack
    from profiles.routing_profile import RoutingProfile

_READ_NBYTES = 1 << 20


def hottest_first(pack: Pack, profile: RoutingProfile | None) -> list[ExpertKey]:
    """A pack's experts, first those that a profile of its model saw used, the most used of them before the others.

    Without one, and behind them: expert 0 of every layer, then expert 1 and so on.
    """
    used = dict.fromkeys(profile.most_used() if profile is not None else ())
    keys = [
        ExpertKey(entry.layer, expert)
        for entry in pack.manifest.layers
        for expert in range(entry.num_experts)
    ]
    others = sorted(set(keys) - used.keys(), key=lambda key: (key.expert, key.layer))
    return [*used, *others]


def file_nbytes(pack: Pack, key: ExpertKey) -> int:
    """How many bytes an expert takes on the drive."""
    return sum(extent.nbytes for extent in pack.expert_extents(key))


def within(pack: Pack, keys: Sequence[ExpertKey], most_nbytes: int) -> list[ExpertKey]:
    """The first of these experts, as many as have room; those that share a file count each."""
    chosen: list[ExpertKey] = []
    for key in keys:
        most_nbytes -= file_nbytes(pack, key)
        if most_nbytes < 0:
            break
        chosen.append(key)
    return chosen


def warm(pack: Pack, keys: Sequence[ExpertKey], progress: Callable[[int], None]) -> None:
    """Read the experts' files through the page cache, several at once; StorageError names the one that fails."""
    files = ExpertFiles(pack)

    def read(key: ExpertKey) -> int:
        scratch, nbytes = memoryview(bytearray(_READ_NBYTES)), 0
        for extent in pack.expert_extents(key):
            with files.open(key, extent) as descriptor:
                for start in range(0, extent.nbytes, _READ_NBYTES):
                    piece = scratch[: extent.nbytes - start]
                    nbytes += read_into(piece, descriptor, extent.offset + start)
        return nbytes

    with ThreadPoolExecutor(NUM_READERS, thread_name_prefix="warm") as threads:
        try:
            for nbytes in threads.map(read, keys):
                progress(nbytes)
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise

"""Jobs: how many threads of one command work at once."""

from __future__ import annotations

import os

from lmpack.errors import UsageError

MAX_JOBS = 64


def reading_jobs(jobs: int | None) -> int:
    """Return jobs, or where it is None one for each core, 1 to 16; raises UsageError unless it is 1 to MAX_JOBS."""
    return _num_jobs(jobs, 1, 16)


def writing_jobs(jobs: int | None) -> int:
    """Do the same with 2 to 8: more do not make a drive write faster."""
    return _num_jobs(jobs, 2, 8)


def _num_jobs(jobs: int | None, least: int, most: int) -> int:
    if jobs is None:
        return min(most, max(least, len(os.sched_getaffinity(0))))
    if not 1 <= jobs <= MAX_JOBS:
        raise UsageError(f"jobs {jobs}: expected 1 to {MAX_JOBS}")
    return jobs

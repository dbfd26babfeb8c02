"""Policy comparison: one trace through several policies, and Belady's bound beside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from profiles.cache_simulation import CacheFigures, simulate, trace_demands
from profiles.policies.belady import Belady

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lmpack.expert_key import ExpertKey
    from profiles.cache_simulation import Simulation
    from profiles.policy_choice import PolicyChoice
    from profiles.routing_trace import RoutingTrace
    from profiles.slot_pool import SlotPool


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """A policy's figures, one per pool."""

    policy: str
    pools: tuple[Simulation, ...]

    @property
    def decode(self) -> CacheFigures:
        """Of single tokens, all pools together."""
        return sum((pool.decode for pool in self.pools), CacheFigures())

    @property
    def total(self) -> CacheFigures:
        """Of single tokens and chunks, all pools together."""
        return sum((pool.total for pool in self.pools), CacheFigures())


def compare_policies(
    trace: RoutingTrace,
    pools: Sequence[SlotPool],
    choices: Sequence[PolicyChoice],
    most_used: Sequence[ExpertKey] = (),
    warm: Sequence[ExpertKey] = (),
) -> Iterator[ComparedRun]:
    """Run Belady's bound and each choice; `most_used` may be pinned, `warm` are resident at the start."""
    demands = [list(trace_demands(trace, pool)) for pool in pools]
    bounds = [Belady(key for demand in of_pool for key in demand.keys) for of_pool in demands]
    for choice in [None, *choices]:
        policies = bounds if choice is None else [choice.make(pool, most_used) for pool in pools]
        yield ComparedRun(
            "belady" if choice is None else choice.name,
            tuple(
                simulate(of_pool, pool, policy, warm)
                for of_pool, pool, policy in zip(demands, pools, policies, strict=True)
            ),
        )

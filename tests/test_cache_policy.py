"""What every cache policy promises, and the order in which each one lets experts go."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmpack.expert_key import ExpertKey
from profiles.cache_policy import LRU, CachePolicy

if TYPE_CHECKING:
    from collections.abc import Callable

POLICIES = [LRU]
KEYS = [ExpertKey(layer, expert) for layer in range(2) for expert in range(5)]


@pytest.fixture(params=POLICIES, ids=lambda policy: policy.name)
def make_policy(request: pytest.FixtureRequest) -> Callable[[], CachePolicy]:
    policy: Callable[[], CachePolicy] = request.param
    return policy


class TestEveryPolicy:
    def test_a_victim_is_resident_and_stays_so_until_it_is_forgotten(
        self, make_policy: Callable[[], CachePolicy]
    ) -> None:
        policy = make_policy()
        for key in KEYS[:3]:
            policy.touch(key)
        assert policy.victim(()) in KEYS[:3]
        assert policy.victim(()) == policy.victim(())

    def test_the_protected_are_never_victims(self, make_policy: Callable[[], CachePolicy]) -> None:
        policy = make_policy()
        for key in KEYS:
            policy.touch(key)
        for spared in KEYS:
            assert policy.victim(set(KEYS) - {spared}) == spared

    def test_without_anybody_to_name_it_says_so(self, make_policy: Callable[[], CachePolicy]) -> None:
        policy = make_policy()
        with pytest.raises(LookupError):
            policy.victim(())
        policy.touch(KEYS[0])
        with pytest.raises(LookupError, match="protected"):
            policy.victim({KEYS[0]})

    def test_the_forgotten_are_gone_until_they_are_touched_again(
        self, make_policy: Callable[[], CachePolicy]
    ) -> None:
        policy = make_policy()
        policy.touch(KEYS[0])
        policy.forget(KEYS[0])
        with pytest.raises(LookupError):
            policy.victim(())
        policy.touch(KEYS[0])
        assert policy.victim(()) == KEYS[0]

    def test_forgetting_a_stranger_is_an_error(self, make_policy: Callable[[], CachePolicy]) -> None:
        with pytest.raises(KeyError):
            make_policy().forget(KEYS[0])

    @given(uses=st.lists(st.sampled_from(KEYS), max_size=60), capacity=st.integers(1, 6))
    def test_the_same_uses_give_the_same_victims_and_all_leave_once(
        self, uses: list[ExpertKey], capacity: int
    ) -> None:
        for make_policy in POLICIES:
            first, second = (_victims(make_policy(), uses, capacity) for _ in range(2))
            assert first == second


def _victims(policy: CachePolicy, uses: list[ExpertKey], capacity: int) -> list[ExpertKey]:
    """Serve the uses with so many places, then let everybody go; return who went, in order."""
    resident: set[ExpertKey] = set()
    gone: list[ExpertKey] = []

    def let_one_go(protected: set[ExpertKey]) -> None:
        victim = policy.victim(protected)
        resident.remove(victim)
        policy.forget(victim)
        gone.append(victim)

    for key in uses:
        if key not in resident and len(resident) == capacity:
            let_one_go({key})
        policy.touch(key)
        resident.add(key)
    while resident:
        let_one_go(set())
    return gone


def test_lru_lets_the_longest_unused_go() -> None:
    policy = LRU()
    a, b, c = KEYS[:3]
    for key in (a, b, c, a):
        policy.touch(key)
    assert policy.victim(()) == b
    assert policy.victim({b}) == c
    policy.forget(b)
    policy.touch(c)
    assert policy.victim(()) == a


@given(uses=st.lists(st.sampled_from(KEYS), max_size=80), capacity=st.integers(1, 6))
def test_lru_agrees_with_a_list_sorted_by_last_use(uses: list[ExpertKey], capacity: int) -> None:
    last_use: dict[ExpertKey, int] = {}
    gone = []
    for now, key in enumerate(uses):
        if key not in last_use and len(last_use) == capacity:
            oldest = min(last_use, key=last_use.__getitem__)
            del last_use[oldest]
            gone.append(oldest)
        last_use[key] = now
    gone += sorted(last_use, key=last_use.__getitem__)
    assert _victims(LRU(), uses, capacity) == gone

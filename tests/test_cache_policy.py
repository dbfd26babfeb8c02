"""What every cache policy promises, and the order in which each one lets experts go."""

from __future__ import annotations

import json
from functools import partial
from math import exp2
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmpack.errors import UsageError
from lmpack.expert_key import ExpertKey
from profiles.policies.belady import Belady
from profiles.policies.layer_shares import LayerShares
from profiles.policies.lfu import LFU
from profiles.policies.lrfu import LRFU
from profiles.policies.lru import LRU
from profiles.policies.pinned import Pinned
from profiles.policies.priority_order import PriorityOrder
from profiles.policy_choice import DEFAULT_POLICY, ORDERS, PolicyChoice
from profiles.slot_pool import SlotPool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from profiles.cache_policy import CachePolicy

NUM_SLOTS = 6
LAYERS = (0, 1)
KEYS = [ExpertKey(layer, expert) for layer in LAYERS for expert in range(5)]
A, B, C, D = KEYS[:4]
NEWCOMER = ExpertKey(1, 9)
CHOICES = [
    PolicyChoice(order, per_layer, pinned)
    for order in ORDERS
    for per_layer in (False, True)
    for pinned in (False, True)
]
GOLDEN = json.loads((Path(__file__).parent / "data" / "cache_hits.json").read_text(encoding="utf-8"))


def make(choice: PolicyChoice, num_slots: int = NUM_SLOTS) -> CachePolicy:
    return choice.make(SlotPool(num_slots, LAYERS), most_used=KEYS[::3])


MAKERS: dict[str, Callable[[], CachePolicy]] = {
    "belady": lambda: Belady(KEYS),
    **{choice.name: partial(make, choice) for choice in CHOICES},
}


@pytest.fixture(params=MAKERS)
def make_policy(request: pytest.FixtureRequest) -> Callable[[], CachePolicy]:
    return MAKERS[request.param]


def touch_all(policy: CachePolicy, keys: Iterable[ExpertKey]) -> CachePolicy:
    for key in keys:
        policy.touch(key)
    return policy


def serve(
    policy: CachePolicy, uses: Iterable[ExpertKey], capacity: int
) -> tuple[list[bool], list[ExpertKey]]:
    """Serve the uses with so many places, then let everybody go: which uses hit, and who went, in order."""
    resident: set[ExpertKey] = set()
    hits: list[bool] = []
    gone: list[ExpertKey] = []

    def let_one_go(newcomer: ExpertKey) -> None:
        victim = policy.victim(newcomer, {newcomer})
        resident.remove(victim)
        policy.forget(victim)
        gone.append(victim)

    for key in uses:
        hits.append(key in resident)
        if key not in resident and len(resident) == capacity:
            let_one_go(key)
        policy.touch(key)
        resident.add(key)
        assert len(policy) == len(resident)
    while resident:
        let_one_go(NEWCOMER)
    return hits, gone


class TestEveryPolicy:
    def test_a_victim_is_resident_and_stays_so_until_it_is_forgotten(
        self, make_policy: Callable[[], CachePolicy]
    ) -> None:
        policy = touch_all(make_policy(), [*KEYS[:3], *KEYS[:3], *KEYS[:3]])
        victim = policy.victim(NEWCOMER, ())
        assert victim in KEYS[:3]
        assert policy.victim(NEWCOMER, ()) == victim
        assert len(policy) == 3

    def test_the_protected_are_never_victims(self, make_policy: Callable[[], CachePolicy]) -> None:
        policy = touch_all(make_policy(), KEYS * 3)
        for spared in KEYS:
            assert policy.victim(NEWCOMER, set(KEYS) - {spared}) == spared

    def test_without_anybody_to_name_it_says_so(self, make_policy: Callable[[], CachePolicy]) -> None:
        policy = make_policy()
        with pytest.raises(LookupError):
            policy.victim(NEWCOMER, ())
        policy.touch(A)
        with pytest.raises(LookupError, match="protected"):
            policy.victim(NEWCOMER, {A})

    def test_the_forgotten_are_gone_until_they_are_touched_again(
        self, make_policy: Callable[[], CachePolicy]
    ) -> None:
        policy = touch_all(make_policy(), [A])
        policy.forget(A)
        assert len(policy) == 0
        with pytest.raises(LookupError):
            policy.victim(NEWCOMER, ())
        policy.touch(A)
        assert policy.victim(NEWCOMER, ()) == A

    @pytest.mark.parametrize("stranger", KEYS[:2], ids=str)
    def test_forgetting_a_stranger_is_an_error(
        self, make_policy: Callable[[], CachePolicy], stranger: ExpertKey
    ) -> None:
        with pytest.raises(KeyError):
            make_policy().forget(stranger)

    def test_its_name_is_what_the_command_line_takes(self, make_policy: Callable[[], CachePolicy]) -> None:
        name = make_policy().name
        assert name == "belady" or PolicyChoice.parse(name).name == name


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.name)
@given(uses=st.lists(st.sampled_from(KEYS), max_size=60), capacity=st.integers(1, NUM_SLOTS))
def test_the_same_uses_have_the_same_hits_and_victims_and_never_more_hits_than_beladys(
    choice: PolicyChoice, uses: list[ExpertKey], capacity: int
) -> None:
    hits, gone = serve(make(choice, capacity), uses, capacity)
    assert (hits, gone) == serve(make(choice, capacity), uses, capacity)
    assert set(gone) == set(uses)
    assert len(gone) == len(uses) - sum(hits)
    assert sum(hits) <= sum(serve(Belady(uses), uses, capacity)[0])


class TestAgainstLibCacheSim:
    """Hit for hit, on a trace of 3,000 requests; see make_cache_golden.py."""

    @pytest.mark.parametrize("capacity", [20, 40, 80])
    @pytest.mark.parametrize("order", ["lru", "lfu", "s3fifo", "belady"])
    def test_the_hits_are_its_hits(self, order: str, capacity: int) -> None:
        assert _our_hits(order, capacity) == _its_hits(order, capacity)

    @pytest.mark.parametrize("capacity", [20, 40, 80])
    def test_slru_has_its_hits_once_both_segments_have_been_turned_over(self, capacity: int) -> None:
        assert _our_hits("slru", capacity)[1000:] == _its_hits("slru", capacity)[1000:]


def _our_hits(order: str, capacity: int) -> list[bool]:
    uses = [ExpertKey(0, number) for number in GOLDEN["trace"]]
    policy = Belady(uses) if order == "belady" else PolicyChoice(order).make(SlotPool(capacity, (0,)))
    return serve(policy, uses, capacity)[0]


def _its_hits(order: str, capacity: int) -> list[bool]:
    bits = f"{int(GOLDEN['hits'][order][str(capacity)], 16):0{len(GOLDEN['trace'])}b}"
    return [bit == "1" for bit in bits]


def test_lru_lets_the_longest_unused_go() -> None:
    policy = touch_all(LRU(), (A, B, C, A))
    assert policy.victim(NEWCOMER, ()) == B
    assert policy.victim(NEWCOMER, {B}) == C
    policy.forget(B)
    policy.touch(C)
    assert policy.victim(NEWCOMER, ()) == A


def test_lfu_lets_the_least_used_go_and_forgets_its_count() -> None:
    policy = touch_all(LFU(), (A, A, B, B, C))
    assert policy.victim(NEWCOMER, {C}) == A  # of two uses both, and the longer unused
    policy.forget(A)
    policy.touch(A)
    policy.touch(C)
    assert policy.victim(NEWCOMER, ()) == A


@given(uses=st.lists(st.sampled_from(KEYS), max_size=60), capacity=st.integers(1, 6))
def test_lrfu_lets_the_lowest_sum_of_decayed_uses_go(uses: list[ExpertKey], capacity: int) -> None:
    half_life = 5.0
    resident: set[ExpertKey] = set()
    gone = []

    def worth(
        now: int, key: ExpertKey
    ) -> float:  # the definition: every use, halved with every half-life since
        return sum(exp2((when - now) / half_life) for when in range(now) if uses[when] == key)

    for now, key in enumerate(uses):
        if key not in resident and len(resident) == capacity:
            lowest = min(sorted(resident), key=partial(worth, now))
            resident.remove(lowest)
            gone.append(lowest)
        resident.add(key)
    assert serve(LRFU(half_life), uses, capacity)[1][: len(gone)] == gone


def test_lrfu_remembers_a_leaver() -> None:
    policy = touch_all(LRFU(half_life=100), (A, A, A, B, B))
    policy.forget(A)
    policy.touch(A)
    assert policy.victim(NEWCOMER, ()) == B


def test_lrfu_counts_for_longer_than_a_float_has_room_for() -> None:
    policy = touch_all(LRFU(half_life=1), [A, *[B] * 3000, C, C, B])
    assert policy.victim(NEWCOMER, ()) == A
    assert policy.victim(NEWCOMER, {A}) == C


class TestLayerShares:
    def test_the_layer_that_has_most_gives_one_up(self) -> None:
        policy = touch_all(LayerShares(SlotPool(4, LAYERS), lambda pool: LRU()), (A, B, C, KEYS[5]))
        assert policy.victim(NEWCOMER, ()) == A
        assert policy.victim(NEWCOMER, {A}) == B

    def test_a_layer_that_has_its_share_gives_up_its_own(self) -> None:
        policy = touch_all(LayerShares(SlotPool(4, LAYERS), lambda pool: LRU()), (A, B, KEYS[5], KEYS[6]))
        assert policy.victim(NEWCOMER, ()) == KEYS[5]
        assert policy.victim(C, ()) == A

    def test_where_all_of_a_layer_are_protected_another_one_gives(self) -> None:
        policy = touch_all(LayerShares(SlotPool(3, LAYERS), lambda pool: LRU()), (A, B, KEYS[5]))
        assert policy.victim(C, {A, B, C}) == KEYS[5]

    def test_among_equals_the_layer_walked_through_last_gives_one_up(self) -> None:
        keys = [ExpertKey(layer, expert) for layer in (2, 5, 8) for expert in range(2)]
        policy = touch_all(LayerShares(SlotPool(6, (2, 5, 8, 9)), lambda pool: LRU()), keys)
        assert policy.victim(ExpertKey(9, 0), ()).layer == 8

    def test_each_layers_policy_is_made_for_its_share(self) -> None:
        seen = []

        def make_policy(pool: SlotPool) -> LRU:
            seen.append(pool)
            return LRU()

        LayerShares(SlotPool(9, (3, 4)), make_policy)
        assert seen == [SlotPool(4, (3,)), SlotPool(4, (4,))]


class TestPinned:
    def test_the_pinned_stay_while_there_are_others(self) -> None:
        policy = touch_all(Pinned([A, B], LRU()), (A, B, C, D, C))
        assert policy.victim(NEWCOMER, ()) == D
        policy.forget(D)
        policy.forget(C)
        assert policy.victim(NEWCOMER, ()) == A

    def test_the_most_used_of_the_pools_layers_take_half_of_its_slots(self) -> None:
        choice = PolicyChoice("lru", pinned=True)
        elsewhere = [ExpertKey(7, expert) for expert in range(9)]
        policy = touch_all(choice.make(SlotPool(4, LAYERS), [*elsewhere, D, C, B, A]), (A, B, C, D))
        order = serve_out(policy)
        assert order == [A, B, C, D]

    def test_without_a_profile_nothing_is_pinned(self) -> None:
        policy = touch_all(PolicyChoice("lru", pinned=True).make(SlotPool(4, LAYERS)), (A, B))
        assert policy.victim(NEWCOMER, ()) == A


def serve_out(policy: CachePolicy) -> list[ExpertKey]:
    """Let everybody go; who went, in order."""
    gone = []
    while len(policy):
        gone.append(policy.victim(NEWCOMER, ()))
        policy.forget(gone[-1])
    return gone


def test_walking_through_the_layers_in_a_circle_global_lru_never_hits_and_the_default_does() -> None:
    layers, top_k = tuple(range(24)), 8
    token = [ExpertKey(layer, expert) for layer in layers for expert in range(top_k)]
    for num_slots in (top_k + 4, len(token) // 4, len(token) // 2, len(token) - top_k):
        pool = SlotPool(num_slots, layers)
        lru, default, best = (
            walk(policy, token, num_slots)
            for policy in (LRU(), DEFAULT_POLICY.make(pool), Belady(token * 20))
        )
        assert lru == 0
        assert default > 0.5 * best


def walk(policy: CachePolicy, token: list[ExpertKey], num_slots: int) -> int:
    """Hits of 20 such tokens, whose experts of one layer are needed together."""
    resident: set[ExpertKey] = set()
    hits = 0
    for layer in [key.layer for key in token[::8]] * 20:
        needed = [key for key in token if key.layer == layer]
        missing = [key for key in needed if key not in resident]
        hits += len(needed) - len(missing)
        touch_all(policy, (key for key in needed if key in resident))
        for key in missing:
            if len(resident) == num_slots:
                victim = policy.victim(key, needed)
                policy.forget(victim)
                resident.remove(victim)
            resident.add(key)
        touch_all(policy, missing)
    return hits


def test_leavers_do_not_pile_up_in_a_priority_order() -> None:
    order = PriorityOrder({A: 0, B: 1})
    order.add(A)  # stays the lowest, so that nobody else is ever at the top
    for _ in range(10_000):
        order.add(B)
        order.remove(B)
    assert order.residents == {A}
    assert len(order._heap) < 100


@pytest.mark.parametrize(
    "text", ["", "mru", "LRU", "layer+pin+lru", "pin+", "pin", "layer", "lru+layer", "+lru"]
)
def test_a_policy_that_there_is_none_of_is_refused_and_the_names_are_listed(text: str) -> None:
    with pytest.raises(UsageError, match=r"lru, lfu, slru, lrfu, s3fifo.*pin\+layer\+lru"):
        PolicyChoice.parse(text)

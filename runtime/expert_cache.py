"""Which experts are resident: a policy decides, a store and its reader threads move."""

from __future__ import annotations

import time
from queue import SimpleQueue
from typing import TYPE_CHECKING

from lmpack.errors import BudgetError
from lmpack.expert_key import ExpertKey
from profiles.policy_choice import DEFAULT_POLICY
from profiles.slot_pool import SlotPool
from runtime.expert_fetch import Fetch
from runtime.expert_guesses import ExpertGuesses
from runtime.expert_readers import NUM_READERS, ExpertReaders, Read
from runtime.layer_residents import LayerResidents

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Sequence

    from profiles.cache_policy import CachePolicy, MakePolicy
    from runtime.expert_bank import ExpertBank
    from runtime.expert_store import ExpertStore
    from runtime.memory_budget import MemoryBudget


class ExpertCache:
    """Keeps as many experts of each layout resident as the store has slots, each in a slot that does not move.

    Called from one thread at a time. `hits` and `misses` count an expert once per fetch that asks for it, a guess
    that is still on its way as a miss; `bytes_asked` is what those experts take, resident or not, `read_s` the seconds
    by `clock` that fetches waited.
    """

    def __init__(
        self,
        store: ExpertStore,
        budget: MemoryBudget,
        make_policy: MakePolicy = DEFAULT_POLICY.make,
        clock: Callable[[], float] = time.perf_counter,
        num_readers: int = NUM_READERS,
    ) -> None:
        """Take over the store, to close it with the cache; each layout of the budget gets a policy of its own."""
        self.store = store
        self.readers = ExpertReaders(store.read, num_readers)
        self.hits = 0
        self.misses = 0
        self.evictions = 0
        self.warmed = 0
        self.bytes_asked = 0
        self.read_s = 0.0
        self._clock = clock
        self._used_nbytes = 0  # read from the drive for experts that were asked for
        self._warming_s = 0.0
        self._open: Fetch | None = None
        self._in_use: tuple[int, Sequence[int]] = (-1, ())  # layer and experts of the last fetch
        self._layers: dict[int, LayerResidents] = {}
        self._guesses: list[ExpertGuesses] = []  # of each layout
        self._policies: list[tuple[SlotPool, CachePolicy]] = []
        self.policy_name = "none"  # of a dense model
        for layout in budget.layouts:
            pool = SlotPool(store.num_slots(layout.layers[0]), layout.layers)
            policy = make_policy(pool)
            guesses = ExpertGuesses(store, self.readers)
            self._policies.append((pool, policy))
            self._guesses.append(guesses)
            self.policy_name = policy.name
            for layer in layout.layers:
                self._layers[layer] = LayerResidents(layer, layout.stride, policy, guesses)

    @property
    def bytes_read(self) -> int:
        """What reads took from the drive, those of guesses included."""
        return self._used_nbytes + sum(guesses.unused_nbytes for guesses in self._guesses)

    @property
    def useful_guesses(self) -> int:
        """How many guesses were asked for."""
        return sum(guesses.useful for guesses in self._guesses)

    @property
    def wasted_guesses(self) -> int:
        """How many guesses were read and went before anybody asked for them."""
        return sum(guesses.wasted for guesses in self._guesses)

    @property
    def drive_s(self) -> float:
        """Seconds during which the drive was read from, those of a warm start aside."""
        return self.readers.busy_s - self._warming_s

    def bank(self, layer: int) -> ExpertBank:
        """The memory that the slots of this layer are in."""
        return self.store.bank(layer)

    def capacity(self, layer: int) -> int:
        """How many experts of this layer can be resident at once."""
        return self.store.num_slots(layer)

    def absent(self, layer: int, experts: Iterable[int]) -> list[int]:
        """Those of these experts of one layer that are not resident, in their order."""
        slots = self._layers[layer].slots
        return [expert for expert in experts if expert not in slots]

    def fetch(self, layer: int, experts: Sequence[int]) -> list[int]:
        """Slots of these experts of one layer, in their order, all resident until the next fetch begins.

        Raises what begin() and Fetch.arrivals() raise.
        """
        fetch = self.begin(layer, experts)
        fetch.wait()
        return fetch.slots

    def begin(self, layer: int, experts: Sequence[int]) -> Fetch:
        """Find a slot for each of these experts of one layer and start to read those that are not resident.

        No expert of the call has to go for another; what arrives stays until the next fetch begins. One fetch at
        a time: one that an error left open is abandoned. The policy hears of the last one first: the experts
        should be in the order of their worth. Raises BudgetError when they are more than `capacity`.
        """
        if self._open is not None:
            self._end(self._open, False)
        residents = self._layers[layer]
        slots, keys, policy = residents.slots, residents.keys, residents.policy
        wanted = dict.fromkeys(experts)
        missing = [expert for expert in wanted if expert not in slots]
        if missing:
            self._check_room(layer, len(wanted))
        self._in_use = (layer, experts)
        self.bytes_asked += len(wanted) * residents.stride
        if residents.guesses:
            missing = [expert for expert in missing if not self._use_guess(residents, expert)]
        for expert in reversed(wanted):
            if expert in slots:
                policy.touch(keys[expert])
        fetch = Fetch(experts, self._end, self._clock)
        if missing:
            fetch.num_hits = len(wanted) - len(missing)
            self._start(fetch, residents, missing, {residents.key(expert) for expert in wanted})
            on_the_way = {read.key.expert: read.slot for read in fetch.reads}
            fetch.missing = [position for position, expert in enumerate(experts) if expert in on_the_way]
            fetch.slots = [
                on_the_way[expert] if expert in on_the_way else slots[expert] for expert in experts
            ]
        else:
            self.hits += len(wanted)
            if residents.guesses:
                residents.guesses.pass_layer(layer)
            fetch.slots = [slots[expert] for expert in experts]
        return fetch

    def prefetch(self, layer: int, experts: Iterable[int]) -> list[Read]:
        """Begin to read experts that may be asked for soon, the likeliest first; no demand waits for a guess.

        They get slots that are free, or those of experts that are neither in use nor among them; when there are no
        more, the rest is not read. An error shows when the expert is asked for.
        """
        residents = self._layers[layer]
        keys = [residents.key(expert) for expert in experts]
        used_layer, used = self._in_use
        protected = {*keys, *(self._layers[used_layer].key(expert) for expert in used)}
        guesses: list[Read] = []
        for key in keys:
            if (
                key.expert in residents.slots
                or key in residents.guesses
                or (layer == used_layer and key.expert in used)
            ):
                continue
            slot = self._spare_slot(residents, key, protected)
            if slot is None:
                break
            guesses.append(residents.guesses.begin(key, slot))
        return guesses

    def warm(self, keys: Sequence[ExpertKey], progress: Callable[[int], None] = lambda _: None) -> None:
        """Before the first fetch, read as many of these experts as fit, the first ones; the first is kept longest.

        `warmed` counts them, and `progress` is told of their bytes. Raises StorageError, which names layer and expert,
        for one that cannot be read.
        """
        for pool, policy in self._policies:
            reads: list[Read] = []
            wakeup: SimpleQueue[None] = SimpleQueue()
            try:
                for key in pool.first_that_fit(keys):
                    slot = self.store.acquire(key)
                    assert slot is not None, "nothing is resident before the first fetch"
                    reads.append(Read(key, slot, wakeup=wakeup))
                    self.readers.start(reads[-1])
                for read in reads:
                    wakeup.get()
                    progress(self._layers[read.key.layer].stride)
                for read in reads:
                    if read.error is not None:
                        raise read.error
            except BaseException:
                self.readers.settle(reads)
                for read in reads:
                    self.store.release(read.key, read.slot)
                raise
            for read in reversed(reads):
                self._layers[read.key.layer].slots[read.key.expert] = read.slot
                policy.touch(self._layers[read.key.layer].key(read.key.expert))
            self.warmed += len(reads)
        self._warming_s = self.readers.busy_s

    def retire(self) -> list[ExpertKey]:
        """Who is resident, the one that its policy would keep longest first; only close() may follow."""
        kept: list[ExpertKey] = []
        for pool, policy in self._policies:
            order: list[ExpertKey] = []
            while len(policy):
                order.append(policy.victim(ExpertKey(pool.layers[0], 0), ()))
                policy.forget(order[-1])
            kept += reversed(order)
        return kept

    def close(self) -> None:
        """Forget everything, join the threads and close the store; a second time does nothing."""
        for residents in self._layers.values():
            residents.slots.clear()
        self.readers.close()
        self.store.close()

    def _check_room(self, layer: int, num_experts: int) -> None:
        if num_experts > self.capacity(layer):
            raise BudgetError(
                f"layer {layer}: {num_experts} experts at once do not fit {self.capacity(layer)} slots; "
                "use more --ram"
            )

    def _start(
        self, fetch: Fetch, residents: LayerResidents, missing: Sequence[int], needed: set[ExpertKey]
    ) -> None:
        """Begin to read the missing experts, or to wait for those that a guess has begun to read."""
        self._open = fetch
        try:
            unguessed = []
            for expert in missing:
                guess = residents.guesses.take(residents.key(expert))
                if guess is None:
                    unguessed.append(expert)
                    continue
                fetch.reads.append(guess)
                self.readers.demand(guess, fetch.wakeup)
            residents.guesses.pass_layer(residents.layer)
            for expert in unguessed:
                key = residents.key(expert)
                fetch.reads.append(Read(key, self._acquire(residents, key, needed), wakeup=fetch.wakeup))
            self.readers.start(*fetch.reads[len(fetch.reads) - len(unguessed) :])
        except BaseException:
            self._end(fetch, False)
            raise

    def _end(self, fetch: Fetch, whole: bool) -> None:
        """Make what a fetch read resident, or give all its slots back; an interrupt may lose one, not give it twice."""
        self.read_s += fetch.waited_s
        reads, fetch.waited_s = fetch.reads, 0.0
        if whole:
            self.hits += fetch.num_hits
            while reads:
                read = reads.pop()  # the last one first
                residents = self._layers[read.key.layer]
                residents.slots[read.key.expert] = read.slot
                residents.policy.touch(read.key)
                self.misses += 1
                self._used_nbytes += read.drive_nbytes
        else:
            fetch.abandoned = True
            self.readers.settle(reads)
            while reads:
                read = reads.pop()
                self.store.release(read.key, read.slot)
        self._open = None

    def _use_guess(self, residents: LayerResidents, expert: int) -> bool:
        """Make a guess resident, if it has been read by now."""
        guess = residents.guesses.take_read(residents.key(expert))
        if guess is not None:
            residents.slots[expert] = guess.slot
            self._used_nbytes += guess.drive_nbytes
        return guess is not None

    def _acquire(self, residents: LayerResidents, key: ExpertKey, needed: Container[ExpertKey]) -> int:
        """A slot; when none is free, guesses in vain go for it, then experts outside of `needed`, then any guess."""
        while (slot := self.store.acquire(key)) is None:
            if not self._make_room(residents, key, needed):
                assert residents.guesses, "the experts of one call fit"
                residents.guesses.drop_oldest()
        return slot

    def _spare_slot(
        self, residents: LayerResidents, key: ExpertKey, protected: Container[ExpertKey]
    ) -> int | None:
        """A slot for a guess; None when only protected experts and guesses that may come true have one."""
        while (slot := self.store.acquire(key)) is None:
            if not self._make_room(residents, key, protected):
                return None
        return slot

    def _make_room(
        self, residents: LayerResidents, newcomer: ExpertKey, protected: Container[ExpertKey]
    ) -> bool:
        """Free one slot without a wait: of a guess in vain, or of the policy's victim."""
        if residents.guesses.drop_passed():
            return True
        try:
            victim = residents.policy.victim(newcomer, protected)
        except LookupError:
            return False
        residents.policy.forget(victim)
        self.store.release(victim, self._layers[victim.layer].slots.pop(victim.expert))
        self.evictions += 1
        return True

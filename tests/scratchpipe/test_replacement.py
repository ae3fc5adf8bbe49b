"""Each policy against a list of what was used when, on random sequences."""

import itertools
import random

import numpy as np
import pytest

from tf_scratchpipe.replacement import LFU, LRU, POLICIES, Random


def slots(*numbers):
    return np.array(numbers, np.int64)


def held(*numbers):
    return lambda asked: np.isin(asked, numbers)


def filled(policy, *batches):
    """A policy for six slots; each batch fills its slots."""
    result = policy(6)
    for number, batch in enumerate(batches, start=1):
        result.fill(slots(*batch), number)
    return result


class Recorded:
    """A policy, and all that it was told: the last use and the number of uses of each slot."""

    def __init__(self, policy, count):
        self.policy = policy(count)
        self.empty = set(range(count))
        self.last = {}
        self.uses = {}
        self.batch = 0

    def fill(self, chosen):
        self.policy.fill(slots(*chosen), self.batch)
        self.empty -= set(chosen)
        for slot in chosen:
            self.last[slot], self.uses[slot] = self.batch, 1

    def use(self, chosen):
        self.policy.use(slots(*chosen), self.batch)
        for slot in chosen:
            self.last[slot] = self.batch
            self.uses[slot] += 1

    def drop(self, chosen):
        self.policy.empty(slots(*chosen))
        self.empty |= set(chosen)
        self.forget(chosen)

    def forget(self, chosen):
        for slot in chosen:
            del self.last[slot], self.uses[slot]

    def grow(self, count):
        self.empty |= set(range(len(self.empty) + len(self.last), count))
        self.policy.grow(count)


def walk(policy, seed, judge):
    """Use, fill, empty, grow and take; `judge` says whether the victims are right."""
    rng = random.Random(seed)
    count = rng.randint(1, 12)
    recorded = Recorded(policy, count)
    taken = 0
    for batch in range(1, 60):
        recorded.batch = batch
        if rng.random() < 0.1:
            recorded.drop(rng.sample(sorted(recorded.last), rng.randint(0, len(recorded.last))))
        occupied = sorted(recorded.last)
        recorded.use(rng.sample(occupied, rng.randint(0, len(occupied) // 2)))
        if rng.random() < 0.05:
            count += rng.randint(0, 4)
            recorded.grow(count)
        kept = set(rng.sample(range(count), rng.randint(0, count)))
        wanted = rng.randint(0, 4)
        victims = recorded.policy.victims(wanted, held(*kept)).tolist()
        candidates = set(recorded.last) - kept
        assert len(set(victims)) == len(victims) == min(wanted, len(candidates))
        assert set(victims) <= candidates
        judge(recorded, victims, candidates - set(victims))
        recorded.forget(victims)
        taken += len(victims)
        # Some of the victims are left empty, as where a plan fails after them.
        recorded.empty |= set(victims)
        into = sorted(recorded.empty)
        chosen = rng.sample(into, rng.randint(0, len(into)))
        recorded.fill(chosen)
        for slot in set(victims) - set(chosen):
            recorded.policy.empty(slots(slot))
    return taken


def oldest_first(recorded, victims, others):
    assert all(recorded.last[v] <= recorded.last[o] for v in victims for o in others)
    assert all(recorded.last[a] <= recorded.last[b] for a, b in itertools.pairwise(victims))


def rarest_first(recorded, victims, others):
    assert all(recorded.uses[v] <= recorded.uses[o] for v in victims for o in others)
    assert all(recorded.uses[a] <= recorded.uses[b] for a, b in itertools.pairwise(victims))


def any_will_do(recorded, victims, others):
    pass


JUDGES = {"lru": oldest_first, "lfu": rarest_first, "random": any_will_do}


@pytest.mark.parametrize("name", POLICIES)
def test_victims_are_the_right_ones_on_random_sequences(name):
    assert sum(walk(POLICIES[name], seed, JUDGES[name]) for seed in range(120)) > 3000


def test_lru_takes_the_slot_whose_last_batch_is_the_longest_ago():
    policy = filled(LRU, (0, 1), (2,), (3,))
    policy.use(slots(0), 4)
    assert policy.victims(3, held()).tolist() == [1, 2, 3]
    assert policy.victims(3, held()).tolist() == [0]


def test_lfu_takes_the_slot_that_the_fewest_batches_used():
    policy = filled(LFU, (0, 1), (2,), (3,))
    for used in [(0, 2), (0, 1, 2), (0,)]:
        policy.use(slots(*used), 4)
    assert policy.victims(4, held()).tolist() == [3, 1, 2, 0]


def test_lfu_takes_the_first_in_line_of_equal_ones():
    policy = filled(LFU, (4,), (2, 5), (0,))
    assert policy.victims(3, held(5)).tolist() == [4, 2, 0]


def test_lfu_counts_anew_when_a_slot_is_filled_again():
    policy = filled(LFU, (0, 1))
    for batch in range(2, 9):
        policy.use(slots(0), batch)
    policy.use(slots(1), 9)
    assert policy.victims(1, held(1)).tolist() == [0]
    policy.fill(slots(0), 10)
    assert policy.victims(1, held()).tolist() == [0]


def test_random_takes_each_slot_with_the_same_chance():
    # 8 of 16 slots may go: 2 are empty, 6 are held. Chi-square with 7 degrees of freedom is above
    # 24.3 once in a thousand.
    draws, free = 4000, [0, 2, 4, 6, 8, 10, 12, 13]
    policy = Random(16, seed=5)
    policy.fill(slots(*range(14)), 1)
    kept = held(1, 3, 5, 7, 9, 11)
    counts = np.zeros(16)
    for _ in range(draws):
        victims = policy.victims(1, kept)
        counts[victims] += 1
        policy.fill(victims, 2)
    expected = draws / len(free)
    assert counts.sum() == counts[free].sum() == draws
    assert ((counts[free] - expected) ** 2 / expected).sum() < 24.3


def test_random_takes_each_pair_with_the_same_chance():
    # 6 slots, 15 pairs: chi-square with 14 degrees of freedom is above 36.1 once in a thousand.
    draws, counts = 4500, dict.fromkeys(itertools.combinations(range(6), 2), 0)
    policy = filled(Random, range(6))
    for _ in range(draws):
        victims = policy.victims(2, held())
        counts[tuple(sorted(victims.tolist()))] += 1
        policy.fill(victims, 2)
    expected = draws / len(counts)
    assert sum((count - expected) ** 2 / expected for count in counts.values()) < 36.1


def test_random_finds_the_one_slot_in_a_thousand_that_may_go():
    policy = Random(5000)
    policy.fill(np.arange(5000), 1)
    assert policy.victims(3, lambda asked: asked != 4321).tolist() == [4321]


def test_random_draws_by_its_seed():
    first, again, other = (
        [policy.fill(np.arange(50), 1), policy.victims(20, held()).tolist()][1]
        for policy in (Random(50, seed=1), Random(50, seed=1), Random(50, seed=2))
    )
    assert first == again != other


# ---- what holds for all ------------------------------------------------------------------------

every_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=list(POLICIES))


@every_policy
def test_nobody_is_taken_where_all_are_held_or_empty(policy):
    assert policy(6).victims(3, held()).size == 0
    assert filled(policy, (0, 1), (2,)).victims(3, held(0, 1, 2)).size == 0


@every_policy
def test_there_may_be_fewer_victims_than_were_asked_for(policy):
    assert sorted(filled(policy, (0, 1), (2,)).victims(9, held(1)).tolist()) == [0, 2]


@every_policy
def test_held_slots_are_passed_over_and_may_be_taken_later(policy):
    one = filled(policy, (0, 1), (2,))
    assert one.victims(1, held(0, 1)).tolist() == [2]
    assert sorted(one.victims(2, held()).tolist()) == [0, 1]


@every_policy
def test_no_victims_are_asked_for_and_nothing_changes(policy):
    one = filled(policy, (0,))
    assert one.victims(0, held()).size == 0
    assert one.victims(1, held()).tolist() == [0]


@every_policy
def test_a_victim_is_out_of_sight_until_it_is_filled(policy):
    one = filled(policy, (0, 1))
    (victim,) = one.victims(1, held()).tolist()
    assert one.victims(2, held()).tolist() == [1 - victim]
    one.fill(slots(victim), 2)
    assert one.victims(2, held()).tolist() == [victim]


@every_policy
def test_victims_that_were_given_back_may_be_taken_again_each_once(policy):
    one = filled(policy, (0, 1), (2, 3), (4,))
    victims = one.victims(3, held())
    one.give_back(victims, 4)
    assert sorted(one.victims(9, held()).tolist()) == [0, 1, 2, 3, 4]
    assert one.victims(9, held()).size == 0


@every_policy
def test_all_may_be_given_back(policy):
    one = filled(policy, (0, 1), (2, 3))
    one.give_back(one.victims(4, held()), 3)
    one.use(slots(3), 4)
    assert sorted(one.victims(3, held(3)).tolist()) == [0, 1, 2]


@every_policy
def test_a_slot_that_was_given_back_and_is_used_by_the_same_batch_is_taken_once(policy):
    one = filled(policy, (0, 1))
    one.give_back(one.victims(2, held()), 2)
    one.use(slots(0), 2)  # Batch 2 needed too many slots. Another one has its number now.
    one.use(slots(1), 3)
    assert sorted(one.victims(2, held()).tolist()) == [0, 1]


@pytest.mark.parametrize("policy", [LRU, LFU])
def test_victims_that_were_given_back_go_before_those_that_were_used_more(policy):
    one = filled(policy, (0, 1, 2))
    one.use(slots(1, 2), 2)
    one.use(slots(2), 3)
    one.give_back(one.victims(1, held()), 4)
    assert one.victims(3, held()).tolist() == [0, 1, 2]


@every_policy
def test_empty_slots_are_not_taken(policy):
    one = filled(policy, (0, 1), (2, 3))
    one.use(slots(0, 2), 3)
    one.empty(slots(1, 2))
    assert sorted(one.victims(9, held()).tolist()) == [0, 3]


@every_policy
def test_a_slot_that_was_emptied_and_filled_is_taken_once(policy):
    one = filled(policy, (0, 1))
    one.empty(slots(0))
    one.fill(slots(0), 2)
    assert sorted(one.victims(9, held()).tolist()) == [0, 1]


@every_policy
def test_slots_that_were_added_are_empty_until_they_are_filled(policy):
    one = filled(policy, (0, 1))
    one.grow(9)
    assert sorted(one.victims(9, held()).tolist()) == [0, 1]
    one.fill(slots(0, 7, 8), 2)
    one.use(slots(8), 3)
    assert sorted(one.victims(9, held(0)).tolist()) == [7, 8]


def test_lru_forgets_old_uses_where_nothing_is_ever_evicted():
    policy = LRU(100)
    policy.fill(np.arange(100), 1)
    longest = 0
    for batch in range(2, 2000):
        policy.use(np.arange(batch % 7, 100, 7), batch)
        policy.fill(slots(), batch)
        longest = max(longest, sum(entry.size for _, entry in policy._log))
        assert len(policy._log) <= 1000
    assert 1000 < longest <= 4 * 100 + 1024
    # And it still knows the order.
    assert set(policy.victims(14, held()).tolist()) == set(range(1993 % 7, 100, 7))


def test_lfu_forgets_nothing_and_keeps_each_slot_once_where_nothing_is_ever_evicted():
    policy = LFU(100)
    policy.fill(np.arange(100), 1)
    for batch in range(2, 300):
        policy.use(np.arange(batch % 7, 100, 7), batch)
        policy.victims(1, lambda asked: np.ones(asked.size, bool))
    in_line = [part for parts in policy._lines.values() for part in parts]
    assert sorted(np.concatenate(in_line).tolist()) == list(range(100))


def test_lru_keeps_no_entries_of_batches_that_use_nothing():
    policy = LRU(4)
    for batch in range(1, 20_000):
        policy.use(slots(), batch)
    assert len(policy._log) < 10_000

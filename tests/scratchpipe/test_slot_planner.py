"""Plans as text on tables of a few rows, and a random walk of the stages against a dictionary."""

import collections
import random

import numpy as np
import pytest

from tf_scratchpipe import invariants
from tf_scratchpipe.errors import TooFewSlotsError
from tf_scratchpipe.plan import BatchPlan
from tf_scratchpipe.planner import FUTURE, PAST, SlotPlanner
from tf_scratchpipe.replacement import POLICIES


def ids(*rows):
    return np.array(rows, np.int64)


def run(planner, batches, **window):
    """Plan batches one after the other, each looked up as it comes, with the ones after it in
    sight."""
    first, plans = planner.batch + 1, []
    for place, batch in enumerate(batches):
        upcoming = [planner.look([ids(*rows)]) for rows in batches[place + 1 :][:FUTURE]]
        plans.append(planner.plan(first + place, planner.look([ids(*batch)]), upcoming, **window))
    return plans


def text(plans):
    return [str(plan) for plan in plans]


def state(planner):
    return planner.hit_map.slot_of.tolist(), planner.hit_map.id_of.tolist()


# ---- plans as text ----------------------------------------------------------------------------


def test_figure_11_second_batch_hits_the_row_that_the_first_one_is_bringing():
    # Nothing was inserted when batch 2 is planned, and the map says what will be.
    first, second = run(SlotPlanner(8000, 4), [(7089, 2021), (3010, 7089)])
    assert str(first) == "batch 1: 0 of 2 hit; fill 7089@0, 2021@1"
    assert str(second) == "batch 2: 1 of 2 hit; fill 3010@2"
    assert second.slots[0].tolist() == [2, 0]


def test_figure_11_batch_5_takes_the_row_that_the_three_batches_before_it_do_not_hold():
    batches = [(7089, 2021), (3010, 7089), (4321, 7089), (3010, 7089), (555, 7089)]
    assert text(run(SlotPlanner(8000, 4), batches)) == [
        "batch 1: 0 of 2 hit; fill 7089@0, 2021@1",
        "batch 2: 1 of 2 hit; fill 3010@2",
        "batch 3: 1 of 2 hit; fill 4321@3",
        "batch 4: 2 of 2 hit",
        "batch 5: 1 of 2 hit; fill 555@1; evict 2021@1",
    ]


def test_free_slots_are_taken_before_victims():
    plans = run(SlotPlanner(10, 3), [(0, 1), (0,), (0,), (0,), (2, 3)])
    assert str(plans[-1]) == "batch 5: 0 of 2 hit; fill 2@2, 3@1; evict 1@1"


@pytest.mark.parametrize(
    ("name", "batch", "expected"),
    [
        ("of misses", (5, 5, 6, 6), "batch 2: 0 of 4 hit; fill 5@2, 6@3"),
        ("of hits", (1, 1, 0, 1), "batch 2: 4 of 4 hit"),
        ("of both", (5, 1, 5, 1), "batch 2: 2 of 4 hit; fill 5@2"),
    ],
)
def test_duplicates_count_as_lookups_and_move_once(name, batch, expected):
    plan = run(SlotPlanner(10, 4), [(0, 1), batch])[1]
    assert str(plan) == expected
    slot_of = dict(zip(batch, plan.slots[0].tolist(), strict=True))
    assert [slot_of[row] for row in batch] == plan.slots[0].tolist()


def test_each_missing_row_comes_once():
    (plan,) = run(SlotPlanner(10, 4), [(9, 2, 9, 7, 2, 0)])
    assert sorted(plan.fill_ids.tolist()) == [0, 2, 7, 9]
    assert plan.fill_slots.tolist() == [0, 1, 2, 3]


def test_an_uncached_row_of_a_batch_is_a_miss_for_each_of_its_lookups():
    (plan,) = run(SlotPlanner(10, 4), [(3, 3, 3)])
    assert (plan.hits, plan.lookups, plan.fill_ids.tolist()) == (0, 3, [3])


def test_arrays_of_any_shape_keep_their_shapes_and_share_their_rows():
    planner = SlotPlanner(10, 6)
    arrays = [np.array([[1, 2], [3, 1]]), ids(), np.array(2), np.array([[[4]], [[1]]])]
    plan = planner.plan(1, planner.look(arrays))
    assert [slots.shape for slots in plan.slots] == [(2, 2), (0,), (), (2, 1, 1)]
    assert plan.lookups == 7
    assert sorted(plan.fill_ids.tolist()) == [1, 2, 3, 4]
    for array, slots in zip(arrays, plan.slots, strict=True):
        assert np.array_equal(planner.hit_map.id_of[slots], array)


def test_an_empty_batch_moves_nothing_and_later_ones_are_planned_as_ever():
    plans = run(SlotPlanner(10, 2), [(1,), (), (1, 2)])
    assert text(plans)[1:] == ["batch 2: 0 of 0 hit", "batch 3: 1 of 2 hit; fill 2@1"]
    assert plans[1].slots[0].shape == (0,)
    assert (plans[1].after_trained, plans[1].after_inserted) == (-1, -1)


def test_a_batch_without_any_array_has_no_slots():
    planner = SlotPlanner(10, 2)
    plan = planner.plan(1, planner.look([]))
    assert (plan.slots, plan.lookups) == ((), 0)


# ---- windows ----------------------------------------------------------------------------------


@pytest.mark.parametrize("distance", [1, 2, 3, 4, 5])
def test_a_row_goes_from_the_fourth_batch_on_without_a_shorter_window(distance):
    plans = run(SlotPlanner(10, 2), [(0, 1), *[(0,)] * (distance - 1), (5,)])
    assert str(plans[-1]).endswith("fill 5@1; evict 1@1" if distance > 1 else "evict 0@0")
    assert plans[-1].past == min(distance - 1, PAST)
    assert plans[-1].after_trained == 1


def test_rows_of_the_three_batches_before_outlive_older_ones_whatever_the_policy():
    for policy in POLICIES.values():
        planner = SlotPlanner(10, 4, replacement=policy)
        plans = run(planner, [(0,), (1,), (2,), (3,), (4,)])
        assert plans[-1].victim_ids.tolist() == [0], policy
        assert (plans[-1].past, plans[-1].after_trained) == (3, 1)


@pytest.mark.parametrize(
    ("name", "upcoming", "victim"),
    [
        ("nothing is known", [], 0),
        ("the next batch needs the oldest row", [(0,)], 1),
        ("the next two need the oldest rows", [(0,), (1,)], 2),
        ("the one after these is not looked at", [(0,), (1,), (2,)], 2),
    ],
)
def test_rows_of_the_two_batches_after_are_held(name, upcoming, victim):
    planner = SlotPlanner(10, 6)
    run(planner, [(0,), (1,), (2,), (3,), (4,), (5,)])
    looks = [planner.look([ids(*rows)]) for rows in upcoming]
    plan = planner.plan(7, planner.look([ids(9)]), looks)
    assert plan.victim_ids.tolist() == [victim]
    assert (plan.past, plan.future) == (3, 2)


# Rows 0, 1, 2, 3 are in slots 0 to 3, from batches 1, 2, 3, 4. Batch 5 needs new rows.
SHORTENED = [
    # new rows, upcoming, victims, past, future, after_trained
    ((9,), [], [0], 3, 2, 1),
    ((9,), [(8,), (0,)], [0], 3, 1, 1),
    ((9,), [(0,)], [0], 3, 0, 1),
    ((9,), [(0,), (8,)], [0], 3, 0, 1),
    ((9, 8), [], [0, 1], 2, 0, 2),
    ((9, 8), [(0,), (1,)], [0, 1], 2, 0, 2),
    ((9, 8, 7), [], [0, 1, 2], 1, 0, 3),
    ((9, 8, 7, 6), [], [0, 1, 2, 3], 0, 0, 4),
    ((3, 8, 7), [], [0, 1], 2, 0, 2),
    ((0, 8), [], [1], 2, 0, 2),
]


@pytest.mark.parametrize(("new", "upcoming", "victims", "past", "future", "trained"), SHORTENED)
def test_a_scarce_window_is_shortened_first_in_the_future_then_in_the_past(
    new, upcoming, victims, past, future, trained
):
    planner = SlotPlanner(10, 4)
    run(planner, [(0,), (1,), (2,), (3,)])
    looks = [planner.look([ids(*rows)]) for rows in upcoming]
    plan = planner.plan(5, planner.look([ids(*new)]), looks)
    assert plan.victim_ids.tolist() == victims
    assert (plan.past, plan.future, plan.after_trained) == (past, future, trained)
    assert plan.after_inserted == -1


def test_collect_waits_for_an_insert_only_where_the_future_was_not_held():
    planner = SlotPlanner(10, 1)
    plans = run(planner, [(0,), (1,), (0,), (0,), (0,)])
    # Batch 2 throws out the row that batch 3 needs: batch 3 must see it back in the host table.
    assert (plans[1].past, plans[1].future, plans[1].after_trained) == (0, 0, 1)
    assert [plan.after_inserted for plan in plans] == [-1, -1, 2, 3, 3]


def test_with_a_full_window_the_waits_are_over_before_collect_comes_to_them():
    rng = np.random.default_rng(0)
    batches = [rng.integers(200, size=5) for _ in range(60)]
    plans = run(SlotPlanner(200, 40), batches)[:-FUTURE]  # The last ones do not see so far.
    assert sum(plan.victim_ids.size for plan in plans) > 100
    for plan in plans:
        assert (plan.past, plan.future) == (PAST, FUTURE)
        assert plan.after_trained < max(plan.batch - PAST, 0)
        assert plan.after_inserted < max(plan.batch - FUTURE, 0)


def test_the_end_of_what_is_in_sight_is_the_end_of_what_is_protected():
    # Nobody said what comes after batch 2, so batch 3 may miss its victims.
    planner = SlotPlanner(10, 1)
    planner.plan(1, planner.look([ids(0)]), past=0)
    planner.plan(2, planner.look([ids(1)]), past=0)
    assert planner.plan(3, planner.look([ids(0)]), past=0).after_inserted == 2


# ---- growth -----------------------------------------------------------------------------------


def test_slots_grow_by_half_until_the_limit_before_the_window_is_shortened():
    plans = run(SlotPlanner(30, 4, most_slots=9), [(0, 1), (2, 3), (4,), (5, 6), (7,), (8, 9)])
    assert [plan.capacity for plan in plans] == [4, 4, 6, 9, 9, 9]
    assert [(plan.past, plan.future) for plan in plans] == [(3, 2)] * 6
    assert str(plans[3]) == "batch 4: 0 of 2 hit; fill 5@5, 6@6"
    assert str(plans[-1]) == "batch 6: 0 of 2 hit; fill 8@8, 9@0; evict 0@0"


def test_slots_grow_to_what_is_needed_where_half_is_too_little():
    (plan,) = run(SlotPlanner(30, 2, most_slots=20), [range(11)])
    assert plan.capacity == 11
    assert plan.fill_slots.tolist() == list(range(11))


def test_victims_outside_the_window_go_before_slots_grow():
    plans = run(SlotPlanner(30, 2, most_slots=20), [(0, 1), (1,), (1,), (1,), (2,)])
    assert plans[-1].victim_ids.tolist() == [0]
    assert plans[-1].capacity == 2


def test_at_the_limit_the_window_is_shortened():
    plans = run(SlotPlanner(30, 2, most_slots=3), [(0, 1), (2,), (3, 4)])
    assert plans[-1].capacity == 3
    assert plans[-1].victim_ids.tolist() == [0, 1]
    assert (plans[-1].past, plans[-1].future) == (1, 0)


# ---- too few slots ----------------------------------------------------------------------------


def test_too_few_slots_is_an_error_that_names_the_number_needed():
    planner = SlotPlanner(10, 3)
    with pytest.raises(TooFewSlotsError, match=r"num_slots=3, but batch 1 needs 5 .*num_slots>=5"):
        planner.plan(1, planner.look([ids(0, 1, 2, 3, 4, 4)]))


def test_a_batch_that_fills_all_slots_is_planned():
    planner = SlotPlanner(10, 3)
    plans = run(planner, [(0, 1, 2), (3, 4, 5), (5, 4, 3, 3)])
    assert text(plans)[1:] == [
        "batch 2: 0 of 3 hit; fill 3@0, 4@1, 5@2; evict 0@0, 1@1, 2@2",
        "batch 3: 4 of 4 hit",
    ]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("name", "before", "failing", "after"),
    [
        ("while slots are free", [(0,)], (1, 2, 3, 4, 5), (6, 7, 8)),
        ("when all are taken", [(0, 1, 2, 3)], (4, 5, 6, 7, 8), (5, 6, 7, 8)),
        ("with hits", [(0, 1, 2)], (0, 1, 2, 7, 8), (0, 1, 7)),
    ],
)
def test_too_few_slots_moves_no_row_and_planning_goes_on(policy, name, before, failing, after):
    planner = SlotPlanner(10, 4, replacement=POLICIES[policy])
    run(planner, before)
    unmoved = state(planner)
    with pytest.raises(TooFewSlotsError):
        planner.plan(2, planner.look([ids(*failing)]))
    assert state(planner) == unmoved
    invariants.check_hit_map(planner)
    plan = planner.plan(3, planner.look([ids(*after)]))
    assert planner.hit_map.id_of[plan.slots[0]].tolist() == list(after)
    invariants.check_hit_map(planner)
    # Nothing has leaked: all slots can still be used at once.
    planner.plan(4, planner.look([ids(0, 2, 4, 6)]))
    assert planner.hit_map.cached()[0].tolist() == planner.hit_map.id_of.tolist()


def test_a_smaller_batch_takes_the_number_of_one_that_needed_too_many_slots():
    planner = SlotPlanner(10, 2)
    run(planner, [(0, 1)])
    with pytest.raises(TooFewSlotsError):
        planner.plan(2, planner.look([ids(0, 1, 2)]))
    plan = planner.plan(2, planner.look([ids(2, 3)]))
    assert plan.victim_ids.tolist() == [0, 1]


@pytest.mark.parametrize("policy", POLICIES)
def test_no_slot_is_taken_twice_after_a_batch_that_needed_too_many_slots(policy):
    planner = SlotPlanner(10, 2, replacement=POLICIES[policy])
    run(planner, [(0, 1)])
    with pytest.raises(TooFewSlotsError):
        planner.plan(2, planner.look([ids(2, 3, 4)]))
    plan = run(planner, [(0,), (1,), (2, 3)])[-1]
    assert sorted(plan.slots[0].tolist()) == [0, 1]
    invariants.check_hit_map(planner)


def test_too_few_slots_because_earlier_batches_must_be_held():
    planner = SlotPlanner(10, 3)
    planner.plan(1, planner.look([ids(0, 1)]), past=0, future=0)
    with pytest.raises(TooFewSlotsError):
        planner.plan(2, planner.look([ids(2, 3, 4, 5)]), past=0, future=0)


# ---- undoing ----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_undo_puts_the_victims_back_and_frees_what_was_free(policy):
    planner = SlotPlanner(10, 3, replacement=POLICIES[policy])
    run(planner, [(0,), (1,)])
    before = state(planner)
    plan = planner.plan(3, planner.look([ids(2, 3, 1)]))
    assert plan.victim_ids.tolist() == [0]
    planner.undo(plan)
    assert state(planner) == before
    invariants.check_hit_map(planner)


@pytest.mark.parametrize("policy", POLICIES)
def test_undo_of_several_plans_in_reverse_restores_the_map_and_planning_goes_on(policy):
    planner = SlotPlanner(10, 4, replacement=POLICIES[policy])
    run(planner, [(0, 1), (2,)])
    before = state(planner)
    plans = run(planner, [(3, 4, 5), (0, 1, 6), (7, 8, 9, 0), (1,), (5, 6, 7)])
    for plan in reversed(plans):
        planner.undo(plan)
    assert state(planner) == before
    (again,) = run(planner, [(9, 8, 1, 2)])
    assert again.hits == 2
    assert planner.hit_map.id_of[again.slots[0]].tolist() == [9, 8, 1, 2]
    invariants.check_hit_map(planner)


def test_after_an_undo_free_slots_are_handed_out_in_the_same_order():
    planner = SlotPlanner(10, 5)
    (first,) = run(planner, [(1, 2, 3)])
    planner.undo(first)
    (again,) = run(planner, [(4, 5, 6, 7)])
    assert str(again) == "batch 2: 0 of 4 hit; fill 4@0, 5@1, 6@2, 7@3"


def test_undo_after_growth_keeps_the_slots():
    planner = SlotPlanner(30, 2, most_slots=10)
    run(planner, [(0, 1)])
    plan = run(planner, [range(2, 9)])[0]
    planner.undo(plan)
    (again,) = run(planner, [range(10, 18)])
    assert planner.slots == again.capacity == 10
    assert sorted(again.fill_slots.tolist()) == list(range(2, 10))


def test_as_inserted_tells_where_rows_are_before_pending_plans_are_carried_out():
    planner = SlotPlanner(10, 2)
    rows = ids(3, 0, 1, 2)
    batches = [(0, 1), (2,), (0, 3), (1,)]
    plans, places = [], [[-1, -1, -1, -1]]
    for number, batch in enumerate(batches, start=1):
        plans.append(planner.plan(number, planner.look([ids(*batch)])))
        places.append(planner.hit_map.lookup(rows).tolist())
    planned = state(planner)
    # Rows 0, 1, 2 and 3 come and go, some twice.
    assert [plan.victim_ids.tolist() for plan in plans] == [[], [0], [1, 2], [0]]
    for inserted in range(len(plans) + 1):
        found = planner.as_inserted(plans[inserted:], rows)
        assert found.tolist() == places[inserted]
        assert state(planner) == planned


# ---- batches looked up ahead of time ----------------------------------------------------------


def test_a_row_that_came_since_it_was_looked_up_is_a_hit():
    planner = SlotPlanner(10, 4)
    one, two = planner.look([ids(7)]), planner.look([ids(7, 8)])
    assert two.slots.tolist() == [-1, -1]
    planner.plan(1, one, [two])
    assert str(planner.plan(2, two)) == "batch 2: 1 of 2 hit; fill 8@1"


def test_a_row_that_went_since_it_was_looked_up_is_a_miss():
    planner = SlotPlanner(10, 2)
    run(planner, [(7, 8)])
    one, two = planner.look([ids(1)]), planner.look([ids(8, 7)])
    assert two.slots.tolist() == [1, 0]
    planner.plan(2, one, [two])
    plan = planner.plan(3, two)
    assert plan.fill_ids.tolist() == [7]
    assert planner.hit_map.id_of[plan.slots[0]].tolist() == [8, 7]
    assert plan.after_inserted == 2


def test_a_row_that_went_and_came_back_elsewhere_is_a_hit_in_its_new_slot():
    planner = SlotPlanner(10, 2)
    run(planner, [(7, 8)])
    stale = planner.look([ids(7)])
    plans = run(planner, [(1, 2), (3, 7)], past=0, future=0)
    assert planner.hit_map.lookup(ids(7)).tolist() != stale.slots.tolist()
    assert plans[-1].fill_ids.tolist() == [3, 7]
    plan = planner.plan(4, stale)
    assert str(plan) == "batch 4: 1 of 1 hit"
    assert plan.slots[0].tolist() == planner.hit_map.lookup(ids(7)).tolist()


def test_a_slot_that_has_another_row_by_now_is_not_mistaken_for_the_old_one():
    planner = SlotPlanner(10, 1)
    run(planner, [(7,)])
    stale = planner.look([ids(7, 7)])
    run(planner, [(8,)])
    plan = planner.plan(3, stale)
    assert str(plan) == "batch 3: 0 of 2 hit; fill 7@0; evict 8@0"


def test_rows_that_came_since_the_look_are_held_for_the_future_where_the_past_does_not_hold_them():
    planner = SlotPlanner(10, 3)
    looks = [planner.look([ids(*rows)]) for rows in [(0, 1), (2,), (3,), (0,)]]
    planner.plan(1, looks[0], looks[1:3], past=0)
    planner.plan(2, looks[1], looks[2:4], past=0)
    # Row 0 came with batch 1, which is out of the window; the look of batch 4 does not know of it.
    plan = planner.plan(3, looks[2], looks[3:], past=0)
    assert plan.victim_ids.tolist() == [1]


# ---- plans are data ---------------------------------------------------------------------------


def test_plans_are_equal_by_value():
    batches = [(0, 1), (2, 3), (4, 0), (5, 1)]
    once, again = run(SlotPlanner(10, 3), batches), run(SlotPlanner(10, 3), batches)
    assert once == again
    assert once[0] != once[1]
    assert once[0] != str(once[0])
    (other,) = run(SlotPlanner(10, 3), [(0, 2)])
    assert other != once[0]


@pytest.mark.parametrize("change", ["slots", "fill_ids", "victim_slots", "after_inserted", "hits"])
def test_plans_that_differ_in_one_place_are_not_equal(change):
    nothing = ids()
    fields = {
        "batch": 1,
        "slots": (ids(0, 1),),
        "fill_ids": ids(5, 6),
        "fill_slots": ids(0, 1),
        "victim_ids": nothing,
        "victim_slots": nothing,
        "past": 3,
        "future": 2,
        "after_trained": -1,
        "after_inserted": -1,
        "capacity": 4,
        "hits": 0,
    }
    changed = {"slots": (ids(0, 1), ids()), "fill_ids": ids(5, 7), "victim_slots": ids(1)}
    assert BatchPlan(**fields) == BatchPlan(**fields)
    assert BatchPlan(**fields) != BatchPlan(**{**fields, change: changed.get(change, 1)})


def test_arrays_of_a_plan_are_read_only():
    plan = run(SlotPlanner(10, 2), [(0, 1), (2, 3)])[1]
    arrays = [*plan.slots, plan.fill_ids, plan.fill_slots, plan.victim_ids, plan.victim_slots]
    assert all(array.size and array.dtype == np.int64 for array in arrays)
    for array in arrays:
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 9


def test_a_plan_does_not_change_when_later_ones_are_made():
    planner = SlotPlanner(10, 3)
    first = run(planner, [(0, 1, 2)])[0]
    before = str(first), [slots.tolist() for slots in first.slots]
    run(planner, [(3, 4, 5), (0, 6), (7, 8, 9)])
    assert (str(first), [slots.tolist() for slots in first.slots]) == before


@pytest.mark.parametrize("policy", POLICIES)
def test_plans_are_the_same_every_time(policy):
    rng = np.random.default_rng(3)
    batches = [rng.integers(40, size=rng.integers(8)) for _ in range(60)]
    planners = [SlotPlanner(40, 12, 16, POLICIES[policy]) for _ in range(2)]
    once, again = (run(planner, batches) for planner in planners)
    assert sum(plan.victim_ids.size for plan in once) > 50
    assert once == again


# ---- the stages, against a dictionary ---------------------------------------------------------

ROWS = 14
PRIME = 2**61 - 1


class Stages:
    """A table of one number a row, cached as the plans say.

    Each stage is at a batch of its own. A stage may take its next batch as soon as the one before
    it is through with that batch and the plan's waits are over; nothing else keeps it.
    """

    def __init__(self, rng, policy):
        self.rng = rng
        most = rng.randint(4, 10)
        slots = rng.choice([most, rng.randint(1, most)])
        self.planner = SlotPlanner(ROWS, slots, most, POLICIES[policy])
        self.most = most
        self.past, self.future = rng.choice([(3, 2), (3, 2), (0, 0), (3, 0), (1, 2), (0, 2)])
        self.host = [1000 + row for row in range(ROWS)]
        self.uncached = dict(enumerate(self.host))
        self.storage = [None] * slots
        self.window = collections.deque()
        self.queues = {stage: collections.deque() for stage in self.STAGES[1:]}
        self.number = self.trained = self.inserted = 0
        self.seen = collections.Counter()

    STAGES = ("plan", "collect", "exchange", "insert", "train")

    def check(self):
        """Whoever asks for a row now, finds it as it was trained last."""
        pending = [
            entry["plan"]
            for stage in ("insert", "exchange", "collect")
            for entry in self.queues[stage]
        ]
        places = self.planner.as_inserted(pending, np.arange(ROWS)).tolist()
        for row, slot in enumerate(places):
            assert (self.storage[slot] if slot >= 0 else self.host[row]) == self.uncached[row]
        assert all(slot < len(self.storage) for slot in places)

    def ready(self, stage):
        if stage == "plan":
            return sum(map(len, self.queues.values())) < 9
        queue = self.queues[stage]
        if stage != "collect" or not queue:
            return bool(queue)
        plan = queue[0]["plan"]
        return self.trained >= plan.after_trained and self.inserted >= plan.after_inserted

    def advance(self, stage):
        getattr(self, stage)(*([self.queues[stage].popleft()] if stage != "plan" else []))

    def draw(self):
        """A batch of two arrays, by choice with duplicates, and seldom with too many rows."""
        most = self.most + 2 if self.rng.random() < 0.03 else self.rng.randint(0, self.most)
        rows = self.rng.sample(range(ROWS), min(most, ROWS))
        if self.rng.random() < 0.7:  # Half of the rows are much wanted.
            rows = [row // 2 if self.rng.random() < 0.6 else row for row in rows]
        rows += self.rng.choices(rows, k=2) if rows else []
        self.rng.shuffle(rows)
        half = len(rows) // 2
        return self.planner.look([ids(*rows[:half]), ids(*rows[half:])])

    def plan(self):
        # A batch is looked up when it comes into sight, and planned when it is its turn.
        while len(self.window) <= self.future:
            self.window.append(self.draw())
        looked = self.window.popleft()
        self.number += 1
        before = state(self.planner)
        last_use = self.planner.window.last_use.copy()
        upcoming = list(self.window)[: self.rng.choice([self.future, self.future, 1])]
        try:
            plan = self.planner.plan(self.number, looked, upcoming, self.past, self.future)
        except TooFewSlotsError:
            assert np.unique(looked.flat).size > self.most
            after = state(self.planner)
            assert after[0] == before[0]
            assert after[1][: len(before[1])] == before[1]
            self.seen["too few"] += 1
            # Its number goes to an empty batch.
            looked = self.planner.look([ids()])
            plan = self.planner.plan(self.number, looked)
        rows = looked.flat.tolist()
        slots = [slot for array in plan.slots for slot in array.tolist()]
        assert plan.hits == sum(before[0][row] >= 0 for row in rows)
        assert plan.fill_ids.size == len({row for row in rows if before[0][row] < 0})
        invariants.check_hit_map(self.planner)
        grown = np.full(plan.capacity - last_use.size, -1, np.int32)
        invariants.check_victims(plan, np.concatenate([last_use, grown]), self.next_use(upcoming))
        self.seen["evicted"] += plan.victim_ids.size
        self.seen["shortened"] += (plan.past, plan.future) != (self.past, self.future)
        self.queues["collect"].append({"plan": plan, "rows": rows, "slots": slots})

    def next_use(self, upcoming):
        return {
            row: self.number + distance
            for distance, later in reversed(list(enumerate(upcoming, 1)))
            for row in later.flat.tolist()
        }

    def collect(self, entry):
        plan = entry["plan"]
        entry["fills"] = [self.host[row] for row in plan.fill_ids]
        entry["victims"] = [self.storage[slot] for slot in plan.victim_slots]
        self.queues["exchange"].append(entry)

    def exchange(self, entry):
        self.queues["insert"].append(entry)

    def insert(self, entry):
        plan = entry["plan"]
        self.storage += [None] * (plan.capacity - len(self.storage))
        for row, value in zip(plan.victim_ids, entry["victims"], strict=True):
            self.host[row] = value
        for slot, value in zip(plan.fill_slots, entry["fills"], strict=True):
            self.storage[slot] = value
        self.inserted = plan.batch
        self.queues["train"].append(entry)

    def train(self, entry):
        number = entry["plan"].batch
        read = [self.storage[slot] for slot in entry["slots"]]
        assert read == [self.uncached[row] for row in entry["rows"]], f"batch {number} reads stale"
        for row, slot in {*zip(entry["rows"], entry["slots"], strict=True)}:
            self.storage[slot] = (self.storage[slot] * 31 + number) % PRIME
            self.uncached[row] = (self.uncached[row] * 31 + number) % PRIME
        self.trained = number
        self.seen["trained"] += 1

    def flush(self):
        """Write all rows back that are in a slot now; they stay there."""
        pending = [e["plan"] for s in ("insert", "exchange", "collect") for e in self.queues[s]]
        for row, slot in enumerate(self.planner.as_inserted(pending, np.arange(ROWS)).tolist()):
            if slot >= 0:
                self.host[row] = self.storage[slot]
        assert self.host == list(self.uncached.values())

    def abandon(self):
        """The pass is over: what was not inserted is taken back, the last plan first, and what was
        not trained never will be."""
        for stage in ("collect", "exchange", "insert"):
            for entry in reversed(self.queues[stage]):
                self.planner.undo(entry["plan"])
                self.seen["undone"] += 1
        self.restart()
        self.trained = self.planner.batch
        self.queues["train"].clear()
        invariants.check_hit_map(self.planner)

    def restart(self):
        for stage in ("collect", "exchange", "insert"):
            self.queues[stage].clear()
        self.window.clear()
        self.number = self.planner.batch
        self.inserted = self.planner.batch


@pytest.mark.parametrize("policy", POLICIES)
def test_whichever_stage_is_late_each_step_reads_what_an_uncached_table_holds(policy):
    seen = collections.Counter()
    for seed in range(40):
        rng = random.Random(f"{policy} {seed}")
        stages = Stages(rng, policy)
        # Some stages are in a hurry, others are late.
        haste = {stage: rng.choice([0.02, 0.3, 1, 5]) for stage in Stages.STAGES}
        for _ in range(250):
            chance = rng.random()
            if chance < 0.01:
                stages.abandon()
            elif chance < 0.03:
                stages.flush()
            else:
                ready = [stage for stage in Stages.STAGES if stages.ready(stage)]
                assert ready, "nobody can go on"
                stages.advance(rng.choices(ready, [haste[stage] for stage in ready])[0])
            stages.check()
        while left := [stage for stage in Stages.STAGES[1:] if stages.queues[stage]]:
            stages.advance(rng.choice([stage for stage in left if stages.ready(stage)]))
            stages.check()
        stages.flush()
        seen += stages.seen
    # The walk has been to the places that it is for.
    assert min(seen[what] for what in ("evicted", "shortened", "trained")) > 500
    assert min(seen[what] for what in ("undone", "too few")) > 30

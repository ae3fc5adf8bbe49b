"""Codes, maps, host tables, drawn rows, checks and counts: the small parts, one by one."""

import numpy as np
import pytest

from tf_scratchpipe import invariants
from tf_scratchpipe.codes import HIGHEST, LOWEST, MAX_SLOTS, SlotCodec
from tf_scratchpipe.errors import BadIdError, check_ids
from tf_scratchpipe.hit_map import HitMap
from tf_scratchpipe.hold_window import HoldWindow
from tf_scratchpipe.host_table import HostTable
from tf_scratchpipe.invariants import HazardError
from tf_scratchpipe.plan import BatchPlan
from tf_scratchpipe.planner import SlotPlanner
from tf_scratchpipe.row_sampler import RowSampler
from tf_scratchpipe.stats import CacheStats


def _slots(codec, codes):
    return (codes.astype(np.int64) - LOWEST) & codec.slot_mask


def _batches(codec, codes):
    return (codes.astype(np.int64) - LOWEST) >> codec.batch_shift


def ids(*rows):
    return np.array(rows, np.int64)


# ---- codes ------------------------------------------------------------------------------------

SIZES = [1, 2, 3, 4, 5, 1000, 1024, 1025, MAX_SLOTS - 1, MAX_SLOTS]


@pytest.mark.parametrize("marks_zero", [False, True])
@pytest.mark.parametrize("slots", SIZES)
def test_slot_and_batch_come_back_from_a_code(slots, marks_zero):
    codec = SlotCodec.for_slots(slots, marks_zero)
    chosen = np.unique([0, slots // 3, slots // 2, slots - 1])
    for batch in (0, 1, codec.cycle - 1, codec.cycle, 12345 * codec.cycle + 3):
        for looked_up in (chosen, np.zeros_like(chosen)):
            codes = codec.encode(looked_up, chosen, batch)
            assert _slots(codec, codes).tolist() == chosen.tolist()
            assert set(_batches(codec, codes).tolist()) == {batch % codec.cycle}


@pytest.mark.parametrize("marks_zero", [False, True])
@pytest.mark.parametrize("slots", SIZES)
def test_codes_fit_int32_and_are_below_every_id_that_a_user_could_mean(slots, marks_zero):
    codec = SlotCodec.for_slots(slots, marks_zero)
    lowest = codec.encode(ids(1), ids(0), 0)
    highest = codec.encode(ids(0), ids(2**codec.slot_bits - 1), codec.cycle - 1)
    assert lowest.tolist() == [LOWEST] == [np.iinfo(np.int32).min]
    assert highest.tolist() == [HIGHEST - 1]
    for codes in (lowest, highest):
        assert _slots(codec, codes.astype(np.int32)).tolist() == _slots(codec, codes).tolist()
        assert _batches(codec, codes.astype(np.int32)).tolist() == _batches(codec, codes).tolist()


def test_an_id_of_zero_leaves_its_mark():
    codec = SlotCodec.for_slots(6, marks_zero=True)
    codes = codec.encode(ids(0, 7, 0, 5), ids(5, 0, 2, 3), batch=9)
    assert ((codes - LOWEST >> codec.slot_bits) & 1).tolist() == [1, 0, 1, 0]
    assert _slots(codec, codes).tolist() == [5, 0, 2, 3]
    plain = SlotCodec.for_slots(6).encode(ids(0, 7), ids(5, 5), batch=9)
    assert plain[0] == plain[1]


@pytest.mark.parametrize(
    ("slots", "marks_zero", "cycle"),
    [(1, False, 2**29), (1024, False, 2**20), (1025, False, 2**19), (1024, True, 2**19)],
)
def test_the_bits_that_slots_leave_count_batches(slots, marks_zero, cycle):
    assert SlotCodec.for_slots(slots, marks_zero).cycle == cycle


@pytest.mark.parametrize("marks_zero", [False, True])
def test_the_most_slots_leave_enough_batch_numbers_for_a_window(marks_zero):
    assert SlotCodec.for_slots(MAX_SLOTS, marks_zero).cycle >= 8


def test_codes_keep_their_shape():
    codec = SlotCodec.for_slots(9)
    codes = codec.encode(np.zeros((2, 3), np.int64), np.arange(6).reshape(2, 3), 1)
    assert _slots(codec, codes).tolist() == [[0, 1, 2], [3, 4, 5]]


# ---- Hit-Map and Hold mask --------------------------------------------------------------------


def test_hit_map_finds_bound_rows_and_no_others():
    hit_map = HitMap(rows=6, slots=4)
    hit_map.bind(ids(5, 2), ids(0, 3))
    assert hit_map.lookup(ids(2, 0, 5, 2)).tolist() == [3, -1, 0, 3]
    assert [part.tolist() for part in hit_map.cached()] == [[5, 2], [0, 3]]
    hit_map.unbind(ids(5), ids(0))
    assert hit_map.lookup(ids(2, 5)).tolist() == [3, -1]
    assert [part.tolist() for part in hit_map.cached()] == [[2], [3]]


def test_hit_map_holds_only_what_is_still_there():
    hit_map = HitMap(rows=6, slots=4)
    hit_map.bind(ids(5, 2), ids(0, 3))
    looked_up = np.array([0, 3, 3, -1, -2], np.int32)
    assert hit_map.holds(ids(5, 2, 5, 4, -1), looked_up).tolist() == [True, True] + [False] * 3


@pytest.mark.parametrize(
    "asked", [[], [4], [4, 4, 4], [4, 1, 4, 0, 1, 4], list(range(6)) * 3, [5, 4, 3, 2, 1, 0]]
)
def test_hit_map_tells_distinct_ids_and_their_places(asked):
    hit_map = HitMap(rows=6, slots=4)
    distinct, places = hit_map.distinct(ids(*asked))
    assert sorted(distinct.tolist()) == sorted(set(asked))
    assert distinct[places].tolist() == asked
    hit_map.unbind(distinct)
    assert (hit_map.slot_of == -1).all()


def test_hit_map_grows_by_empty_slots():
    hit_map = HitMap(rows=6, slots=2)
    hit_map.bind(ids(5, 2), ids(0, 1))
    hit_map.grow(4)
    assert hit_map.slots == 4
    assert hit_map.id_of.tolist() == [5, 2, -1, -1]


@pytest.mark.parametrize(
    ("past", "future", "expected"),
    [
        (0, 0, [0, 0, 0, 0, 1, 0, 0]),
        (1, 0, [0, 0, 0, 1, 1, 0, 0]),
        (3, 0, [0, 1, 1, 1, 1, 0, 0]),
        (4, 0, [1, 1, 1, 1, 1, 0, 0]),
        (0, 1, [1, 0, 0, 0, 1, 1, 0]),
        (0, 2, [1, 1, 0, 0, 1, 1, 1]),
        (3, 2, [1, 1, 1, 1, 1, 1, 1]),
    ],
)
def test_hold_window_is_past_current_and_future(past, future, expected):
    window = HoldWindow(7)
    for batch in range(1, 6):
        window.use(ids(batch - 1), 10 + batch)
    # Slots 5 and 6 hold rows from long ago.
    window.use(ids(5, 6), 1)
    window.foresee(15, [ids(0, 5), ids(1, 6)])
    assert window.held(np.arange(7), 15, past, future).tolist() == [bool(x) for x in expected]


def test_hold_window_keeps_the_nearest_of_several_uses_to_come():
    window = HoldWindow(2)
    window.foresee(1, [ids(0), ids(0, 1), ids(0)])
    assert window.held(ids(0, 1), 1, -9, 1).tolist() == [True, False]


def test_hold_window_does_not_hold_what_was_foreseen_and_is_over():
    window = HoldWindow(1)
    window.use(ids(0), 1)
    window.foresee(1, [ids(0)])
    assert not window.held(ids(0), 2, 0, 2).any()


def test_hold_window_forgets_emptied_slots_and_counts_the_others():
    window = HoldWindow(4)
    window.use(ids(0, 1), 5)
    window.use(ids(2), 8)
    assert [window.in_use(8, past) for past in (0, 2, 3, 99)] == [1, 1, 3, 3]
    window.forget(ids(1))
    assert window.in_use(8, 3) == 2
    window.grow(6)
    window.use(ids(5), 8)
    assert window.in_use(8, 3) == 3
    assert window.held(ids(0, 1, 2, 3, 4, 5), 8, 3, 0).tolist() == [1, 0, 1, 0, 0, 1]


# ---- host tables ------------------------------------------------------------------------------


class Drawn:
    """Rows (10 * id, 10 * id + 1), and who asked for them."""

    def __init__(self):
        self.calls = []

    def rows(self, asked):
        self.calls.append(asked.tolist())
        return (10 * asked[:, None] + np.arange(2)).astype(np.float32)

    def all(self):
        return self.rows(np.arange(6))

    def table(self, lazy):
        return HostTable(6, 2, draw=self.rows) if lazy else HostTable(6, 2, draw_all=self.all)


both = pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "eager"])


@both
def test_a_host_table_gives_rows_in_the_order_asked(lazy):
    table = Drawn().table(lazy)
    assert table.gather(ids(4, 1, 4)).tolist() == [[40, 41], [10, 11], [40, 41]]
    assert table.gather(ids()).shape == (0, 2)
    assert table.gather(ids(0)).dtype == table.dtype == np.float32


@both
def test_a_host_table_fills_the_buffer_it_is_given(lazy):
    buffer = np.zeros((3, 2), np.float32)
    rows = Drawn().table(lazy).gather(ids(4, 1), out=buffer[:2])
    assert np.shares_memory(rows, buffer)
    assert buffer.tolist() == [[40, 41], [10, 11], [0, 0]]


@both
def test_what_was_gathered_is_a_copy(lazy):
    table = Drawn().table(lazy)
    table.gather(ids(4))[:] = 7
    assert table.gather(ids(4)).tolist() == [[40, 41]]


@both
def test_rows_that_were_scattered_come_back_and_others_are_as_drawn(lazy):
    table = Drawn().table(lazy)
    table.scatter(ids(5, 2), np.array([[1, 2], [3, 4]], np.float32))
    assert table.gather(ids(2, 5, 1)).tolist() == [[3, 4], [1, 2], [10, 11]]
    assert table.whole().tolist() == [[0, 1], [10, 11], [3, 4], [30, 31], [40, 41], [1, 2]]


@both
def test_a_whole_table_is_not_a_copy(lazy):
    table = Drawn().table(lazy)
    table.whole()[3] = 9
    assert table.gather(ids(3)).tolist() == [[9, 9]]


@both
def test_assign_overwrites_all_rows_and_copies_them(lazy):
    drawn = Drawn()
    table = drawn.table(lazy)
    values = np.full((6, 2), 8, np.float32)
    table.assign(values)
    values[:] = 0
    assert (table.gather(ids(0, 5)) == 8).all()
    assert (table.whole() == 8).all()
    assert drawn.calls == []
    table.assign(np.zeros((6, 2), np.float64))
    assert table.whole().dtype == np.float32


@both
def test_a_released_table_takes_new_rows(lazy):
    table = Drawn().table(lazy)
    table.gather(ids(1))
    table.release()
    table.assign(np.ones((6, 2), np.float32))
    assert table.gather(ids(1)).tolist() == [[1, 1]]


def test_an_eager_table_is_drawn_once_when_it_is_first_needed():
    drawn = Drawn()
    table = drawn.table(lazy=False)
    assert drawn.calls == []
    table.gather(ids(1))
    table.scatter(ids(2), np.zeros((1, 2), np.float32))
    table.whole()
    assert drawn.calls == [list(range(6))]


def test_an_eager_table_may_be_drawn_read_only():
    values = np.zeros((3, 1), np.float32)
    values.flags.writeable = False
    table = HostTable(3, 1, draw_all=lambda: values)
    table.scatter(ids(1), np.ones((1, 1), np.float32))
    assert table.whole().tolist() == [[0], [1], [0]]
    assert not values.any()


def test_a_lazy_table_draws_each_row_when_it_is_first_needed_and_no_other():
    drawn = Drawn()
    table = drawn.table(lazy=True)
    table.gather(ids(4, 1))
    table.gather(ids(1, 3, 4))
    table.scatter(ids(0), np.zeros((1, 2), np.float32))
    table.gather(ids(0, 1))
    assert [call for call in drawn.calls if call] == [[4, 1], [3]]
    table.whole()
    assert [call for call in drawn.calls if call][2:] == [[2, 5]]


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 2, 4], [2, 2, 2, 5]])
@pytest.mark.parametrize("company", [1, 2, 6])
def test_a_lazy_row_is_the_same_in_any_order_and_company(order, company):
    sampler = RowSampler("normal", 0.0, 1.0, seed=4)

    def table():
        return HostTable(6, 3, draw=lambda rows: sampler.draw(rows, 3))

    one = table()
    for start in range(0, len(order), company):
        one.gather(ids(*order[start : start + company]))
    assert np.array_equal(one.whole(), table().whole())


@pytest.mark.parametrize("value", [0.0, 0.1])
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_a_filled_table_has_one_value_everywhere(value, dtype):
    table = HostTable.filled(4, 3, value, dtype)
    assert table.shape == table.whole().shape == (4, 3)
    assert table.gather(ids(1)).dtype == dtype
    assert (table.whole() == np.dtype(dtype).type(value)).all()
    table.scatter(ids(1), np.ones((1, 3), dtype))
    assert table.gather(ids(0, 1))[:, 0].tolist() == [np.dtype(dtype).type(value), 1]


# ---- drawn rows -------------------------------------------------------------------------------

SAMPLERS = {
    # distribution, first, second: mean and standard deviation, smallest and largest value
    "uniform": (RowSampler("uniform", -0.5, 1.5, 7), 0.5, 2 / 12**0.5, -0.5, 1.5),
    "normal": (RowSampler("normal", 3.0, 0.5, 7), 3.0, 0.5, 0.0, 6.0),
    # A normal distribution cut at two standard deviations has 0.8796 of its deviation.
    "truncated": (RowSampler("truncated_normal", 3.0, 0.5, 7), 3.0, 0.5 * 0.87963, 2.0, 4.0),
    "constant": (RowSampler("constant", 0.25, 0.0, 7), 0.25, 0.0, 0.25, 0.25),
}
every_sampler = pytest.mark.parametrize("name", SAMPLERS)


@every_sampler
def test_drawn_rows_have_the_moments_and_bounds_of_their_distribution(name):
    sampler, mean, deviation, smallest, largest = SAMPLERS[name]
    rows = sampler.draw(np.arange(20_000), 16).astype(np.float64)
    error = deviation / rows.size**0.5
    assert abs(rows.mean() - mean) <= 4 * error
    assert abs(rows.std() - deviation) <= 4 * error
    assert smallest <= rows.min() <= rows.max() <= largest
    # Each column and each row is as good as all: none is constant or shifted.
    assert np.abs(rows.mean(axis=0) - mean).max() <= 5 * deviation / 20_000**0.5
    assert np.abs(rows.mean(axis=1) - mean).max() <= 5 * deviation / 16**0.5


@pytest.mark.parametrize(
    ("name", "at", "share"),
    [("normal", 1.0, 0.6827), ("normal", 2.0, 0.9545), ("truncated", 1.0, 0.6827 / 0.9545)],
)
def test_drawn_rows_have_the_shape_of_a_normal_distribution(name, at, share):
    values = (SAMPLERS[name][0].draw(np.arange(20_000), 16) - 3.0) / 0.5
    # Four standard errors of a share of 320,000 values.
    assert abs((np.abs(values) < at).mean() - share) < 4 * (share * (1 - share) / 320_000) ** 0.5


def test_uniform_values_fill_their_interval_evenly():
    values = RowSampler("uniform", 0.0, 1.0, 7).draw(np.arange(10_000), 16)
    counts = np.histogram(values, bins=50, range=(0, 1))[0]
    # Chi-square with 49 degrees of freedom is above 85.4 once in a thousand.
    assert ((counts - 3200) ** 2 / 3200).sum() < 85.4


@every_sampler
def test_a_drawn_row_depends_on_nothing_but_its_id(name):
    sampler = SAMPLERS[name][0]
    everything = sampler.draw(np.arange(50), 6)
    assert everything.dtype == np.float32
    order = ids(40, 3, 3, 0, 49)
    assert np.array_equal(sampler.draw(order, 6), everything[order])
    for row in (0, 17, 49):
        assert np.array_equal(sampler.draw(ids(row), 6), everything[[row]])
    assert sampler.draw(ids(), 6).shape == (0, 6)


@pytest.mark.parametrize("name", ["uniform", "normal", "truncated"])
@pytest.mark.parametrize("seed", [8, 0, -1, 2**63])
def test_another_seed_gives_unrelated_values(name, seed):
    sampler, mean, *_ = SAMPLERS[name]
    other = RowSampler(sampler.distribution, sampler.first, sampler.second, seed)
    one, two = (s.draw(np.arange(4000), 4).ravel() - mean for s in (sampler, other))
    assert not np.isclose(one, two).mean() > 0.01
    assert abs(np.corrcoef(one, two)[0, 1]) < 4 / 16_000**0.5
    again = RowSampler(sampler.distribution, sampler.first, sampler.second, seed)
    assert np.array_equal(again.draw(np.arange(9), 4), other.draw(np.arange(9), 4))


@pytest.mark.parametrize("name", ["uniform", "normal", "truncated"])
def test_neighbours_are_unrelated(name):
    sampler, mean, *_ = SAMPLERS[name]
    rows = sampler.draw(np.arange(16_001), 2) - mean
    assert abs(np.corrcoef(rows[:-1, 0], rows[1:, 0])[0, 1]) < 4 / 16_000**0.5
    assert abs(np.corrcoef(rows[:, 0], rows[:, 1])[0, 1]) < 4 / 16_000**0.5


def test_rows_of_very_large_tables_differ():
    rows = RowSampler("uniform", 0.0, 1.0, 7).draw(ids(0, 2**31, 2**40, 2**40 + 1), 128)
    assert np.unique(rows, axis=0).shape == (4, 128)


# ---- bad ids ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "given", "shown"),
    [
        ("negative", np.array([3, -1, 5]), "1 bad ids in feature 'f' in batch 7, among them -1,"),
        ("too large", np.array([[10], [11], [9]]), "2 bad ids .* among them 10, 11,"),
        ("one too large", np.array(10), "1 bad ids .* among them 10,"),
        ("not a number", np.array([np.nan, 1.0, np.nan]), "2 bad ids .* among them nan,"),
        ("infinite", np.array([np.inf, -np.inf]), "2 bad ids .* among them inf, -inf,"),
        ("half", np.array([1.5, 2.0]), "1 bad ids .* among them 1.5,"),
        ("half in float16", np.array([1.5, 2.0], np.float16), "1 bad ids .* among them 1.5,"),
        ("negative float", np.array([-2.0]), "1 bad ids .* among them -2.0,"),
        ("beyond int64", np.array([2**63, 1], np.uint64), f"1 bad ids .* among them {2**63},"),
        ("float beyond int64", np.array([1e300]), "1 bad ids .* among them 1e\\+300,"),
        ("uint8", np.array([255, 9], np.uint8), "1 bad ids .* among them 255,"),
        ("int8", np.array([-128, 9], np.int8), "1 bad ids .* among them -128,"),
        ("a code", np.array([LOWEST], np.int32), f"1 bad ids .* among them {LOWEST},"),
        ("many", np.arange(10, 99), "89 bad ids .* among them 10, 11, 12, 13, 14, with"),
        ("the same", np.array([-1, -1, 12]), "3 bad ids .* among them -1, 12, with"),
    ],
)
def test_bad_ids_are_named_with_table_feature_batch_and_value(name, given, shown):
    with pytest.raises(BadIdError, match=f"layer 't' .*{shown}.*input_dim=10"):
        check_ids(given, 10, "t", "f", 7)


def test_bad_ids_without_a_known_batch_are_named_without_it():
    with pytest.raises(BadIdError, match=r"1 bad ids in feature 'f', among them 10, with"):
        check_ids(ids(10), 10, "t", "f", None)


@pytest.mark.parametrize(
    "given",
    [np.array([True, False]), np.array(["a", "1"]), np.array([b"1"]), np.array([1 + 0j]), "object"],
)
def test_ids_that_are_no_numbers_are_refused(given):
    given = np.array([1, None], object) if isinstance(given, str) else given
    with pytest.raises(BadIdError, match=r"must be numbers\. Received: dtype="):
        check_ids(given, 10, "t", "f", 7)


@pytest.mark.parametrize(
    "dtype", ["int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32"]
)
def test_row_numbers_of_any_dtype_are_right(dtype):
    check_ids(np.array([[0, 9], [3, 3]], dtype), 10, "t", "f", 1)
    check_ids(np.array([0, 100], dtype), 10_000_000, "t", "f", 1)
    check_ids(np.zeros((0, 3), dtype), 10, "t", "f", 1)


# ---- invariants -------------------------------------------------------------------------------


def planner_with_four_rows():
    planner = SlotPlanner(10, 6)
    for batch in range(1, 5):
        planner.plan(batch, planner.look([ids(batch)]))
    return planner


def test_a_sound_map_passes():
    invariants.check_hit_map(planner_with_four_rows())


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("two slots hold one row", lambda m: m.id_of.put(5, 2), "hold the same row"),
        ("a slot has another row", lambda m: m.id_of.put(0, 7), "hold the same row"),
        ("two rows in one slot", lambda m: m.slot_of.put(7, 0), "does not hold the row"),
        ("a row in an empty slot", lambda m: m.slot_of.put(7, 5), "does not hold the row"),
        ("a mark that was left behind", lambda m: m.slot_of.put(7, -2), "does not hold the row"),
    ],
)
def test_a_broken_map_is_noticed(name, damage, message):
    planner = planner_with_four_rows()
    damage(planner.hit_map)
    with pytest.raises(HazardError, match=message):
        invariants.check_hit_map(planner)


def evicting(**changes):
    """Batch 9 has rows 7, 5, 6 in slots 0, 1, 2 and takes slots 1 and 2 from rows 1 and 2."""
    fields = {
        "batch": 9,
        "slots": (ids(0, 1), np.array([[2]])),
        "fill_ids": ids(5, 6),
        "fill_slots": ids(1, 2),
        "victim_ids": ids(1, 2),
        "victim_slots": ids(1, 2),
        "past": 3,
        "future": 2,
        "after_trained": 5,
        "after_inserted": -1,
        "capacity": 4,
        "hits": 1,
    }
    return BatchPlan(**{**fields, **changes})


LAST_USE = np.array([8, 5, 2, -1], np.int32)


@pytest.mark.parametrize(
    ("name", "plan", "next_use"),
    [
        ("by nobody", evicting(), {}),
        ("after the window", evicting(), {1: 12, 2: 99}),
        ("in the part that was given up", evicting(future=1), {1: 11}),
        ("in the past that was given up", evicting(past=2), {}),
    ],
)
def test_victims_that_are_not_held_pass(name, plan, next_use):
    invariants.check_victims(plan, LAST_USE, next_use)


@pytest.mark.parametrize(
    ("name", "plan", "next_use", "message"),
    [
        ("held by the past", evicting(past=4), {}, "Batch 9 evicts a row that an earlier batch"),
        ("held by the next", evicting(), {2: 10}, "Batch 9 evicts row 2, which is needed next"),
        ("held by the last", evicting(), {1: 11}, "Batch 9 evicts row 1, which is needed next"),
        ("not used", evicting(slots=(ids(0, 1),)), {}, "takes a slot twice, or one that it does"),
        (
            "taken twice",
            evicting(fill_slots=ids(1, 1), victim_slots=ids(1, 1), slots=(ids(0, 1, 1),)),
            {},
            "Batch 9 takes a slot twice",
        ),
    ],
)
def test_held_victims_are_noticed(name, plan, next_use, message):
    with pytest.raises(HazardError, match=message):
        invariants.check_victims(plan, LAST_USE, next_use)


def test_stale_rows_are_noticed_and_named():
    uncached = np.arange(8, dtype=np.float32).reshape(4, 2)
    rows = ids(30, 10, 20, 10)
    invariants.check_rows(3, "items", rows, uncached.copy(), uncached)
    gathered = uncached.copy()
    gathered[[1, 3], 1] += 1e-6
    with pytest.raises(HazardError, match=r"Batch 3 of layer 'items' .* \[10\] .* 2 lookups"):
        invariants.check_rows(3, "items", rows, gathered, uncached)


def test_rows_that_are_no_longer_numbers_are_nobodys_fault():
    uncached = np.array([[1, np.nan], [2, 3]], np.float32)
    invariants.check_rows(1, "items", ids(0, 1), uncached.copy(), uncached)
    with pytest.raises(HazardError, match=r"\[1\]"):
        invariants.check_rows(1, "items", ids(0, 1), np.full((2, 2), np.nan), uncached)


# ---- counts -----------------------------------------------------------------------------------


def counted():
    stats = CacheStats(train_lookups=6, train_hits=5, held=3)
    stats.count(evicting(), row_bytes=2**19, whole=(3, 2))
    stats.count(
        evicting(past=1, future=0, victim_ids=ids(2), victim_slots=ids(2), capacity=2000),
        row_bytes=2**19,
        whole=(3, 2),
    )
    return stats


def test_counts_add_up():
    stats = counted()
    assert (stats.batches, stats.lookups, stats.hits, stats.misses) == (2, 6, 2, 4)
    assert (stats.fills, stats.evictions) == (4, 3)
    assert (stats.slots, stats.shortened) == (2000, 1)
    assert (stats.bytes_to_device, stats.bytes_to_host) == (4 * 2**19, 3 * 2**19)
    assert (stats.hit_rate, stats.train_hit_rate) == (2 / 6, 5 / 6)


@pytest.mark.parametrize(
    ("past", "future", "shortened"), [(3, 2, 0), (3, 1, 1), (2, 2, 1), (0, 0, 1)]
)
def test_a_window_is_shortened_if_it_is_not_whole(past, future, shortened):
    stats = CacheStats()
    stats.count(evicting(past=past, future=future), row_bytes=4, whole=(3, 2))
    assert stats.shortened == shortened


def test_rates_of_nothing_are_zero():
    assert (CacheStats().hit_rate, CacheStats().train_hit_rate) == (0.0, 0.0)


def test_times_add_up_by_stage_and_by_pair():
    stats, other = CacheStats(), CacheStats()
    stats.spent("plan", 1.0)
    stats.spent("plan", 0.5)
    stats.waited("collect", "train", 2.0)
    stats.waited("collect", "train", 0.25)
    stats.waited("collect", "insert", 1.0)
    assert stats.stage_seconds["plan"] == 1.5
    assert stats.wait_seconds == {("collect", "train"): 2.25, ("collect", "insert"): 1.0}
    assert other == CacheStats()


def test_stats_print_as_text():
    stats = counted()
    stats.spent("collect", 0.125)
    stats.waited("train", "insert", 1.5)
    stats.waited("plan", "load", 0.5)
    assert str(stats).splitlines() == [
        "batches     2",
        "lookups     6",
        "  at plan   2 hits (33.3%), 4 misses",
        "  at train  5 hits (83.3% of 6)",
        "rows        4 filled, 3 evicted",
        "slots       2,000, of which held 3; window shortened for 1 batches",
        "transfers   2.0 MiB to the device, 1.5 MiB to the host",
        "stages      load 0.00 s, plan 0.00 s, collect 0.12 s, exchange 0.00 s, insert 0.00 s",
        "waited      train for insert 1.50 s, plan for load 0.50 s",
    ]
    assert str(CacheStats()).endswith("waited      nobody")

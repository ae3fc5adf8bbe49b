"""Slots of many tables are one number, and small tables are on the device as a whole."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_scratchpipe import ScratchPipeEmbedding, TooFewSlotsError, lookahead
from tf_scratchpipe.slot_budget import Demand, SlotBudget
from tf_scratchpipe.whole_planner import WholePlanner

# ---- the division -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("total", "demands", "expected"),
    [
        (102, [Demand(10, 1000), Demand(30, 1000)], [26, 76]),
        # A small table gets all its rows, the others what it leaves.
        (100, [Demand(10, 5), Demand(10, 1000), Demand(10, 1000)], [5, 48, 47]),
        (102, [Demand(10, 1000, 40), Demand(20, 1000), Demand(40, 1000)], [40, 21, 41]),
        (100, [Demand(1, 3), Demand(5, 4)], [3, 4]),
        # What a batch cannot do without comes first.
        (40, [Demand(70, 900, least=30), Demand(7, 9, least=4)], [36, 4]),
        (34, [Demand(70, 900, least=30), Demand(7, 9, least=4)], [30, 4]),
        (3, [Demand(7, 9), Demand(7, 9), Demand(7, 9)], [1, 1, 1]),
    ],
)
def test_slots_are_divided_by_need(total, demands, expected):
    assert SlotBudget(total).divide(demands) == expected


def test_all_slots_are_given_out_and_no_table_has_more_than_rows():
    rng = np.random.default_rng(0)
    for _ in range(300):
        count = int(rng.integers(1, 27))
        rows = (10 ** rng.uniform(0, 6, count)).astype(int) + 1
        needs = np.minimum((10 ** rng.uniform(0, 5, count)).astype(int), rows)
        total = int(rng.integers(count, 200_000))
        demands = [Demand(int(n), int(r)) for n, r in zip(needs, rows, strict=True)]
        slots = np.array(SlotBudget(total).divide(demands))
        assert slots.sum() == min(total, rows.sum())
        assert (slots >= 1).all()
        assert (slots <= rows).all()


def test_a_division_is_kept_until_another_is_asked_for():
    budget = SlotBudget(102)
    first = budget.divided([Demand(10, 1000), Demand(30, 1000)])
    assert budget.divided([Demand(30, 1000), Demand(10, 1000)]) == first == [26, 76]
    assert budget.divide([Demand(30, 1000), Demand(10, 1000)]) == [76, 26]
    assert budget.divided([Demand(1, 1000), Demand(1, 1000)]) == [76, 26]


def test_less_than_a_batch_needs_is_an_error():
    demands = [Demand(5, 9, 10), Demand(5, 9, least=3), Demand(5, 9, least=2)]
    with pytest.raises(
        TooFewSlotsError, match=r"num_slots=14 for 3 tables.*num_slots>=15, and.*20"
    ):
        SlotBudget(14).divide(demands)


# ---- whole tables -----------------------------------------------------------------------------


def test_a_whole_table_comes_in_with_the_first_batch_and_stays():
    planner = WholePlanner(4)
    batches = [planner.look([np.array(ids)]) for ids in ([[3, 1]], [[0, 0]])]
    plans = [planner.plan(n, batch) for n, batch in enumerate(batches, start=1)]
    assert str(plans[0]) == "batch 1: 0 of 2 hit; fill 0@0, 1@1, 2@2, 3@3"
    assert str(plans[1]) == "batch 2: 2 of 2 hit"
    np.testing.assert_array_equal(plans[0].slots[0], [[3, 1]])
    assert planner.held(3) == 4


def test_a_whole_table_comes_in_again_if_the_first_plan_is_taken_back():
    planner = WholePlanner(3)
    plans = [planner.plan(n, planner.look([np.array([1])])) for n in (1, 2)]
    for plan in reversed(plans):
        planner.undo(plan)
    assert planner.hit_map.cached()[0].size == 0
    assert planner.plan(3, planner.look([np.array([1])])).fill_ids.size == 3


# ---- training ---------------------------------------------------------------------------------

RNG = np.random.default_rng(0)
BATCH = 16
ROWS = (3, 400, 20, 900, 7, 60)


def _model(rows=ROWS, mode="pipelined", optimizer="adagrad", **slots):
    inputs, found = {}, []
    for number, count in enumerate(rows):
        name = f"f{number}"
        inputs[name] = keras.Input((), dtype="int32", name=name)
        layer = ScratchPipeEmbedding(
            count,
            4,
            mode=mode,
            num_slots=slots.get(name),
            embeddings_initializer=keras.initializers.RandomUniform(seed=number),
            name=f"table{number}",
        )
        found.append(layer(inputs[name]))
    kernel = keras.initializers.GlorotUniform(seed=1)
    dense = keras.layers.Dense(1, kernel_initializer=kernel)
    model = keras.Model(inputs, dense(keras.layers.concatenate(found)))
    model.compile(optimizer, "mse")
    return model


def _data(rows=ROWS, batches=12, seed=0, narrow=()):
    rng = np.random.default_rng(seed)
    count = BATCH * batches
    features = {
        f"f{n}": rng.integers(0, min(size, 3) if n in narrow else size, count).astype("int32")
        for n, size in enumerate(rows)
    }
    targets = rng.random((count, 1)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((features, targets)).batch(BATCH)


def _layers(model):
    return [one for one in model.layers if isinstance(one, ScratchPipeEmbedding)]


def _slots(model):
    return [layer.stats().slots for layer in _layers(model)]


def _assert_same_tables(model, other):
    for one, two in zip(_layers(model), _layers(other), strict=True):
        np.testing.assert_array_equal(one.get_table(), two.get_table())
    for one, two in zip(
        model.layers[-1].get_weights(), other.layers[-1].get_weights(), strict=True
    ):
        np.testing.assert_array_equal(one, two)


def test_one_pipeline_serves_all_tables_from_one_number_of_slots():
    model, plain = _model(), _model(mode="host")
    data = _data()
    model.fit(data.apply(lookahead(model, num_slots=300, debug=True)), epochs=2, verbose=0)
    plain.fit(data, epochs=2, verbose=0)
    _assert_same_tables(model, plain)
    slots = _slots(model)
    assert sum(slots) == 300
    assert [slots[n] for n in (0, 2, 4, 5)] == [3, 20, 7, 60]
    assert [layer.stats().whole for layer in _layers(model)] == [
        n in (0, 2, 4, 5) for n in range(6)
    ]
    assert all(_layers(model)[n].stats().evictions > 0 for n in (1, 3))


@pytest.mark.slow
def test_as_many_tables_as_criteo_has():
    rows = tuple(int(n) for n in np.geomspace(3, 5000, 26))
    model, plain = _model(rows), _model(rows, mode="host")
    data = _data(rows, batches=8)
    model.fit(data.apply(lookahead(model, num_slots=1500)), verbose=0)
    plain.fit(data, verbose=0)
    _assert_same_tables(model, plain)
    assert sum(_slots(model)) == 1500


def test_layers_with_slots_of_their_own_keep_them():
    model = _model(f1=70)
    model.fit(_data().apply(lookahead(model, num_slots=300)), verbose=0)
    assert _slots(model)[1] == 70
    assert sum(_slots(model)) == 300


@pytest.mark.filterwarnings("ignore:.*plain ids")
def test_tables_that_were_trained_before_are_divided_too():
    model, plain = _model(), _model(mode="host")
    data = _data()
    model.fit(data, verbose=0)
    model.fit(data.apply(lookahead(model, num_slots=200)), verbose=0)
    assert sum(_slots(model)) <= 200
    plain.fit(data, epochs=2, verbose=0)
    _assert_same_tables(model, plain)


def test_a_small_table_says_that_it_is_pinned(caplog):
    with caplog.at_level(logging.INFO, logger="tf_scratchpipe"):
        model = _model((9, 800))
        model.fit(_data((9, 800)).apply(lookahead(model, num_slots=200)), verbose=0)
    small, large = _layers(model)
    assert "All 9 rows of 'table0' are on the device for good." in caplog.text
    assert "table1" not in caplog.text
    assert "9, the whole table: pinned on the device" in str(small.stats())
    assert "pinned" not in str(large.stats())
    assert small.stats().fills == 9
    assert small.stats().evictions == 0


def test_a_pass_that_is_left_in_its_first_batches_leaves_pinned_tables_right():
    model, plain = _model(), _model(mode="host")
    data = _data()
    planned = data.apply(lookahead(model, num_slots=300))
    before = [layer.get_table() for layer in _layers(model)]
    for _ in range(2):
        next(iter(planned))
    for layer, table in zip(_layers(model), before, strict=True):
        np.testing.assert_array_equal(layer.get_table(), table)
    model.fit(planned, verbose=0)
    plain.fit(data, verbose=0)
    _assert_same_tables(model, plain)


@pytest.mark.filterwarnings("ignore:.*too few to hold")
def test_slots_are_divided_anew_when_a_table_has_had_too_few():
    rows = (2000, 2000)
    first, later = _data(rows, narrow=(0,)), _data(rows, seed=1, narrow=(1,))
    model, plain = _model(rows), _model(rows, mode="host")
    apply = lookahead(model, num_slots=120)
    # The iterators of one dataset are its passes.
    switch = tf.Variable(0)
    data = tf.data.Dataset.range(1).flat_map(
        lambda _: tf.data.Dataset.zip(first, later).map(
            lambda a, b: tf.cond(switch > 0, lambda: b, lambda: a)
        )
    )
    planned = data.apply(tf.data.experimental.assert_cardinality(12)).apply(apply)
    model.fit(planned, verbose=0)
    plain.fit(data, verbose=0)
    divided = _slots(model)
    switch.assign(1)
    for _ in range(3):
        model.fit(planned, verbose=0)
        plain.fit(data, verbose=0)
    assert divided[0] < 20 < 100 < divided[1]
    assert _slots(model)[0] > 50
    assert sum(_slots(model)) <= 120
    _assert_same_tables(model, plain)


def test_a_batch_that_its_tables_part_cannot_hold_is_an_error_and_the_next_pass_fits():
    rows = (2000, 2000)
    switch = tf.Variable(0)
    batches = _data(rows, batches=6, narrow=(0,)), _data(rows, batches=6, seed=1, narrow=(1,))
    data = tf.data.Dataset.zip(*batches).map(lambda a, b: tf.cond(switch > 0, lambda: b, lambda: a))
    model, plain = _model(rows), _model(rows, mode="host")
    planned = data.apply(lookahead(model, num_slots=60))
    model.fit(planned, verbose=0)
    plain.fit(data, verbose=0)
    switch.assign(1)
    with pytest.raises(tf.errors.OpError, match="too small"):
        model.fit(planned, verbose=0)
    _assert_same_tables(model, plain)
    model.fit(planned, verbose=0)
    plain.fit(data, verbose=0)
    _assert_same_tables(model, plain)


@pytest.mark.parametrize("num_slots", [0, -3, 1.5, True])
def test_wrong_numbers_are_refused(num_slots):
    with pytest.raises(ValueError, match="`num_slots` must be a positive integer or None"):
        lookahead(_model(), num_slots=num_slots)

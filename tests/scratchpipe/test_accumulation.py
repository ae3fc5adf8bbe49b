"""Gradients that are accumulated over several steps, as Keras' dense optimizer does it.

The twin has the whole table as a weight, with Keras' own accumulator for it. Evictions happen
between the steps of a period and between periods.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.scratchpipe import dense
from tf_scratchpipe import RowwiseAdagrad, TooFewSlotsError, lookahead, tensor_state
from tf_scratchpipe.trained_state import TrainedState

STEPS = 13
TRAIN = dense.dataset(*dense.data(STEPS))
EPOCHS = 3


def _sgd(period=4, **settings):
    return keras.optimizers.SGD(0.5, gradient_accumulation_steps=period, **settings)


def _adagrad(period=3, **settings):
    return keras.optimizers.Adagrad(0.1, gradient_accumulation_steps=period, **settings)


@pytest.mark.parametrize(
    ("mode", "slots"),
    [
        ("pipelined", 160),
        pytest.param("synchronous", 160, marks=pytest.mark.slow),
        pytest.param("pipelined", None, marks=pytest.mark.slow),
        pytest.param("host", None, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("make", [_adagrad, pytest.param(_sgd, marks=pytest.mark.slow)])
def test_the_dense_optimizer_does_the_same(make, mode, slots):
    """13 steps an epoch are no whole number of periods: one is carried into the next epoch."""
    expected = dense.train_dense(make, TRAIN, epochs=EPOCHS, run_eagerly=True)
    layer = dense.cached(mode=mode, num_slots=slots)
    mine, model = dense.train_cached(make, TRAIN, layer, epochs=EPOCHS, run_eagerly=True)
    dense.assert_equal(mine, expected)
    assert layer.engine.rows.pending.steps == EPOCHS * STEPS % make().gradient_accumulation_steps
    assert int(model.optimizer._iterations) == EPOCHS * STEPS
    assert slots is None or layer.stats().evictions > 150


@pytest.mark.parametrize(
    ("mode", "slots"),
    [("pipelined", 160), pytest.param("synchronous", 160, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(
    "drive", [{"steps_per_execution": 5}, pytest.param({}, marks=pytest.mark.slow)]
)
def test_in_a_graph_all_modes_do_the_same(drive, mode, slots):
    tables = []
    for kind, size in ((mode, slots), ("host", None), ("static", 50)):
        hot = {"hot_ids": np.arange(50)} if kind == "static" else {}
        layer = dense.cached(mode=kind, num_slots=size, **hot)
        model = dense.around(layer, _sgd(momentum=0.9), **drive)
        train = TRAIN.apply(lookahead(model, debug=kind == "pipelined"))
        model.fit(train, epochs=EPOCHS, verbose=0)
        tables.append([layer.get_table(), *model.get_weights()[1:], layer.engine.get(1)])
    for other in tables[1:]:
        dense.assert_equal(tables[0], other)


def test_rows_move_in_the_last_step_of_a_period_only():
    layer = dense.cached(mode="synchronous", num_slots=160)
    model = dense.around(layer, _sgd(3), run_eagerly=True)
    moved, before = [], layer.get_table()
    for ids, targets in TRAIN.take(7):
        model.train_on_batch(ids, targets)
        after = layer.get_table()
        moved.append(bool(np.any(after != before)))
        before = after
    assert moved == [False, False, True, False, False, True, False]


@pytest.mark.parametrize(
    "settings",
    [
        {"clipvalue": 0.001, "loss_scale_factor": 3.0},
        pytest.param({"clipvalue": 0.002}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_settings_act_on_the_average(settings):
    make = lambda: _adagrad(**settings)  # noqa: E731
    expected = dense.train_dense(make, TRAIN, run_eagerly=True)
    layer = dense.cached(num_slots=160)
    mine, _ = dense.train_cached(make, TRAIN, layer, run_eagerly=True)
    dense.assert_equal(mine, expected)


@pytest.mark.parametrize("kind", ["adam", "schedule"])
@pytest.mark.slow
def test_formulas_count_periods_and_schedules_count_steps(kind):
    def make():
        if kind == "adam":
            return keras.optimizers.Adam(0.01, gradient_accumulation_steps=3)
        rate = keras.optimizers.schedules.ExponentialDecay(0.5, 4, 0.5)
        return keras.optimizers.SGD(rate, gradient_accumulation_steps=3)

    every_row = dense.dataset(*dense.every_row(7, 24))
    expected = dense.train_dense(make, every_row, rows=24, epochs=2, run_eagerly=True)
    mine, _ = dense.train_cached(make, every_row, dense.cached(24), epochs=2, run_eagerly=True)
    dense.assert_equal(mine, expected)


# ---- whose optimizer accumulates --------------------------------------------------------------


@pytest.mark.slow
def test_rows_with_their_own_optimizer_follow_the_models_accumulation():
    layer = dense.cached(optimizer=keras.optimizers.Adagrad(0.1), num_slots=160)
    mine, _ = dense.train_cached(_adagrad, TRAIN, layer, epochs=EPOCHS, run_eagerly=True)
    expected = dense.train_dense(_adagrad, TRAIN, epochs=EPOCHS, run_eagerly=True)
    dense.assert_equal(mine, expected)


@pytest.mark.slow
def test_rows_may_accumulate_by_themselves():
    """The kernel is frozen: so the rows' gradients do not depend on when it moves."""
    tables = []
    for own in (_adagrad(), None):
        layer = dense.cached(optimizer=own, num_slots=160)
        model = dense.around(layer, keras.optimizers.SGD(0.1) if own else _adagrad())
        model.layers[-1].trainable = False
        model.compile(model.optimizer, "mse", run_eagerly=True)
        model.fit(TRAIN.apply(lookahead(model)), epochs=EPOCHS, verbose=0)
        tables.append([layer.get_table()])
    dense.assert_equal(*tables)


@pytest.mark.slow
def test_what_waits_is_dropped_with_the_models_optimizer():
    """As Keras' accumulators are."""
    tables = []
    for first in (TRAIN.take(2), None):
        layer = dense.cached(num_slots=160)
        model = dense.around(layer, _sgd(), run_eagerly=True)
        if first is not None:
            model.fit(first.apply(lookahead(model)), verbose=0)
            assert layer.engine.rows.pending.steps == 2
        model.compile(_sgd(), "mse", run_eagerly=True)
        model.fit(TRAIN.apply(lookahead(model)), verbose=0)
        tables.append([layer.get_table()])
    dense.assert_equal(*tables)


@pytest.mark.slow
def test_an_optimizer_that_does_not_accumulate_frees_the_slots():
    layer = dense.cached(num_slots=60)
    model = dense.around(layer, _sgd(2))
    model.fit(TRAIN.take(1).apply(lookahead(model)), verbose=0)
    assert layer.engine.rows.pending.steps == 1
    model.compile(keras.optimizers.SGD(0.5), "mse")
    model.fit(TRAIN.apply(lookahead(model, debug=True)), epochs=2, verbose=0)
    assert layer.engine.rows.pending.steps == 0
    assert layer.stats().evictions > 100


@pytest.mark.slow
def test_keras_allocates_no_accumulator_of_the_tables_size():
    layer = dense.cached()
    model = dense.around(layer, _sgd())
    model.fit(TRAIN.apply(lookahead(model)), verbose=0)
    assert max(np.prod(variable.shape) for variable in model.optimizer.variables) == dense.DIM
    weights = model.optimizer.variables[-3:]
    assert [tuple(variable.shape) for variable in weights] == [(), (dense.DIM, 1), (1,)]


# ---- slots ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["pipelined", "synchronous"])
def test_too_few_slots_for_a_period(mode):
    """Each batch has about 32 rows, four of them more than 70 rows."""
    layer = dense.cached(mode=mode, num_slots=70)
    model = dense.around(layer, _sgd())
    kind = (TooFewSlotsError, tf.errors.InvalidArgumentError, tf.errors.UnknownError)
    with pytest.raises(kind, match=r"num_slots.* is too small.*whose gradients are accumulated"):
        model.fit(TRAIN.apply(lookahead(model)), verbose=0)


@pytest.mark.slow
def test_a_period_longer_than_the_pipeline():
    """All its batches wait in their slots; the pipeline waits for the last of them."""
    train = dense.dataset(*dense.data(30))
    make = lambda: _sgd(9)  # noqa: E731
    expected = dense.train_dense(make, train, run_eagerly=True)
    layer = dense.cached(num_slots=240)
    mine, _ = dense.train_cached(make, train, layer, run_eagerly=True)
    dense.assert_equal(mine, expected)
    assert layer.stats().evictions > 50


@pytest.mark.parametrize("then", ["pipelined", "plain"])
@pytest.mark.parametrize("first", ["plain", pytest.param("pipelined", marks=pytest.mark.slow)])
def test_a_pass_that_is_broken_off_in_a_period(first, then):
    """What was looked up ahead holds no slots any more; what waits does."""
    arrays = dense.data(12)
    layer = dense.cached(num_slots=160)
    model = dense.around(layer, _sgd(), run_eagerly=True)
    planned = dense.dataset(*arrays).apply(lookahead(model, debug=True))

    def run(kind, start, stop):
        batches = dense.dataset(*(a[start * dense.BATCH :] for a in arrays))
        if kind == "pipelined":
            batches = batches.apply(lookahead(model, debug=True))
        for _, batch in zip(range(start, stop), batches, strict=False):
            model.train_on_batch(*batch)

    del planned
    run(first, 0, 6)
    run(then, 6, 10)
    run(first, 10, 12)
    twin = dense.around(dense.DenseTable(), _sgd(), run_eagerly=True)
    for batch in dense.dataset(*arrays):
        twin.train_on_batch(*batch)
    dense.assert_equal([layer.get_table(), *model.get_weights()[1:]], twin.get_weights())


def test_layers_that_share_a_feature():
    def build(kind, size):
        inputs = keras.Input((dense.LOOKUPS,), dtype="int32", name="ids")
        layers = [
            dense.cached(mode=kind, num_slots=size, optimizer=own)
            for own in (None, "rowwise_adagrad")
        ]
        layers = [
            type(layer).from_config({**layer.get_config(), "name": f"table_{i}"})
            for i, layer in enumerate(layers)
        ]
        pooled = keras.layers.Concatenate()([layer(inputs) for layer in layers])
        kernel = keras.initializers.GlorotUniform(seed=1)
        outputs = keras.layers.Dense(1, kernel_initializer=kernel)(pooled)
        model = keras.Model(inputs, outputs)
        model.compile(_adagrad(4), "mse")
        for batch in TRAIN.take(2):  # In a slot map of its own each, which then is a common one.
            model.train_on_batch(*batch)
        model.fit(TRAIN.apply(lookahead(model, debug=True)), epochs=EPOCHS, verbose=0)
        return [layer.get_table() for layer in layers]

    dense.assert_equal(build("pipelined", 160), build("host", None))


# ---- saving -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        pytest.param("pipelined", "pipelined", marks=pytest.mark.slow),
        ("synchronous", "pipelined"),
        pytest.param("pipelined", "host", marks=pytest.mark.slow),
        pytest.param("host", "static", marks=pytest.mark.slow),
        pytest.param("static", "synchronous", marks=pytest.mark.slow),
    ],
)
def test_saved_and_loaded_in_the_middle_of_a_period(saved, loaded, tmp_path):
    def make(mode):
        hot = {"hot_ids": np.arange(50)} if mode == "static" else {}
        return dense.cached(mode=mode, num_slots=160, **hot)

    def fit(model, train):
        model.fit(train.apply(lookahead(model, debug=True)), verbose=0)

    first = dense.around(make(saved), _sgd())
    fit(first, TRAIN.take(6))
    first.save_weights(tmp_path / "saved.weights.h5")
    layer = make(loaded)
    second = dense.around(layer, _sgd())
    second.optimizer.build(second.trainable_variables)
    second.load_weights(tmp_path / "saved.weights.h5")
    state = layer.engine.state()
    assert state["waiting.steps"] == 2
    fit(second, TRAIN.skip(6))
    whole = dense.around(make("host"), _sgd())
    fit(whole, TRAIN)
    dense.assert_equal(second.get_weights(), whole.get_weights())


def _as_files(layer, folder):
    state = TrainedState(layer.engine)
    state.save(folder)
    return lambda other: TrainedState(other.engine).load(folder)


def _as_tensors(layer, folder):
    state = TrainedState(layer.engine)
    tensors = tensor_state.to_tensors(state, layer.engine.counters())
    return lambda other: tensor_state.load_tensors(TrainedState(other.engine), tensors)


@pytest.mark.parametrize("way", [_as_files, _as_tensors])
@pytest.mark.parametrize("mode", ["pipelined", "host"])
def test_every_way_to_save_a_table_keeps_what_waits(way, mode, tmp_path):
    layer, other = (dense.cached(mode=mode, num_slots=160) for _ in range(2))
    model, twin = dense.around(layer, _sgd()), dense.around(other, _sgd())
    model.fit(TRAIN.take(6).apply(lookahead(model)), verbose=0)
    twin.optimizer.build(twin.trainable_variables)
    way(layer, tmp_path)(other)
    waits, loaded = layer.engine.state(), other.engine.state()
    assert waits["waiting.ids"].size > 0
    assert loaded.keys() == waits.keys()
    for name, value in waits.items():
        np.testing.assert_array_equal(loaded[name], value, name)


@pytest.mark.parametrize("bound", [True, False])
def test_what_waits_is_not_loaded_for_an_optimizer_that_does_not_accumulate(bound):
    layer = dense.cached(mode="synchronous", num_slots=160)
    model = dense.around(layer, _sgd(), run_eagerly=True)
    batches = list(TRAIN.take(3))
    for batch in batches[:2]:
        model.train_on_batch(*batch)
    state = layer.engine.state()
    tables = []
    for loaded in (state, {"table": state["table"]}):
        layer = dense.cached(mode="synchronous", num_slots=60)
        model = dense.around(layer, keras.optimizers.SGD(0.5), run_eagerly=True)
        if bound:
            layer.follow(model.optimizer)
        layer.engine.load_state(loaded)
        for batch in batches:
            model.train_on_batch(*batch)
        assert layer.engine.rows.pending.steps == 0
        assert layer.engine.rows.pending.parked is None
        tables.append([layer.get_table()])
    dense.assert_equal(*tables)


def test_rows_that_follow_the_models_accumulation_are_loaded_in_a_period():
    tables = []
    for reloaded in (True, False):
        layer = dense.cached(optimizer="adagrad", num_slots=160)
        model = dense.around(layer, _sgd())
        model.layers[-1].trainable = False
        model.compile(_sgd(), "mse")
        model.fit(TRAIN.take(2).apply(lookahead(model)), verbose=0)
        if reloaded:
            state = layer.engine.state()
            layer.engine.load_state({"table": state["table"]})
            assert layer.engine.rows.pending.steps == 0
            layer.engine.load_state(state)
        model.fit(TRAIN.skip(2).apply(lookahead(model, debug=True)), verbose=0)
        tables.append([layer.get_table()])
    dense.assert_equal(*tables)


def test_loading_a_state_in_which_nothing_waits_forgets_what_waits():
    layer = dense.cached(num_slots=160)
    model = dense.around(layer, _sgd())
    state = layer.engine.state()
    model.fit(TRAIN.take(2).apply(lookahead(model)), verbose=0)
    assert layer.engine.rows.pending.steps == 2
    layer.engine.load_state(state)
    assert layer.engine.rows.pending.steps == 0
    assert "waiting.ids" not in layer.engine.state()


@pytest.mark.slow
def test_rowwise_adagrad_accumulates_too():
    make = lambda: RowwiseAdagrad(0.1, gradient_accumulation_steps=3)  # noqa: E731
    expected = dense.train_dense(make, TRAIN, run_eagerly=True)
    mine, _ = dense.train_cached(make, TRAIN, dense.cached(num_slots=160), run_eagerly=True)
    dense.assert_equal(mine, expected)


@pytest.mark.slow
def test_freezing_the_layer_drops_what_waits():
    """A batch that trains nothing frees its slots, also those of rows that waited."""
    layer = dense.cached(num_slots=60)
    model = dense.around(layer, _sgd(2))
    model.fit(TRAIN.take(1).apply(lookahead(model)), verbose=0)
    start = layer.get_table()
    layer.trainable = False
    model.compile(model.optimizer, "mse")
    model.fit(TRAIN.apply(lookahead(model)), verbose=0)
    np.testing.assert_array_equal(layer.get_table(), start)
    assert layer.engine.rows.pending.steps == 0

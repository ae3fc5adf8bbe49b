"""The cache changes nothing: bit by bit against the uncached table, and against numpy."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.scratchpipe import uncached
from tests.scratchpipe.uncached import OPTIMIZERS, assert_same, outcome
from tf_scratchpipe import ScratchPipeEmbedding, lookahead

EPOCHS = 2
IDS, TARGETS = uncached.data()
VALIDATION = uncached.data(5, seed=1)


def _steps(drive):
    """Eager steps take long: there are fewer of them."""
    count = (25 if drive == "eager" else 80) * uncached.BATCH
    return IDS[:count], TARGETS[:count]


def _fitting(train):
    return {
        "x": train,
        "epochs": EPOCHS,
        "verbose": 0,
        "validation_data": uncached.dataset(*VALIDATION),
    }


@functools.cache
def _uncached(optimizer, drive):
    fitting = _fitting(uncached.dataset(*_steps(drive)))
    return uncached.train_uncached(optimizer, {"run_eagerly": drive == "eager"}, **fitting)


# Each option meets each other one at least once.
CASES = [
    # optimizer, drive, executor, replacement, slots
    ("sgd", "fit", "thread", "lru", 600),
    pytest.param("sgd", "eager", "inline", "lfu", 130, marks=pytest.mark.slow),
    pytest.param("sgd", "several", "thread", "random", None, marks=pytest.mark.slow),
    ("momentum", "fit", "inline", "random", 130),
    pytest.param("momentum", "several", "thread", "lfu", 600, marks=pytest.mark.slow),
    pytest.param("momentum", "eager", "thread", "lru", None, marks=pytest.mark.slow),
    pytest.param("nesterov", "several", "inline", "lru", 130, marks=pytest.mark.slow),
    pytest.param("nesterov", "fit", "thread", "lfu", None, marks=pytest.mark.slow),
    ("adagrad", "fit", "thread", "random", 600),
    pytest.param("adagrad", "several", "inline", "lfu", 600, marks=pytest.mark.slow),
    ("adagrad", "eager", "thread", "random", 130),
    ("adam", "fit", "thread", "lfu", 130),
    pytest.param("adam", "eager", "inline", "lru", 600, marks=pytest.mark.slow),
    pytest.param("adam", "several", "thread", "lru", 600, marks=pytest.mark.slow),
    pytest.param("amsgrad", "fit", "inline", "lru", None, marks=pytest.mark.slow),
    pytest.param("schedule", "fit", "thread", "lru", 600, marks=pytest.mark.slow),
    pytest.param("adamw", "fit", "thread", "lru", 600, marks=pytest.mark.slow),
    ("rmsprop", "several", "inline", "lfu", 130),
    pytest.param("centered", "eager", "thread", "lru", 130, marks=pytest.mark.slow),
    ("ftrl", "fit", "thread", "random", 600),
    ("rowwise", "fit", "thread", "lru", 130),
    pytest.param("rowwise", "several", "inline", "lfu", None, marks=pytest.mark.slow),
]
COMPILING = {"fit": {}, "eager": {"run_eagerly": True}, "several": {"steps_per_execution": 5}}


@pytest.mark.parametrize(("optimizer", "drive", "executor", "replacement", "slots"), CASES)
def test_pipelined_training_is_bit_identical(optimizer, drive, executor, replacement, slots):
    model, layer = uncached.cached_model(
        optimizer, COMPILING[drive], num_slots=slots, replacement=replacement
    )
    ids, targets = _steps(drive)
    train = uncached.dataset(ids, targets).apply(lookahead(model, executor=executor, debug=True))
    history = model.fit(**_fitting(train)).history
    assert_same(outcome(model, layer, history), _uncached(optimizer, drive))
    stats = layer.stats()
    assert stats.train_hits == stats.train_lookups == EPOCHS * ids.size
    assert stats.evictions > (1_000 if drive == "eager" else 4_000)
    assert (stats.shortened > 0) == (slots == 130)


@pytest.mark.parametrize(
    ("mode", "optimizer", "drive"),
    [
        ("synchronous", "sgd", "fit"),
        ("synchronous", "adagrad", "several"),
        pytest.param("synchronous", "adam", "eager", marks=pytest.mark.slow),
        ("static", "momentum", "fit"),
        pytest.param("static", "adam", "several", marks=pytest.mark.slow),
        ("host", "adagrad", "fit"),
        pytest.param("host", "nesterov", "several", marks=pytest.mark.slow),
        ("synchronous", "rowwise", "fit"),
        pytest.param("static", "adamw", "fit", marks=pytest.mark.slow),
        pytest.param("host", "ftrl", "several", marks=pytest.mark.slow),
    ],
)
def test_the_other_modes_are_bit_identical(mode, optimizer, drive):
    hot = {"hot_ids": np.arange(300)} if mode == "static" else {}
    model, layer = uncached.cached_model(
        optimizer, COMPILING[drive], num_slots=130, mode=mode, **hot
    )
    # In these modes look-ahead hands the data on as they are.
    train = uncached.dataset(*_steps(drive)).apply(lookahead(model))
    history = model.fit(**_fitting(train)).history
    assert_same(outcome(model, layer, history), _uncached(optimizer, drive))
    if mode == "synchronous":
        assert layer.stats().evictions > (1_000 if drive == "eager" else 4_000)


@pytest.mark.parametrize("mode", ["pipelined", "synchronous"])
@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
def test_a_custom_loop_is_bit_identical(mode, optimizer):
    model, layer = uncached.cached_model(optimizer, num_slots=600, mode=mode)
    train = uncached.dataset(*_steps("fit")).apply(lookahead(model, debug=True))

    @tf.function(reduce_retracing=True)
    def step(ids, targets):
        with tf.GradientTape() as tape:
            loss = keras.losses.mean_squared_error(targets, model(ids, training=True))
            loss = tf.reduce_mean(loss)
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply(gradients, model.trainable_variables)

    for _ in range(EPOCHS):
        for ids, targets in train:
            step(ids, targets)
    expected = _uncached(optimizer, "fit")
    assert_same(outcome(model, layer, expected.history), expected)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_same_as_numpy(optimizer):
    ids, targets = IDS[: 60 * uncached.BATCH], TARGETS[: 60 * uncached.BATCH]
    model, layer = uncached.cached_model(optimizer, num_slots=600)
    start = [layer.get_table(), *model.get_weights()[1:]]
    train = uncached.dataset(ids, targets).apply(lookahead(model))
    history = model.fit(train, epochs=EPOCHS, verbose=0).history
    done = outcome(model, layer, history)
    expected = uncached.train_numpy(optimizer, ids, targets, EPOCHS, start)
    for mine, theirs in zip(done.tables + done.dense, expected, strict=True):
        # Float32 against float64 over 120 steps.
        np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("own", [True, False])
def test_the_learning_rate_is_live(own):
    optimizer = keras.optimizers.SGD(0.5)
    layer = ScratchPipeEmbedding(
        uncached.ROWS, 2, num_slots=600, combiner="sum", optimizer=optimizer if own else None
    )
    inputs = keras.Input((uncached.LOOKUPS,), dtype="int32")
    model = keras.Model(inputs, keras.layers.Dense(1)(layer(inputs)))
    model.compile(keras.optimizers.SGD(0.5), "mse")
    train = uncached.dataset(*_steps("eager")).apply(lookahead(model))
    model.fit(train, verbose=0)
    before = layer.get_table()
    layer.row_optimizer().learning_rate = 0.0
    model.fit(train, verbose=0)
    np.testing.assert_array_equal(layer.get_table(), before)
    layer.row_optimizer().learning_rate = 0.1
    model.fit(train, verbose=0)
    assert np.abs(layer.get_table() - before).max() > 0
    assert layer.row_optimizer() is (optimizer if own else model.optimizer)

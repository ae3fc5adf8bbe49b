"""Row optimizers and their settings against Keras' own dense optimizers, bit by bit.

Eagerly: TensorFlow's graph optimizer rounds a division by a root as it suits the position in the
vector. Where all rows are looked up in each step, no optimizer may be told from its dense self;
where some rest, SGD, Adagrad and RowwiseAdagrad may not.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.scratchpipe import dense
from tests.scratchpipe.uncached import FIRST_SLOTS, OPTIMIZERS, numpy_step
from tf_scratchpipe import RowwiseAdagrad, ScratchPipeEmbedding, lookahead

FEW, STEPS = 24, 5
EVERY_ROW = dense.every_row(STEPS, FEW)
SOME_ROWS = dense.data(STEPS)


def _fast(optimizer, **settings):
    """One of the optimizers with other settings."""
    made = OPTIMIZERS[optimizer]()
    return type(made).from_config({**made.get_config(), **settings})


def _schedule():
    return keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)


def _constant():
    return 0.03


def _assert_as_dense(make, arrays, rows, **settings):
    """Eagerly, in every mode that matters: with slots and without."""
    train = dense.dataset(*arrays)
    expected = dense.train_dense(make, train, rows=rows, run_eagerly=True)
    layer = dense.cached(rows, mode="synchronous", num_slots=min(rows, 100), **settings)
    mine, _ = dense.train_cached(make, train, layer, run_eagerly=True)
    dense.assert_equal(mine, expected)


@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "schedule"])
def test_where_all_rows_are_looked_up_the_dense_optimizer_does_the_same(optimizer):
    _assert_as_dense(OPTIMIZERS[optimizer], EVERY_ROW, FEW)


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.SGD(0.5),
        lambda: keras.optimizers.Adagrad(0.1),
        lambda: RowwiseAdagrad(0.1),
        lambda: keras.optimizers.Adagrad(0.1, clipvalue=0.002),
        lambda: keras.optimizers.SGD(0.5, loss_scale_factor=3.0),
    ],
)
def test_where_rows_rest_the_dense_optimizer_does_the_same(make):
    _assert_as_dense(make, SOME_ROWS, dense.ROWS)


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        ("sgd", {"weight_decay": 0.1}),
        pytest.param("momentum", {"clipnorm": 0.01, "weight_decay": 0.2}, marks=pytest.mark.slow),
        ("nesterov", {"clipvalue": 0.002}),
        ("adagrad", {"clipnorm": 0.01}),
        pytest.param(
            "adagrad", {"loss_scale_factor": 3.0, "clipnorm": 0.01}, marks=pytest.mark.slow
        ),
        ("rowwise", {"weight_decay": 0.1, "clipvalue": 0.002}),
        ("adam", {"weight_decay": 0.1, "clipnorm": 0.01}),
        pytest.param(
            "adamw", {"loss_scale_factor": 3.0, "clipvalue": 0.002}, marks=pytest.mark.slow
        ),
        pytest.param("rmsprop", {"weight_decay": 0.1}, marks=pytest.mark.slow),
        pytest.param("centered", {"clipvalue": 0.002}, marks=pytest.mark.slow),
        ("ftrl", {"weight_decay": 0.1, "clipnorm": 0.01}),
        ("adam", {"gradient_accumulation_steps": 2, "weight_decay": 0.1, "clipnorm": 0.01}),
    ],
)
def test_settings_of_the_optimizer_reach_the_rows(optimizer, settings):
    _assert_as_dense(lambda: _fast(optimizer, **settings), EVERY_ROW, FEW)


@pytest.mark.parametrize(
    ("optimizer", "rate"),
    [
        ("adam", _schedule),
        ("rowwise", lambda: _constant),
        pytest.param("ftrl", _schedule, marks=pytest.mark.slow),
        pytest.param("rmsprop", lambda: _constant, marks=pytest.mark.slow),
    ],
)
def test_learning_rates_that_are_schedules_or_functions(optimizer, rate):
    kind, config = type(OPTIMIZERS[optimizer]()), OPTIMIZERS[optimizer]().get_config()
    config.pop("learning_rate")
    _assert_as_dense(lambda: kind(learning_rate=rate(), **config), EVERY_ROW, FEW)


@pytest.mark.parametrize("excluded", ["by name", "by weight"])
def test_decay_leaves_a_table_alone_that_is_excluded(excluded):
    """The other weights decay."""
    arrays = dense.dataset(*EVERY_ROW)
    weights = []
    for layer in (dense.cached(FEW), dense.DenseTable(FEW)):
        optimizer = keras.optimizers.SGD(0.1, weight_decay=0.5)
        model = dense.around(layer, optimizer, run_eagerly=True)
        if excluded == "by name":
            optimizer.exclude_from_weight_decay(var_names=["embeddings"])
        else:
            optimizer.exclude_from_weight_decay(var_list=[layer.embeddings])
        train = arrays.apply(lookahead(model)) if not weights else arrays
        model.fit(train, verbose=0)
        weights.append([np.asarray(layer.embeddings), *model.get_weights()[1:]])
    dense.assert_equal(*weights)
    kept = dense.train_dense(
        lambda: keras.optimizers.SGD(0.1, weight_decay=0.5), arrays, rows=FEW, run_eagerly=True
    )
    assert np.any(kept[0] != weights[0][0])


@pytest.mark.parametrize(
    "mode",
    [
        "static",
        pytest.param("pipelined", marks=pytest.mark.slow),
        pytest.param("synchronous", marks=pytest.mark.slow),
    ],
)
def test_clipping_and_decay_are_the_same_in_all_modes(mode):
    """The norm is that of the whole table's gradient, wherever its rows are."""
    train = dense.dataset(*dense.data(30))
    tables = []
    for kind in ("host", mode):
        hot = {"hot_ids": np.arange(50)} if kind == "static" else {}
        layer = dense.cached(mode=kind, num_slots=110, **hot)
        optimizer = keras.optimizers.SGD(0.5, momentum=0.9, clipnorm=0.02, weight_decay=0.05)
        done, _ = dense.train_cached(lambda o=optimizer: o, train, layer, epochs=2)
        tables.append(done)
        assert kind not in ("pipelined", "synchronous") or layer.stats().evictions > 500
    dense.assert_equal(*tables)


def test_only_rows_that_are_looked_up_decay():
    layer = dense.cached(mode="host")
    start = layer.get_table()
    optimizer = keras.optimizers.SGD(0.1, weight_decay=0.5)
    ids, targets = dense.data(3)
    dense.train_cached(lambda: optimizer, dense.dataset(ids, targets), layer)
    resting = np.setdiff1d(np.arange(dense.ROWS), ids)
    assert resting.size > 50
    np.testing.assert_array_equal(layer.get_table()[resting], start[resting])


def test_rows_with_their_own_optimizer_keep_its_clipping_and_decay():
    own = {"clipvalue": 0.002, "weight_decay": 0.1}
    train = dense.dataset(*EVERY_ROW)
    tables = []
    for make, optimizer in (
        (lambda: keras.optimizers.SGD(0.1, clipnorm=1e-6), keras.optimizers.SGD(0.1, **own)),
        (lambda: keras.optimizers.SGD(0.1, **own), None),
    ):
        # A learning rate of the other weights that leaves them where they are.
        layer = dense.cached(FEW, optimizer=optimizer)
        model = dense.around(layer, make(), run_eagerly=True)
        model.layers[-1].trainable = False
        model.compile(model.optimizer, "mse", run_eagerly=True)
        model.fit(train.apply(lookahead(model)), verbose=0)
        tables.append([layer.get_table()])
    dense.assert_equal(*tables)


# ---- row-wise Adagrad -------------------------------------------------------------------------


def test_the_accumulator_of_a_row_is_one_number():
    layer = dense.cached(optimizer=RowwiseAdagrad(0.1, initial_accumulator_value=0.5))
    rows = layer.engine.rows
    assert rows.widths == [dense.DIM, 1]
    assert rows.row_bytes == 4 * (dense.DIM + 1)
    np.testing.assert_array_equal(layer.engine.get(1), np.full((dense.ROWS, 1), 0.5))


def test_rowwise_adagrad_of_all_kinds_of_weights():
    """As its formula says; slices with equal indices are added up."""
    start = [np.arange(6.0).reshape(2, 3), np.arange(3.0), np.array(2.0)]
    variables = [keras.Variable(value, dtype="float32") for value in start]
    optimizer = RowwiseAdagrad(0.1, initial_accumulator_value=0.25, epsilon=0.5)
    slices = tf.IndexedSlices(tf.ones((2, 3)), tf.constant([1, 1]), tf.constant([2, 3]))
    gradients = [np.array([[0.0] * 3, [2.0] * 3]), np.array([1.0, 2.0, 3.0]), np.array(3.0)]
    rest = [tf.constant(gradient, tf.float32) for gradient in gradients[1:]]
    optimizer.apply([slices, *rest], variables)
    for variable, value, gradient in zip(variables, start, gradients, strict=True):
        squared = np.atleast_1d(gradient**2)
        mean = np.mean(squared, axis=-1, keepdims=True).reshape(
            (*value.shape[:-1], 1)[: value.ndim]
        )
        expected = value - 0.1 * gradient / (np.sqrt(0.25 + mean) + 0.5)
        np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-6)
    assert [v.shape for v in optimizer.variables[2:]] == [(2, 1), (1,), ()]


@pytest.mark.parametrize("given", ["name", "class name", "instance", "config"])
def test_ways_to_name_rowwise_adagrad(given):
    optimizer = {
        "name": "rowwise_adagrad",
        "class name": "RowwiseAdagrad",
        "instance": RowwiseAdagrad(0.01),
        "config": keras.optimizers.serialize(RowwiseAdagrad(0.01)),
    }[given]
    layer = ScratchPipeEmbedding(10, 4, optimizer=optimizer)
    again = ScratchPipeEmbedding.from_config(layer.get_config())
    for made in (layer, again):
        assert type(made.row_optimizer()) is RowwiseAdagrad
        assert made.row_optimizer().get_config() == layer.row_optimizer().get_config()


def test_a_negative_accumulator_is_refused():
    with pytest.raises(ValueError, match=r"must be zero or positive. Received: initial_acc"):
        RowwiseAdagrad(initial_accumulator_value=-1.0)


@pytest.mark.parametrize(
    "mode",
    [
        "pipelined",
        pytest.param("host", marks=pytest.mark.slow),
        pytest.param("static", marks=pytest.mark.slow),
    ],
)
def test_narrow_slots_are_saved_and_loaded(mode, tmp_path):
    hot = {"hot_ids": [5, 2, 80]} if mode == "static" else {}
    train = dense.dataset(*dense.data(8))
    layer = dense.cached(mode=mode, **hot)
    _, model = dense.train_cached(lambda: RowwiseAdagrad(0.1), train, layer)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for one in (model, loaded):
        one.fit(train.apply(lookahead(one)), verbose=0)
    again = loaded.get_layer("table")
    assert type(loaded.optimizer) is RowwiseAdagrad
    for number in (0, 1):
        np.testing.assert_array_equal(again.engine.get(number), layer.engine.get(number))
    assert np.any(layer.engine.get(1))


def test_a_slot_of_another_width_is_refused():
    layer = dense.cached(optimizer=RowwiseAdagrad(0.1))
    with pytest.raises(ValueError, match=r"has shape \(300, 1\). Received: values of shape"):
        layer.engine.set(np.zeros((dense.ROWS, dense.DIM)), 1)


# ---- pooling ----------------------------------------------------------------------------------

COMBINERS = ("sum", "mean", "sqrtn")


def _uneven(batches, rows, seed):
    """Ragged ids and weights with the same row lengths, some of them 0."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 5, batches * dense.BATCH)
    ids = rng.integers(0, rows, lengths.sum()).astype("int32")
    weights = rng.uniform(0.5, 2, lengths.sum()).astype("float32")
    parts = [tf.RaggedTensor.from_row_lengths(values, lengths) for values in (ids, weights)]
    return {"ids": parts[0], "weights": parts[1]}, rng.random((lengths.size, 1)).astype("float32")


def _pooled(layer, optimizer):
    inputs = {
        "ids": keras.Input((None,), dtype="int32", name="ids", ragged=True),
        "weights": keras.Input((None,), name="weights", ragged=True),
    }
    kernel = keras.initializers.GlorotUniform(seed=1)
    output = keras.layers.Dense(1, kernel_initializer=kernel)
    model = keras.Model(inputs, output(layer(inputs["ids"], weights=inputs["weights"])))
    model.compile(optimizer, "mse")
    return model


def _numpy_gradient(table, ids, weights, kernel, bias, targets, combiner):
    """Of the squared error for the rows, each once, in float64."""
    gradient = np.zeros_like(table)
    for row_ids, row_weights, target in zip(ids, weights, targets, strict=True):
        w = np.asarray(row_weights, np.float64)
        divisor = {"sum": 1.0, "mean": w.sum(), "sqrtn": np.sqrt((w**2).sum())}[combiner]
        factors = w / divisor if w.size else w
        pooled = factors @ table[row_ids] if w.size else np.zeros(table.shape[1])
        error = 2 * (pooled @ kernel + bias - target) / len(ids)
        np.add.at(gradient, row_ids, np.outer(factors, error @ kernel.T))
    return gradient


# Each optimizer meets a combiner, one of them all three.
POOLED = [
    ("adagrad", "mean"),
    ("rowwise", "sqrtn"),
    pytest.param("adagrad", "sum", marks=pytest.mark.slow),
    pytest.param("adagrad", "sqrtn", marks=pytest.mark.slow),
    *(
        pytest.param(name, COMBINERS[number % 3], marks=pytest.mark.slow)
        for number, name in enumerate(OPTIMIZERS)
        if name not in ("adagrad", "rowwise")
    ),
]


@pytest.mark.parametrize(("optimizer", "combiner"), POOLED)
def test_ragged_weighted_pooling(optimizer, combiner):
    """The first step as numpy has it; many steps with evictions as in mode "host"."""
    features, targets = _uneven(24, dense.ROWS, seed=5)
    train = dense.dataset(features, targets)
    layers = {}
    for mode in ("pipelined", "host"):
        layer = layers[mode] = dense.cached(mode=mode, combiner=combiner, num_slots=90)
        model = _pooled(layer, OPTIMIZERS[optimizer]())
        table, kernel, bias = layer.get_table(), *model.get_weights()[1:]
        model.fit(train.take(1).apply(lookahead(model)), verbose=0)
        one = [part[: dense.BATCH] for part in (features["ids"], features["weights"], targets)]
        gradient = _numpy_gradient(
            table, one[0].to_list(), one[1].to_list(), kernel, bias, one[2], combiner
        )
        _assert_one_step(layer, optimizer, table, gradient)
        model.fit(train.skip(1).apply(lookahead(model)), epochs=2, verbose=0)
    mine, theirs = (layers[mode].engine for mode in layers)
    assert layers["pipelined"].stats().evictions > 300
    for number in range(len(mine.rows.widths)):
        np.testing.assert_array_equal(mine.get(number), theirs.get(number))


def _assert_one_step(layer, optimizer, table, gradient):
    touched = np.flatnonzero(np.any(gradient, axis=1))
    widths = layer.engine.rows.widths[1:]
    first = FIRST_SLOTS[optimizer]
    slots = [np.full((touched.size, w), s) for w, s in zip(widths, first, strict=True)]
    start = [table[touched].astype(np.float64), *slots]
    expected = numpy_step(optimizer)(start, gradient[touched], 1)
    for number, values in enumerate(expected):
        # Float32 against float64, after one step.
        mine = layer.engine.get(number)[touched]
        np.testing.assert_allclose(mine, values, rtol=1e-4, atol=2e-6)
    resting = np.setdiff1d(np.arange(len(table)), touched)
    np.testing.assert_array_equal(layer.get_table()[resting], table[resting])


def test_weights_that_are_planned_ids_are_refused():
    layer = dense.cached()
    ids = keras.Input((3,), dtype="int32", name="ids")
    rows = layer(ids, weights=keras.ops.cast(ids, "float32"))
    model = keras.Model(ids, keras.layers.Dense(1)(rows))
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="'weights of table' reads input 'ids', whose ids"):
        dense.dataset(*dense.data(1)).apply(lookahead(model))

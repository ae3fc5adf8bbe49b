"""The layer as a Keras layer: a drop-in for `keras.layers.Embedding`, pooled or not, masked,
counted, frozen, read and written while it is trained, and where its rows come from.
"""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_scratchpipe import ScratchPipeEmbedding, initial_rows, lookahead

ROWS, DIM, BATCH, LOOKUPS = 60, 3, 8, 4
MODES = ["pipelined", "synchronous", "static", "host"]
COMBINERS = ["sum", "mean", "sqrtn"]


def _layer(mode="pipelined", **settings):
    if mode == "static":
        settings["hot_ids"] = [3, 1, 40]
    settings = {"embeddings_initializer": keras.initializers.RandomUniform(seed=3), **settings}
    return ScratchPipeEmbedding(ROWS, DIM, mode=mode, name="table", **settings)


def _data(batches=6, seed=0):
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, ROWS, (batches * BATCH, LOOKUPS)).astype("int32")
    ids[:, 0] = ids[:, 1]
    ids[::3, 2:] = 0
    return ids, rng.random((batches * BATCH, 1)).astype("float32")


def _dataset(ids, targets):
    return tf.data.Dataset.from_tensor_slices((ids, targets)).batch(BATCH)


def _model(layer, head=None, optimizer=None):
    """The layer between ids and a Dense layer."""
    inputs = keras.Input((LOOKUPS,), dtype="int32", name="ids")
    hidden = layer(inputs)
    hidden = hidden if head is None else head(hidden)
    kernel = keras.initializers.GlorotUniform(seed=1)
    model = keras.Model(inputs, keras.layers.Dense(1, kernel_initializer=kernel)(hidden))
    model.compile(optimizer or keras.optimizers.Adagrad(0.1), "mse")
    return model


# ---- in the place of keras.layers.Embedding ---------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(), (5,), (5, 4), (5, 2, 4), (0, 4)])
def test_rows_are_those_of_keras_embedding(shape, mode):
    ids = np.random.default_rng(0).integers(0, ROWS, shape)
    plain = keras.layers.Embedding(ROWS, DIM, keras.initializers.RandomUniform(seed=3))
    rows = _layer(mode)(ids)
    assert rows.shape == (*shape, DIM)
    assert rows.dtype == "float32"
    np.testing.assert_array_equal(rows, plain(ids))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(), (4,), (2, 4)])
def test_predictions_are_those_of_keras_embedding(shape, mode):
    ids = np.random.default_rng(0).integers(0, ROWS, (7, *shape))

    def predictions(layer):
        inputs = keras.Input(shape, dtype="int32")
        return keras.Model(inputs, layer(inputs)).predict(ids, verbose=0)

    plain = keras.layers.Embedding(ROWS, DIM, keras.initializers.RandomUniform(seed=3))
    np.testing.assert_array_equal(predictions(_layer(mode)), predictions(plain))


@pytest.mark.parametrize("mode", ["pipelined", "host"])
@pytest.mark.parametrize(
    "dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
)
def test_ids_of_any_integer_dtype(dtype, mode):
    layer = _layer(mode)
    rows = layer(tf.constant([[0, 59], [7, 7]], dtype))
    np.testing.assert_array_equal(rows, layer.get_table()[[[0, 59], [7, 7]]])


@pytest.mark.parametrize("mode", ["pipelined", "host"])
def test_ids_of_a_dtype_that_cannot_hold_input_dim(mode):
    layer = ScratchPipeEmbedding(300, DIM, mode=mode)
    np.testing.assert_array_equal(
        layer(tf.constant([255, 0], "uint8")), layer.get_table()[[255, 0]]
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_whole_floats_are_ids(dtype, mode):
    layer = _layer(mode)
    rows = layer(tf.constant([[0, 59], [7, 7]], dtype))
    assert rows.dtype == "float32"
    np.testing.assert_array_equal(rows, layer.get_table()[[[0, 59], [7, 7]]])


def test_training_on_whole_floats_is_training_on_integers():
    ids, targets = _data()
    tables = []
    for dtype in ("int32", "float32"):
        layer = _layer("synchronous", combiner="sum")
        inputs = keras.Input((LOOKUPS,), dtype=dtype)
        model = keras.Model(inputs, keras.ops.sum(layer(inputs), axis=-1, keepdims=True))
        model.compile("adagrad", "mse")
        model.fit(ids.astype(dtype), targets, batch_size=BATCH, shuffle=False, verbose=0)
        tables.append(layer.get_table())
    np.testing.assert_array_equal(*tables)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "ids",
    [
        np.array([[-1, 60], [2**31, -(2**30)]]),
        np.array([[np.nan, 1.5], [-0.5, np.inf]]),
        np.array([[-(2**31) - 1, 60], [2**62, -(2**62)]]),  # Below all codes of slots.
    ],
)
def test_oov_id_stands_for_all_bad_ids(ids, mode):
    layer = _layer(mode, oov_id=7)
    rows = layer(np.concatenate([ids, [[1, 2]]]))
    np.testing.assert_array_equal(rows, layer.get_table()[[[7, 7], [7, 7], [1, 2]]])


def test_oov_id_is_trained_by_all_bad_ids():
    ids, targets = _data()
    bad = ids % 5 == 2
    tables = []
    for given in (np.where(bad, 1000 - ids * 5000, ids), np.where(bad, 7, ids)):
        layer = _layer(combiner="sum", oov_id=7)
        model = _model(layer)
        model.fit(_dataset(given, targets).apply(lookahead(model)), verbose=0)
        tables.append(layer.get_table())
    np.testing.assert_array_equal(*tables)


# ---- pooling ----------------------------------------------------------------------------------

ID_LISTS = [[3, 3, 7, 1], [5, 0, 2, 2], [9, 11, 3, 8], [1, 1, 1, 1]]
UNEVEN = [[3, 3, 7], [], [5], [0, 2, 2, 9, 11]]
NESTED = [[[3, 3, 7], []], [], [[5], [0, 2], [2, 9, 11, 59]]]
"""Ids of one example are `NESTED[i]`; those that are pooled are innermost."""


def _weighted_like(ids, rng):
    """Weights in the structure of nested lists of ids."""
    if isinstance(ids, list):
        return [_weighted_like(part, rng) for part in ids]
    return float(rng.uniform(0.25, 2.0))


def _sparse(lists, dtype):
    places = [(i, 2 * j) for i, row in enumerate(lists) for j in range(len(row))]
    values = tf.constant([value for row in lists for value in row], dtype)
    return tf.SparseTensor(places, values, [len(lists), 12])


STRUCTURES = {
    "dense": (ID_LISTS, tf.constant),
    "dense_rank_3": ([ID_LISTS[:2], ID_LISTS[2:]], tf.constant),
    "dense_without_lookups": ([[], []], lambda lists, dtype: tf.zeros((2, 0), dtype)),
    "ragged": (UNEVEN, tf.ragged.constant),
    "ragged_rank_3": (NESTED, lambda lists, dtype: tf.ragged.constant(lists, dtype, ragged_rank=2)),
    "ragged_of_dense": (
        [[ID_LISTS[0]], [], ID_LISTS[1:]],
        lambda lists, dtype: tf.RaggedTensor.from_row_lengths(
            tf.constant([row for part in lists for row in part], dtype), [1, 0, 3]
        ),
    ),
    "sparse": (UNEVEN, _sparse),
}


def _pooled(table, ids, weights, combiner, depth=1):
    """What numpy makes of nested lists of ids, `depth` levels above those that are pooled."""
    if depth:
        both = zip(ids, weights, strict=True)
        return [_pooled(table, i, w, combiner, depth - 1) for i, w in both]
    if not ids:
        return np.zeros(DIM)
    factors = np.array(weights)[:, None]
    total = (table[ids].astype("float64") * factors).sum(axis=0)
    return total / {"sum": 1, "mean": factors.sum(), "sqrtn": np.sqrt((factors**2).sum())}[combiner]


def _ones_like(ids):
    return [_ones_like(part) for part in ids] if isinstance(ids, list) else 1.0


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("combiner", COMBINERS)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_pooling_is_what_numpy_says(structure, combiner, weighted):
    ids, make = STRUCTURES[structure]
    weights = _weighted_like(ids, np.random.default_rng(1)) if weighted else _ones_like(ids)
    layer = _layer(combiner=combiner)
    given = {"weights": make(weights, "float32")} if weighted else {}
    pooled = layer(make(ids, "int32"), **given)
    deep = structure in ("dense_rank_3", "ragged_rank_3", "ragged_of_dense")
    expected = _pooled(layer.get_table(), ids, weights, combiner, depth=1 + deep)
    if isinstance(pooled, tf.RaggedTensor):
        assert structure in ("ragged_rank_3", "ragged_of_dense")
        assert pooled.row_lengths().numpy().tolist() == [len(part) for part in ids]
        pooled = pooled.flat_values
        expected = [row for part in expected for row in part]
    assert pooled.shape == np.shape(expected)
    # Float32 against float64.
    np.testing.assert_allclose(pooled, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("structure", ["ragged", "sparse"])
def test_an_example_without_ids_is_zero(structure):
    ids, make = STRUCTURES[structure]
    for combiner in COMBINERS:
        np.testing.assert_array_equal(_layer(combiner=combiner)(make(ids, "int32"))[1], [0, 0, 0])


@pytest.mark.parametrize("combiner", COMBINERS)
def test_weights_that_are_all_zero_give_zero(combiner):
    pooled = _layer(combiner=combiner)(tf.constant([[3, 4]]), weights=tf.zeros((1, 2)))
    np.testing.assert_array_equal(pooled, [[0, 0, 0]])


def test_integer_weights():
    layer = _layer(combiner="mean")
    pooled = layer(tf.constant([[3, 4]]), weights=tf.constant([[1, 3]]))
    table = layer.get_table()
    np.testing.assert_allclose(pooled, [(table[3] + 3 * table[4]) / 4], rtol=1e-6)


def _plainly(table, ids, weights, combiner):
    """Pooling of dense ids by TensorFlow's own ops."""
    total = tf.reduce_sum(tf.gather(table, ids) * weights[..., None], axis=-2)
    if combiner == "sum":
        return total
    norm = weights if combiner == "mean" else tf.square(weights)
    norm = tf.reduce_sum(norm, axis=-1, keepdims=True)
    return total / (norm if combiner == "mean" else tf.sqrt(norm))


@pytest.mark.parametrize("mode", ["synchronous", "host"])
@pytest.mark.parametrize("combiner", COMBINERS)
@pytest.mark.parametrize("structure", ["dense", "ragged", "sparse"])
def test_gradients_reach_weights_and_rows(structure, combiner, mode):
    """All structures hold the same ids; an SGD step of size 1 shows the rows' gradients."""
    weights = np.random.default_rng(1).uniform(0.25, 2.0, (4, 4)).astype("float32")
    upstream = tf.constant(np.random.default_rng(2).normal(size=(4, DIM)), tf.float32)
    make = STRUCTURES[structure][1]
    layer = _layer(mode, combiner=combiner, optimizer=keras.optimizers.SGD(1.0))
    start = layer.get_table()
    variable = tf.Variable(weights.ravel())
    with tf.GradientTape() as tape:
        given = make(ID_LISTS, "float32")
        if structure == "dense":
            given = tf.reshape(variable, (4, 4))
        elif structure == "ragged":
            given = given.with_flat_values(variable + 0.0)
        else:
            given = tf.SparseTensor(given.indices, variable + 0.0, given.dense_shape)
        pooled = layer(make(ID_LISTS, "int32"), weights=given, training=True)
        loss = tf.reduce_sum(pooled * upstream)
    to_weights, to_rows = tape.gradient(loss, [variable, layer.embeddings])
    keras.optimizers.SGD(1.0).apply([to_rows], [layer.embeddings])

    table, plain = tf.Variable(start), tf.Variable(weights)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(_plainly(table, tf.constant(ID_LISTS), plain, combiner) * upstream)
    expected_weights, expected_rows = tape.gradient(loss, [plain, table])
    # The same in float32, added up in another order.
    np.testing.assert_allclose(to_weights, tf.reshape(expected_weights, [-1]), rtol=1e-5, atol=1e-6)
    moved = start - tf.convert_to_tensor(expected_rows)
    np.testing.assert_allclose(layer.get_table(), moved, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("structure", ["ragged", "ragged_rank_3", "sparse"])
def test_a_functional_model_takes_ragged_and_sparse_ids(structure):
    ids, make = STRUCTURES[structure]
    shape = (None, None) if structure == "ragged_rank_3" else (None,)
    kind = {"sparse": True} if structure == "sparse" else {"ragged": True}
    if structure == "sparse":
        shape = (12,)
    layer = _layer(combiner="sum")
    inputs = keras.Input(shape, dtype="int32", **kind)
    model = keras.Model(inputs, layer(inputs))
    direct = layer(make(ids, "int32"))
    called = model(make(ids, "int32"))
    if structure == "ragged_rank_3":
        direct, called = direct.to_tensor(), called.to_tensor()
    np.testing.assert_array_equal(called, direct)


# ---- mask_zero --------------------------------------------------------------------------------


def test_the_mask_is_that_of_keras_embedding():
    ids = np.array([[3, 0, 5], [0, 0, 1]])
    plain = keras.layers.Embedding(ROWS, DIM, mask_zero=True)
    layer = _layer(mask_zero=True)
    assert layer.supports_masking
    np.testing.assert_array_equal(layer.compute_mask(ids), plain.compute_mask(ids))
    np.testing.assert_array_equal(layer(ids)._keras_mask, plain(ids)._keras_mask)
    assert _layer().compute_mask(ids) is None


def test_the_mask_reaches_the_next_layer():
    ids, _ = _data()
    inputs = keras.Input((LOOKUPS,), dtype="int32")

    def predictions(layer):
        pooled = keras.layers.GlobalAveragePooling1D()(layer(inputs))
        return keras.Model(inputs, pooled).predict(ids, verbose=0)

    start = keras.initializers.RandomUniform(seed=3)
    plain = keras.layers.Embedding(ROWS, DIM, start, mask_zero=True)
    np.testing.assert_array_equal(predictions(_layer(mask_zero=True)), predictions(plain))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("structure", ["dense", "ragged", "sparse"])
@pytest.mark.parametrize("combiner", COMBINERS)
def test_masked_ids_count_neither_above_nor_below_the_line(combiner, structure, weighted):
    ids = [[3, 0, 7, 0], [0, 0, 0, 0], [5, 5, 1, 2]]
    weights = [[0.5, 3.0, 2.0, 1.0], [1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0]]
    make = STRUCTURES[structure][1]
    layer = _layer(combiner=combiner, mask_zero=True)
    given = {"weights": make(weights, "float32")} if weighted else {}
    kept = [[3, 7], [], [5, 5, 1, 2]]
    of_kept = [[0.5, 2.0], [], [1.0, 2.0, 3.0, 4.0]] if weighted else _ones_like(kept)
    expected = _pooled(layer.get_table(), kept, of_kept, combiner)
    pooled = layer(make(ids, "int32"), **given)
    np.testing.assert_allclose(pooled, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("combiner", "executor"), [(None, "thread"), ("mean", "inline"), ("sqrtn", "thread")]
)
def test_planned_batches_are_masked_as_plain_ones(combiner, executor):
    ids, targets = _data()
    tables, histories = [], []
    for mode in ("host", "pipelined"):
        layer = _layer(mode, combiner=combiner, mask_zero=True)
        head = keras.layers.GlobalAveragePooling1D() if combiner is None else None
        model = _model(layer, head)
        train = _dataset(ids, targets).apply(lookahead(model, executor=executor))
        histories.append(model.fit(train, epochs=2, verbose=0).history)
        tables.append(layer.get_table())
    assert histories[0] == histories[1]
    np.testing.assert_array_equal(*tables)


def test_masking_changes_what_is_trained():
    """So that the test above compares something."""
    ids, targets = _data()
    tables = []
    for mask_zero in (True, False):
        layer = _layer("host", combiner="mean", mask_zero=mask_zero)
        _model(layer).fit(_dataset(ids, targets), verbose=0)
        tables.append(layer.get_table())
    assert np.abs(tables[0] - tables[1]).max() > 1e-3


# ---- shapes and dtypes ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("combiner", "shape", "expected"),
    [
        (None, (), (None, DIM)),
        (None, (4,), (None, 4, DIM)),
        (None, (None,), (None, None, DIM)),
        (None, (2, 4), (None, 2, 4, DIM)),
        ("sum", (4,), (None, DIM)),
        ("mean", (2, 4), (None, 2, DIM)),
        ("sqrtn", (None,), (None, DIM)),
    ],
)
def test_symbolic_shapes(combiner, shape, expected):
    layer = _layer(combiner=combiner)
    outputs = layer(keras.Input(shape, dtype="int32"))
    assert outputs.shape == layer.compute_output_shape((None, *shape)) == expected
    assert outputs.dtype == "float32"


@pytest.mark.parametrize("combiner", [None, "sum"])
def test_static_shapes_in_a_graph(combiner):
    layer = _layer(combiner=combiner)

    @tf.function(input_signature=[tf.TensorSpec([None, 4], tf.int32)])
    def rows(ids):
        return layer(ids, training=True)

    expected = [None, 4, DIM] if combiner is None else [None, DIM]
    assert rows.get_concrete_function().structured_outputs.shape.as_list() == expected


@pytest.mark.parametrize("mode", MODES)
def test_mixed_bfloat16_computes_in_bfloat16_and_trains_float32(mode):
    layer = _layer(mode, dtype="mixed_bfloat16")
    rows = layer(tf.constant([3, 5]))
    assert rows.dtype == tf.bfloat16
    assert layer.get_table().dtype == np.float32
    np.testing.assert_array_equal(rows, tf.cast(layer.get_table()[[3, 5]], tf.bfloat16))
    assert layer(keras.Input((4,), dtype="int32")).dtype == "bfloat16"


def test_mixed_bfloat16_trains_planned_as_on_the_host():
    ids, targets = _data()
    tables = []
    for mode in ("host", "pipelined"):
        layer = _layer(mode, combiner="sum", dtype="mixed_bfloat16")
        start = layer.get_table()
        model = _model(layer)
        model.fit(_dataset(ids, targets).apply(lookahead(model)), verbose=0)
        tables.append(layer.get_table())
    np.testing.assert_array_equal(*tables)
    assert np.any(tables[0] != start)


def test_float64_tables():
    layer = _layer(dtype="float64")
    assert layer(tf.constant([3])).dtype == tf.float64
    assert layer.get_table().dtype == np.float64


# ---- one weight -------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_the_table_is_the_only_weight(mode):
    ids, targets = _data()
    layer = _layer(mode, combiner="sum", optimizer="adam")
    model = _model(layer)
    for trained in (False, True):
        if trained:  # Which makes slots, counters and moments.
            model.fit(_dataset(ids, targets).apply(lookahead(model)), verbose=0)
        assert layer.count_params() == ROWS * DIM
        assert model.count_params() == ROWS * DIM + DIM + 1
        assert [tuple(weight.shape) for weight in layer.weights] == [(ROWS, DIM)]
        assert [weight.path for weight in model.weights] == [
            "table/embeddings",
            *(weight.path for weight in model.layers[-1].weights),
        ]
        assert len(model.trainable_weights) == len(model.trainable_variables) == 3
        assert not layer.non_trainable_variables
        assert not model.non_trainable_variables
        assert [weight.shape for weight in layer.get_weights()] == [(ROWS, DIM)]


def test_the_summary_counts_the_table_once(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    model = _model(_layer(combiner="sum"))
    lines = []
    model.summary(print_fn=lines.append, line_length=120)
    text = "\n".join(lines)
    assert f"Total params: {ROWS * DIM + DIM + 1} " in text
    assert f"Trainable params: {ROWS * DIM + DIM + 1} " in text
    assert "Non-trainable params: 0 " in text
    assert re.findall(rf"\b{ROWS * DIM}\b", text) == [str(ROWS * DIM)]


@pytest.mark.parametrize("mode", MODES)
def test_weights_are_got_and_set_as_of_any_layer(mode):
    ids, targets = _data()
    layer = _layer(mode, combiner="sum")
    model = _model(layer)
    model.fit(_dataset(ids, targets).apply(lookahead(model)), verbose=0)
    np.testing.assert_array_equal(model.get_weights()[0], layer.get_table())
    np.testing.assert_array_equal(layer.embeddings.numpy(), layer.get_table())
    np.testing.assert_array_equal(np.asarray(layer.embeddings)[5], layer.embeddings[5])
    values = np.arange(ROWS * DIM, dtype="float32").reshape(ROWS, DIM)
    model.set_weights([values, *model.get_weights()[1:]])
    np.testing.assert_array_equal(layer.get_table(), values)
    np.testing.assert_array_equal(layer(tf.constant([[3, 5]])), [values[3] + values[5]])


def test_set_table_refuses_another_shape_and_changes_nothing():
    layer = _layer()
    start = layer.get_table()
    for shape in [(ROWS, DIM + 1), (ROWS + 1, DIM), (1, DIM), (), (ROWS * DIM,)]:
        with pytest.raises(ValueError, match=r"has shape \(60, 3\). Received: values of shape"):
            layer.set_table(np.zeros(shape))
    np.testing.assert_array_equal(layer.get_table(), start)


@pytest.mark.parametrize("mode", MODES)
def test_what_get_table_returns_is_a_copy(mode):
    layer = _layer(mode)
    copy = layer.get_table()
    layer(tf.constant([3]))
    later = layer.get_table()
    copy[:] = later[:] = 0
    assert np.all(layer.get_table() != 0)
    given = np.ones((ROWS, DIM), "float32")
    layer.set_table(given)
    given[:] = 0
    assert np.all(layer.get_table() == 1)


# ---- frozen -----------------------------------------------------------------------------------


@pytest.mark.parametrize("executor", ["thread", None])
def test_the_rows_of_a_frozen_layer_rest_and_the_others_train_on(executor):
    ids, targets = _data()
    dense = []
    for mode in ("host", "pipelined"):
        layer = _layer(mode, combiner="sum", num_slots=40, trainable=False)
        model = _model(layer)
        assert len(model.trainable_weights) == 2
        start = layer.get_table()
        train = _dataset(ids, targets)
        if executor:
            train = train.apply(lookahead(model, executor=executor))
        model.fit(train, epochs=3, verbose=0)
        np.testing.assert_array_equal(layer.get_table(), start)
        dense.append(model.layers[-1].get_weights())
        assert int(model.optimizer.iterations) == 18
    for one, other in zip(*dense, strict=True):
        np.testing.assert_array_equal(one, other)
    assert np.any(dense[0][1] != 0)


def test_freezing_and_thawing_between_fits():
    ids, targets = _data()
    layer = _layer(combiner="sum", num_slots=40)
    model = _model(layer)
    for trainable in (True, False, True):
        layer.trainable = trainable
        model.compile(keras.optimizers.Adagrad(0.1), "mse")
        before = layer.get_table()
        model.fit(_dataset(ids, targets).apply(lookahead(model, debug=True)), verbose=0)
        assert np.any(layer.get_table() != before) == trainable


# ---- read and written while batches are in flight ---------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "executor"),
    [(keras.optimizers.SGD, "thread"), (keras.optimizers.Adam, "inline")],
)
def test_the_table_is_right_while_batches_are_in_flight(optimizer, executor):
    ids, targets = _data(batches=12)
    models = []
    for mode in ("host", "pipelined"):
        layer = _layer(mode, combiner="sum", num_slots=40)
        models.append((layer, _model(layer, optimizer=optimizer(0.1))))
    (on_host, plain_model), (cached, model) = models
    train = _dataset(ids, targets).apply(lookahead(model, executor=executor))
    steps = zip(train, _dataset(ids, targets), strict=True)
    for number, (planned, plain) in enumerate(steps):
        model.train_on_batch(*planned)
        plain_model.train_on_batch(*plain)
        if number % 3 == 0:
            np.testing.assert_array_equal(cached.get_table(), on_host.get_table())
        if number % 4 == 1:
            cached.flush()
        if number % 5 == 2:
            values = on_host.get_table()[::-1] * 2
            cached.set_table(values)
            on_host.set_table(values)
        if number % 4 == 3:  # Plain ids are read in between.
            np.testing.assert_array_equal(model(ids[:BATCH]), plain_model(ids[:BATCH]))
    np.testing.assert_array_equal(cached.get_table(), on_host.get_table())
    assert cached.stats().evictions > 0


# ---- where rows come from ---------------------------------------------------------------------

INITIALIZERS = {
    "uniform": keras.initializers.RandomUniform(-0.2, 0.3, seed=3),
    "normal": keras.initializers.RandomNormal(0.5, 0.1, seed=3),
    "truncated": keras.initializers.TruncatedNormal(0.5, 0.1, seed=3),
    "glorot_uniform": keras.initializers.GlorotUniform(seed=3),
    "glorot_normal": keras.initializers.GlorotNormal(seed=3),
    "he_normal": keras.initializers.HeNormal(seed=3),
    "lecun_uniform": keras.initializers.LecunUniform(seed=3),
    "untruncated": keras.initializers.VarianceScaling(
        2.0, mode="fan_out", distribution="untruncated_normal", seed=3
    ),
}
CONSTANTS = {
    "zeros": keras.initializers.Zeros(),
    "ones": keras.initializers.Ones(),
    "constant": keras.initializers.Constant(0.25),
}


def _drawn(initializer, by_row, mode="host", rows=2000, dim=8):
    hot = {"hot_ids": [3, 1, 40]} if mode == "static" else {}
    return ScratchPipeEmbedding(
        rows,
        dim,
        embeddings_initializer=initializer,
        initialize_by_row=by_row,
        mode=mode,
        **hot,
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["uniform", "truncated", "he_normal", "constant"])
def test_a_whole_draw_is_the_initializers_own(name, mode):
    initializer = {**INITIALIZERS, **CONSTANTS}[name]
    layer = _drawn(initializer, False, mode, rows=ROWS, dim=DIM)
    np.testing.assert_array_equal(
        layer(tf.constant([3, 5])), initializer((ROWS, DIM)).numpy()[[3, 5]]
    )
    np.testing.assert_array_equal(layer.get_table(), initializer((ROWS, DIM)))


def test_initializers_that_cannot_draw_rows_can_draw_the_table():
    initializer = keras.initializers.Orthogonal(seed=3)
    layer = _drawn(initializer, None, rows=ROWS, dim=DIM)
    np.testing.assert_array_equal(layer.get_table(), initializer((ROWS, DIM)))


@pytest.mark.parametrize("name", INITIALIZERS)
def test_rows_drawn_one_by_one_have_the_initializers_distribution(name):
    initializer = INITIALIZERS[name]
    mine = np.sort(_drawn(initializer, True).get_table(), axis=None)
    theirs = np.sort(initializer((2000, 8)), axis=None)
    assert not np.array_equal(mine, theirs)
    places = np.concatenate([mine, theirs])
    shares = [np.searchsorted(part, places, "right") / part.size for part in (mine, theirs)]
    # Kolmogorov and Smirnov: equal distributions differ by more in one of 10**6 cases.
    assert np.abs(shares[0] - shares[1]).max() < 2.7 * np.sqrt(2 / mine.size)
    deviation = theirs.std()
    np.testing.assert_allclose(mine.mean(), theirs.mean(), atol=0.05 * deviation)
    np.testing.assert_allclose(mine.std(), deviation, rtol=0.03)
    if name in ("uniform", "truncated", "glorot_uniform", "glorot_normal", "he_normal"):
        reach = np.abs(theirs - theirs.mean()).max()
        assert np.abs(mine - theirs.mean()).max() < 1.02 * reach  # Bounded as theirs are.


def test_rows_drawn_one_by_one_are_not_alike():
    """Neither rows nor columns depend on each other."""
    table = _drawn(INITIALIZERS["normal"], True).get_table()
    assert np.unique(table).size > 0.99 * table.size
    between_columns = np.corrcoef(table.T) - np.eye(8)
    between_rows = np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]
    assert np.abs(between_columns).max() < 5 / np.sqrt(2000)
    assert abs(between_rows) < 5 / np.sqrt(16_000)


@pytest.mark.parametrize("name", CONSTANTS)
def test_constant_rows_drawn_one_by_one(name):
    table = _drawn(CONSTANTS[name], True, rows=ROWS, dim=DIM).get_table()
    np.testing.assert_array_equal(table, CONSTANTS[name]((ROWS, DIM)))


def test_seeds_tell_tables_apart():
    tables = [
        _drawn(keras.initializers.RandomUniform(seed=seed), True).get_table() for seed in (1, 1, 2)
    ]
    np.testing.assert_array_equal(tables[0], tables[1])
    assert np.all(tables[0] != tables[2])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["uniform", "truncated"])
def test_a_row_is_the_same_whenever_and_wherever_it_is_drawn(name, mode):
    expected = _drawn(INITIALIZERS[name], True, rows=ROWS, dim=DIM).get_table()
    layer = _drawn(INITIALIZERS[name], True, mode, rows=ROWS, dim=DIM)
    for ids in ([59, 3], [3, 7, 7, 0], [1]):
        np.testing.assert_array_equal(layer(tf.constant(ids)), expected[ids])
    np.testing.assert_array_equal(layer.get_table(), expected)


@pytest.mark.parametrize(
    ("by_row", "optimizer"), [(True, keras.optimizers.SGD), (False, keras.optimizers.Adagrad)]
)
def test_all_modes_train_to_the_same_table(by_row, optimizer):
    ids, targets = _data()
    tables = {}
    for mode in MODES:
        layer = _layer(mode, combiner="sum", initialize_by_row=by_row, num_slots=40)
        model = _model(layer, optimizer=optimizer(0.1))
        model.fit(_dataset(ids, targets).apply(lookahead(model)), verbose=0)
        tables[mode] = layer.get_table()
    for mode in MODES:
        # TensorFlow's graph optimizer has Adagrad divide by a root in a way that depends on where
        # in a vector a row is, and "static" trains its rows in two vectors.
        inexact = mode == "static" and optimizer is keras.optimizers.Adagrad
        limit = 1e-8 if inexact else 0.0
        np.testing.assert_allclose(tables[mode], tables["host"], 0, limit, err_msg=mode)


@pytest.mark.parametrize(("largest", "by_row"), [(ROWS * DIM, False), (ROWS * DIM - 1, True)])
def test_none_draws_large_tables_by_row(monkeypatch, largest, by_row):
    monkeypatch.setattr(initial_rows, "LARGEST_WHOLE", largest)
    expected = _drawn(INITIALIZERS["uniform"], by_row, rows=ROWS, dim=DIM).get_table()
    drawn = _drawn(INITIALIZERS["uniform"], None, rows=ROWS, dim=DIM).get_table()
    np.testing.assert_array_equal(drawn, expected)


@pytest.mark.parametrize(
    "initializer",
    [
        keras.initializers.Orthogonal(seed=1),
        keras.initializers.Identity(),
        lambda shape, dtype=None: tf.zeros(shape, dtype),
        keras.initializers.RandomUniform(seed=keras.random.SeedGenerator(1)),
    ],
)
def test_initializers_that_cannot_draw_rows_are_refused(initializer):
    with pytest.raises(ValueError, match="Rows can be drawn one by one from the distributions of"):
        _drawn(initializer, True).get_table()

"""What the layer refuses, with the phrase that says why, and what nearly has to be refused: a layer
called twice in a step, gradients taken twice, `jit_compile=True`.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_scratchpipe import BadIdError, ScratchPipeEmbedding, lookahead

ROWS, DIM, BATCH, LOOKUPS = 60, 4, 8, 3
MODES = ["pipelined", "synchronous", "static", "host"]
UNKNOWN = ["Lion", "Adadelta", "Adamax", "Nadam", "Adafactor"]


def _layer(mode="pipelined", **settings):
    if mode == "static":
        settings["hot_ids"] = [3, 1, 40]
    start = keras.initializers.RandomUniform(seed=3)
    settings = {"combiner": "sum", "embeddings_initializer": start, **settings}
    return ScratchPipeEmbedding(ROWS, DIM, mode=mode, name="table", **settings)


def _model(layer, optimizer=None, **compiling):
    inputs = keras.Input((LOOKUPS,), dtype="int32", name="ids")
    kernel = keras.initializers.GlorotUniform(seed=1)
    model = keras.Model(inputs, keras.layers.Dense(1, kernel_initializer=kernel)(layer(inputs)))
    model.compile(optimizer or keras.optimizers.Adagrad(0.1), "mse", **compiling)
    return model


def _data(batches=4):
    rng = np.random.default_rng(0)
    ids = rng.integers(0, ROWS, (batches * BATCH, LOOKUPS)).astype("int32")
    ids[:, 0] = ids[:, 1]
    return ids, rng.random((batches * BATCH, 1)).astype("float32")


def _dataset(*data):
    return tf.data.Dataset.from_tensor_slices(data).batch(BATCH)


# ---- optimizers -------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["name", "instance"])
@pytest.mark.parametrize("name", UNKNOWN)
def test_optimizers_without_a_row_formula(name, given):
    optimizer = name if given == "name" else getattr(keras.optimizers, name)()
    known = "'SGD', 'Adagrad', 'RowwiseAdagrad', 'Adam', 'AdamW', 'RMSprop', 'Ftrl'"
    text = f"can be trained by {known}. Received: optimizer={name}. Pass one"
    with pytest.raises(ValueError, match=text):
        _layer(optimizer=optimizer)


@pytest.mark.parametrize("mode", ["pipelined", "host"])
@pytest.mark.parametrize("name", ["Lion", "Nadam"])
def test_models_optimizers_without_a_row_formula(name, mode):
    layer = _layer(mode)
    start = layer.get_table()
    model = _model(layer, getattr(keras.optimizers, name)())
    with pytest.raises(ValueError, match=f"Received: optimizer={name}. Pass one of these as"):
        model.fit(*_data(), batch_size=BATCH, verbose=0)
    np.testing.assert_array_equal(layer.get_table(), start)


def test_lookahead_refuses_a_models_optimizer_without_a_row_formula():
    model = _model(_layer(), keras.optimizers.Nadam())
    with pytest.raises(ValueError, match=r"Received: optimizer=Nadam. Pass one of these as"):
        _dataset(*_data()).apply(lookahead(model))


def test_a_models_optimizer_without_a_row_formula_trains_beside_the_rows_own():
    layer = _layer(optimizer=keras.optimizers.SGD(0.1))
    start = layer.get_table()
    model = _model(layer, keras.optimizers.Lion())
    model.fit(_dataset(*_data()).apply(lookahead(model)), verbose=0)
    assert np.any(layer.get_table() != start)


def test_a_users_own_class_of_a_known_name():
    class Adam(keras.optimizers.Adam):
        pass

    with pytest.raises(ValueError, match=r"Received: optimizer=Adam. Pass one of these"):
        _layer(optimizer=Adam())


# What stands in the message beside the setting.
SETTINGS = {"global_clipnorm": (1.0, "Use `clipnorm`"), "use_ema": (True, "Leave it out")}


@pytest.mark.parametrize("optimizer", [keras.optimizers.SGD, keras.optimizers.Adam])
@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_of_the_rows_optimizer(setting, optimizer):
    value, remedy = SETTINGS[setting]
    with pytest.raises(ValueError, match=rf"cannot keep {setting}={value} of optimizer.*{remedy}"):
        _layer(optimizer=optimizer(**{setting: value}))


@pytest.mark.parametrize("mode", ["pipelined", "host"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_of_the_models_optimizer(setting, mode):
    value, _ = SETTINGS[setting]
    layer = _layer(mode)
    start = layer.get_table()
    model = _model(layer, keras.optimizers.SGD(0.1, **{setting: value}))
    with pytest.raises(ValueError, match=f"cannot keep {setting}={value} of optimizer 'SGD'"):
        model.fit(*_data(), batch_size=BATCH, verbose=0)
    np.testing.assert_array_equal(layer.get_table(), start)


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_of_the_models_optimizer_that_would_not_reach_rows_with_their_own(setting):
    """Averages and the norm of all gradients are of the step as a whole."""
    value, _ = SETTINGS[setting]
    model = _model(_layer(optimizer="sgd"), keras.optimizers.SGD(0.1, **{setting: value}))
    with pytest.raises(ValueError, match=f"cannot keep {setting}={value} of optimizer 'SGD'"):
        model.fit(_dataset(*_data()).apply(lookahead(model)), verbose=0)


def test_a_loss_scale_of_the_rows_own_optimizer():
    with pytest.raises(
        ValueError, match=r"Received: loss_scale_factor=8.0. The optimizer that the"
    ):
        _layer(optimizer=keras.optimizers.SGD(0.1, loss_scale_factor=8.0))


def test_rows_and_model_that_accumulate_over_different_numbers_of_steps():
    own = keras.optimizers.SGD(0.1, gradient_accumulation_steps=3)
    model = _model(_layer(optimizer=own), keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps=3 of the layer's, 2 of the"):
        _dataset(*_data()).apply(lookahead(model))


def test_accumulation_that_nobody_knew_of_when_batches_were_planned():
    layer = _layer(optimizer="sgd")
    # In a graph the step is traced, which tells, before the first batch is fetched.
    accumulating = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    model = _model(layer, accumulating, run_eagerly=True)
    train = _dataset(*_data()).apply(lookahead(layer))
    with pytest.raises(ValueError, match="learns in the middle of a pass of `lookahead`"):
        model.fit(train, verbose=0)


def test_decay_of_the_other_weights_does_not_reach_rows_with_their_own_optimizer():
    tables = []
    for decay in (None, 0.1):
        layer = _layer(optimizer=keras.optimizers.SGD(0.0))
        model = _model(layer, keras.optimizers.SGD(0.0, weight_decay=decay))
        model.fit(_dataset(*_data()).apply(lookahead(model)), verbose=0)
        tables.append(layer.get_table())
    np.testing.assert_array_equal(*tables)


def test_a_layer_that_nobody_has_told_an_optimizer():
    layer = _layer()
    with pytest.raises(ValueError, match="does not know its row optimizer"):
        _dataset(_data()[0]).apply(lookahead(layer))


# ---- dtypes and strategies --------------------------------------------------------------------


@pytest.mark.parametrize("make", [tf.distribute.MirroredStrategy, tf.distribute.OneDeviceStrategy])
def test_strategies(make):
    strategy = make(["CPU:0"]) if make is tf.distribute.MirroredStrategy else make("CPU:0")
    text = f"under a tf.distribute strategy. Received: {make.__name__}"
    with strategy.scope(), pytest.raises(ValueError, match=text):
        _layer()(tf.constant([[1]]))


# ---- arguments --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("embeddings_regularizer", "l2"),
        ("embeddings_constraint", "max_norm"),
        ("lora_rank", 4),
    ],
)
def test_arguments_of_keras_embedding_that_need_the_whole_table(argument, value):
    with pytest.raises(ValueError, match=f"does not support `{argument}`: there is no tensor of"):
        _layer(**{argument: value})
    _layer(**{argument: None})


@pytest.mark.parametrize("value", [0, -1, 1.5, "7", True])
@pytest.mark.parametrize("argument", ["input_dim", "output_dim", "num_slots"])
def test_sizes_that_are_no_positive_integers(argument, value):
    sizes = {"input_dim": ROWS, "output_dim": DIM, argument: value}
    text = f"`{argument}` must be a positive integer. Received: {argument}={value}"
    with pytest.raises(ValueError, match=text):
        ScratchPipeEmbedding(**sizes)


@pytest.mark.parametrize("argument", ["input_dim", "output_dim"])
def test_sizes_that_are_missing(argument):
    sizes = {"input_dim": ROWS, "output_dim": DIM, argument: None}
    with pytest.raises(ValueError, match=f"`{argument}` must be a positive integer"):
        ScratchPipeEmbedding(**sizes)


def test_numpy_integers_are_sizes():
    layer = ScratchPipeEmbedding(np.int64(ROWS), np.int32(DIM), np.int64(40))
    assert (layer.input_dim, layer.output_dim, layer.num_slots) == (ROWS, DIM, 40)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("combiner", "max"),
        ("combiner", True),
        ("mode", "gpu"),
        ("mode", None),
        ("replacement", "fifo"),
    ],
)
def test_names_that_are_not_known(argument, value):
    with pytest.raises(ValueError, match=f"`{argument}` must be one of .*Received: {argument}="):
        ScratchPipeEmbedding(ROWS, DIM, **{argument: value})


@pytest.mark.parametrize("oov_id", [-1, ROWS])
def test_an_oov_id_that_is_no_row(oov_id):
    with pytest.raises(ValueError, match="`oov_id` must be a row number from 0 to input_dim - 1"):
        _layer(oov_id=oov_id)


def test_arguments_that_do_not_exist():
    with pytest.raises((TypeError, ValueError), match="capacity"):
        _layer(capacity=5)


@pytest.mark.parametrize("mode", ["pipelined", "synchronous", "host"])
def test_hot_ids_in_another_mode_than_static(mode):
    with pytest.raises(ValueError, match=f"no other mode does. Received: mode='{mode}'"):
        _layer(mode, hot_ids=[1, 2])


def test_static_without_hot_ids():
    with pytest.raises(ValueError, match=r"Mode 'static' needs `hot_ids`.*hot_ids=None"):
        ScratchPipeEmbedding(ROWS, DIM, mode="static")


@pytest.mark.parametrize("hot_ids", [[1, -1], [1, ROWS], [1.5]])
def test_hot_ids_that_are_no_rows(hot_ids):
    with pytest.raises(BadIdError, match="in feature 'hot_ids', among them"):
        ScratchPipeEmbedding(ROWS, DIM, mode="static", hot_ids=hot_ids)


def test_hot_ids_named_twice():
    with pytest.raises(ValueError, match="`hot_ids` must name each id once"):
        ScratchPipeEmbedding(ROWS, DIM, mode="static", hot_ids=[1, 2, 1])


# ---- calls ------------------------------------------------------------------------------------

IDS = [[3, 4], [5, 6]]


def test_weights_without_a_combiner():
    with pytest.raises(ValueError, match=r"`weights` need a combiner. Received: combiner=None"):
        _layer(combiner=None)(tf.constant(IDS), weights=tf.ones((2, 2)))


def test_weights_of_another_shape():
    with pytest.raises(ValueError, match="`weights` must have the shape of the ids"):
        _layer()(tf.constant(IDS), weights=tf.ones((2, 3)))


@pytest.mark.parametrize("ids", ["dense", "ragged", "sparse"])
@pytest.mark.parametrize("weights", ["dense", "ragged", "sparse"])
def test_weights_of_another_structure(ids, weights):
    make = {
        "dense": tf.constant,
        "ragged": tf.ragged.constant,
        "sparse": lambda lists: tf.sparse.from_dense(tf.constant(lists)),
    }
    layer = _layer()
    given = make[weights]([[1.0, 2.0], [3.0, 4.0]])
    if ids == weights:
        layer(make[ids](IDS), weights=given)
        return
    with pytest.raises(ValueError, match="`weights` must have the structure of the ids"):
        layer(make[ids](IDS), weights=given)


def test_ragged_weights_with_other_row_lengths():
    ids, weights = tf.ragged.constant([[3, 4], [5]]), tf.ragged.constant([[1.0], [2.0, 3.0]])
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="`weights` must have"):
        _layer()(ids, weights=weights)


def test_sparse_ids_without_a_combiner():
    with pytest.raises(ValueError, match=r"Sparse ids have to be pooled. Received: combiner=None"):
        _layer(combiner=None)(tf.sparse.from_dense(tf.constant(IDS)))


def test_sparse_ids_of_another_rank():
    ids = tf.sparse.from_dense(tf.constant([IDS]))
    with pytest.raises(ValueError, match=r"Sparse ids must have shape \(batch, n\)"):
        _layer()(ids)


@pytest.mark.parametrize("symbolic", [True, False])
def test_ids_without_a_dimension_to_pool_over(symbolic):
    ids = keras.Input((), dtype="int32") if symbolic else tf.constant([3, 4])
    text = "With a combiner, ids need a last dimension to pool over. Received: combiner='sum'"
    with pytest.raises(ValueError, match=text):
        _layer()(ids)


def test_strings_are_no_ids():
    with pytest.raises((ValueError, TypeError, tf.errors.InvalidArgumentError)):
        _layer()(tf.constant([["a", "b"]]))


# ---- the table as a tensor --------------------------------------------------------------------

READERS = {
    "tf.convert_to_tensor": tf.convert_to_tensor,
    "tf.matmul": lambda weight: tf.matmul(tf.ones((1, ROWS)), weight),
    "tf.reduce_sum": tf.reduce_sum,
    "keras.ops.sum": keras.ops.sum,
    "keras.ops.matmul": lambda weight: keras.ops.matmul(keras.ops.ones((1, ROWS)), weight),
    "product": lambda weight: weight * 2,
    "tf.gather": lambda weight: tf.gather(weight, [1, 2]),
}


@pytest.mark.parametrize("mode", ["pipelined", "host"])
@pytest.mark.parametrize("reader", READERS)
def test_the_weight_is_no_tensor(reader, mode):
    layer = _layer(mode)
    layer.build()
    with pytest.raises(ValueError, match="stands for a table that is not a tensor"):
        READERS[reader](layer.embeddings)


@pytest.mark.parametrize("change", ["assign_add", "assign_sub"])
def test_the_weight_is_not_added_to(change):
    layer = _layer()
    layer.build()
    start = layer.get_table()
    with pytest.raises(ValueError, match="stands for a table that is not a tensor; it cannot be"):
        getattr(layer.embeddings, change)(np.ones((ROWS, DIM)))
    np.testing.assert_array_equal(layer.get_table(), start)


def test_the_weight_is_assigned_as_a_whole():
    layer = _layer()
    layer.build()
    layer.embeddings.assign(tf.ones((ROWS, DIM)))
    np.testing.assert_array_equal(layer.get_table(), np.ones((ROWS, DIM)))
    with pytest.raises(ValueError, match=r"has shape \(60, 4\)"):
        layer.embeddings.assign(np.ones((ROWS, 1)))


class InALoop(keras.Model):
    """Looks the columns of a batch up in a loop."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def call(self, ids, training=None):
        def body(step, total):
            rows = self.layer(ids[:, step : step + 1], training=training)
            return step + 1, total + tf.reduce_sum(rows, axis=-1, keepdims=True)

        start = (tf.constant(0), tf.zeros((tf.shape(ids)[0], 1)))
        return tf.while_loop(
            lambda step, _: step < LOOKUPS,
            body,
            start,
            shape_invariants=(tf.TensorShape([]), tf.TensorShape([None, 1])),
        )[1]


@pytest.mark.parametrize("mode", ["synchronous", "host"])
def test_a_loop_in_a_graph_is_refused(mode):
    """Its gradient would be a dense sum, which TensorFlow cannot make or the weight cannot take."""
    layer = _layer(mode)
    start = layer.get_table()
    model = InALoop(layer)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    with pytest.raises((ValueError, TypeError)):
        model.fit(*_data(), batch_size=BATCH, verbose=0)
    np.testing.assert_array_equal(layer.get_table(), start)


def test_a_loop_in_a_graph_may_read():
    layer = _layer()
    ids, _ = _data(1)
    model = InALoop(layer)
    predicted = model.predict(ids, verbose=0)
    expected = layer.get_table()[ids].sum(axis=(1, 2))[:, None]
    np.testing.assert_allclose(predicted, expected, rtol=1e-5, atol=1e-6)


# ---- what works -------------------------------------------------------------------------------


def test_keras_turns_jit_compile_off_with_its_own_warning():
    tables = []
    for jit_compile in (True, False):
        layer = _layer()
        if jit_compile:
            with pytest.warns(UserWarning, match="`jit_compile=True`"):
                model = _model(layer, jit_compile=True)
        else:
            model = _model(layer, jit_compile=False)
        assert not model.jit_compile
        model.fit(_dataset(*_data()).apply(lookahead(model)), verbose=0)
        tables.append(layer.get_table())
    np.testing.assert_array_equal(*tables)


def _twice(mode, optimizer):
    """One layer on two features, whose batches have ids in common."""
    layer = _layer(mode, num_slots=None if mode == "static" else 50)
    inputs = {name: keras.Input((LOOKUPS,), dtype="int32", name=name) for name in ("a", "b")}
    kernel = keras.initializers.GlorotUniform(seed=1)
    pooled = keras.layers.Add()([layer(inputs["a"]), layer(inputs["b"])])
    model = keras.Model(inputs, keras.layers.Dense(1, kernel_initializer=kernel)(pooled))
    model.compile(optimizer(0.1), "mse")
    return model, layer


def _once(optimizer):
    layer = _layer("host")
    inputs = {name: keras.Input((LOOKUPS,), dtype="int32", name=name) for name in ("a", "b")}
    kernel = keras.initializers.GlorotUniform(seed=1)
    pooled = layer(keras.layers.Concatenate()([inputs["a"], inputs["b"]]))
    model = keras.Model(inputs, keras.layers.Dense(1, kernel_initializer=kernel)(pooled))
    model.compile(optimizer(0.1), "mse")
    return model, layer


@pytest.mark.parametrize("optimizer", [keras.optimizers.Adagrad, keras.optimizers.Adam])
def test_two_calls_in_a_step_move_each_row_once(optimizer):
    ids, targets = _data(8)
    features = {"a": ids, "b": np.where(ids % 2, ids, ids[::-1])}
    tables = {}
    for mode in ("pipelined", "synchronous", "host"):
        model, layer = _twice(mode, optimizer)
        train = _dataset(features, targets).apply(lookahead(model))
        model.fit(train, epochs=2, verbose=0)
        tables[mode] = layer.get_table()
    model, layer = _once(optimizer)
    model.fit(_dataset(features, targets), epochs=2, verbose=0)
    np.testing.assert_array_equal(tables["pipelined"], tables["host"])
    np.testing.assert_array_equal(tables["synchronous"], tables["host"])
    # The gradients of a row are added up in another order.
    np.testing.assert_allclose(tables["host"], layer.get_table(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mode", ["pipelined", "synchronous", "host"])
def test_gradients_taken_twice_and_applied_once_move_rows_once(mode):
    ids, targets = _data()
    tables = []
    for taken in (1, 2):
        layer = _layer(mode)
        model = _model(layer)

        @tf.function
        def step(ids, targets, model=model, taken=taken):
            with tf.GradientTape(persistent=True) as tape:
                loss = tf.reduce_mean(tf.square(model(ids, training=True) - targets))
            for _ in range(taken):
                gradients = tape.gradient(loss, model.trainable_variables)
            model.optimizer.apply(gradients, model.trainable_variables)

        for batch in _dataset(ids, targets).apply(lookahead(model)):
            step(*batch)
        tables.append(layer.get_table())
    np.testing.assert_array_equal(*tables)


@pytest.mark.parametrize("mode", ["synchronous", "host"])
def test_gradients_of_two_losses_are_applied_as_their_sum(mode):
    """Taken from one persistent tape, joined, and applied once."""
    ids, targets = _data(1)
    tables = []
    for joined in (True, False):
        layer = _layer(mode)
        model = _model(layer)
        variables = model.trainable_variables
        with tf.GradientTape(persistent=True) as tape:
            outputs = model(tf.constant(ids), training=True)
            losses = [tf.reduce_mean(tf.square(outputs - targets)), tf.reduce_sum(outputs) * 0.1]
            total = losses[0] + losses[1]
        if joined:
            (one, *dense), (other, *rest) = (tape.gradient(loss, variables) for loss in losses)
            rows = tf.IndexedSlices(
                tf.concat([one.values, other.values], 0), tf.concat([one.indices, other.indices], 0)
            )
            gradients = [rows, *(a + b for a, b in zip(dense, rest, strict=True))]
        else:
            gradients = tape.gradient(total, variables)
        model.optimizer.apply(gradients, variables)
        tables.append(layer.get_table())
    # The gradients of a row are added up in another order.
    np.testing.assert_allclose(*tables, rtol=1e-5, atol=1e-6)

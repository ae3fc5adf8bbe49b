"""Bad ids: the same named error in every mode and every way to call the layer, which names layer,
feature and value; and a table in which nothing has moved but by the batches trained before.
"""

import functools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_scratchpipe import BadIdError, ScratchPipeEmbedding, lookahead

ROWS, DIM, BATCH, LOOKUPS = 60, 4, 8, 3
ERRORS = (BadIdError, tf.errors.InvalidArgumentError)

# Mode, and the executor of `lookahead` where the batches are planned.
WAYS = {
    "planned_in_threads": ("pipelined", "thread"),
    "planned_inline": ("pipelined", "inline"),
    "plain": ("pipelined", None),
    "synchronous": ("synchronous", None),
    "static": ("static", None),
    "host": ("host", None),
}
PLAIN = ["plain", "synchronous", "static", "host"]
INTEGERS = [-1, ROWS, 2**31, -5000]
FLOATS = [1.5, np.nan, -1.0, 60.0, np.inf]


def _model(mode, dtype="int32"):
    hot = {"hot_ids": [3, 1, 40]} if mode == "static" else {}
    layer = ScratchPipeEmbedding(
        ROWS,
        DIM,
        combiner="sum",
        embeddings_initializer=keras.initializers.RandomUniform(seed=3),
        mode=mode,
        name="table",
        **hot,
    )
    inputs = keras.Input((LOOKUPS,), dtype=dtype, name="ids")
    kernel = keras.initializers.GlorotUniform(seed=1)
    model = keras.Model(inputs, keras.layers.Dense(1, kernel_initializer=kernel)(layer(inputs)))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model, layer


def _data(batches=8, bad=None, at=5, dtype="int64"):
    """Batches of good ids, with one bad id in batch number `at`, counted from 1."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, ROWS, (batches * BATCH, LOOKUPS)).astype(dtype)
    if bad is not None:
        ids[(at - 1) * BATCH + 2, 1] = bad
    return ids, rng.random((batches * BATCH, 1)).astype("float32")


def _dataset(ids, targets):
    return tf.data.Dataset.from_tensor_slices((ids, targets)).batch(BATCH)


def _text(value, batch=None, feature="inputs"):
    where = "" if batch is None else f" in batch {batch}"
    return re.escape(
        "Ids of layer 'table' must be whole numbers from 0 to input_dim - 1. Received: 1 bad ids "
        f"in feature '{feature}'{where}, among them {value}, with input_dim={ROWS}. Correct the "
        "data, raise `input_dim`, or pass `oov_id`"
    )


def _fit(model, train, text):
    """Train until the error and return the number of batches that were trained before."""
    ended = []
    # `optimizer.iterations` counts the step that fails, too: nothing in it waits for the batch.
    counting = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: ended.append(1)
    )
    with pytest.raises(ERRORS, match=text):
        model.fit(train, verbose=0, callbacks=[counting])
    return len(ended)


@functools.cache
def _trained(batches):
    """The table after so many batches of good data."""
    model, layer = _model("host")
    if batches:
        ids, targets = _data()
        model.fit(_dataset(ids[: batches * BATCH], targets[: batches * BATCH]), verbose=0)
    return layer.get_table()


@pytest.mark.parametrize("value", [-1, 2**31])
@pytest.mark.parametrize("way", WAYS)
def test_fit_names_the_bad_id_and_only_batches_before_it_have_trained(way, value):
    mode, executor = WAYS[way]
    model, layer = _model(mode, "int64")
    train = _dataset(*_data(bad=value))
    text = _text(value)
    if executor:
        train = train.apply(lookahead(model, executor=executor))
        text = _text(value, batch=5, feature="ids")
    trained = _fit(model, train, text)
    assert trained <= 4
    if not executor:
        assert trained == 4
    np.testing.assert_array_equal(layer.get_table(), _trained(trained))


@pytest.mark.parametrize("executor", ["thread", "inline"])
def test_batches_before_a_bad_planned_one_are_trained_first(executor):
    model, layer = _model("pipelined", "int64")
    train = _dataset(*_data(bad=-1)).apply(lookahead(model, executor=executor))
    assert _fit(model, train, _text(-1, batch=5, feature="ids")) == 4
    np.testing.assert_array_equal(layer.get_table(), _trained(4))


@pytest.mark.parametrize("way", WAYS)
def test_good_data_are_trained_after_the_error(way):
    mode, executor = WAYS[way]
    model, layer = _model(mode)
    for bad in (-1, None):
        train = _dataset(*_data(bad=bad, at=1, dtype="int32"))
        if executor:
            train = train.apply(lookahead(model, executor=executor))
        if bad is None:
            model.fit(train, verbose=0)
            np.testing.assert_array_equal(layer.get_table(), _trained(8))
        else:
            assert _fit(model, train, "Ids of layer 'table'") == 0
            np.testing.assert_array_equal(layer.get_table(), _trained(0))


@pytest.mark.parametrize("value", [-1, 2**31, 1.5, np.nan])
@pytest.mark.parametrize("way", PLAIN)
def test_evaluate_and_predict_name_the_bad_id(way, value):
    dtype = "float32" if isinstance(value, float) else "int64"
    model, layer = _model(WAYS[way][0], dtype)
    ids, targets = _data(batches=1, bad=value, at=1, dtype=dtype)
    before = layer.get_table()
    with pytest.raises(ERRORS, match=_text(value)):
        model.evaluate(ids, targets, batch_size=BATCH, verbose=0)
    with pytest.raises(ERRORS, match=_text(value)):
        model.predict(ids, batch_size=BATCH, verbose=0)
    np.testing.assert_array_equal(layer.get_table(), before)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("value", [*INTEGERS, *FLOATS])
@pytest.mark.parametrize("way", PLAIN)
def test_an_eager_call_names_the_bad_id(way, value, training):
    _, layer = _model(WAYS[way][0])
    before = layer.get_table()
    dtype = tf.float32 if isinstance(value, float) else tf.int64
    with pytest.raises(ERRORS, match=_text(value)):
        layer(tf.constant([[3, value, 5]], dtype), training=training)
    np.testing.assert_array_equal(layer.get_table(), before)
    np.testing.assert_array_equal(layer(tf.constant([[3]])), before[[3]])


@pytest.mark.parametrize("value", [1.5, np.nan])
@pytest.mark.parametrize("way", PLAIN)
def test_fit_names_bad_floats(way, value):
    model, layer = _model(WAYS[way][0], "float32")
    train = _dataset(*_data(bad=value, at=3, dtype="float32"))
    assert _fit(model, train, _text(value)) == 2
    np.testing.assert_array_equal(layer.get_table(), _trained(2))


@pytest.mark.parametrize("way", PLAIN)
@pytest.mark.parametrize("value", [-(2**31), -(2**31) - 1, -(2**62)])
def test_ids_that_are_lower_than_any_slot_code_are_bad_ids_too(way, value):
    """Slots are coded from -2**31 on; a plain id down there is still an id."""
    _, layer = _model(WAYS[way][0])
    with pytest.raises(ERRORS, match=_text(value)):
        layer(tf.constant([[3, value, 5]], tf.int64))


@pytest.mark.parametrize("value", [-(2**31), -(2**62)])
def test_low_ids_before_planning_are_bad_ids_too(value):
    model, layer = _model("pipelined", "int64")
    train = _dataset(*_data(bad=value)).apply(lookahead(model, executor="inline"))
    trained = _fit(model, train, _text(value, batch=5, feature="ids"))
    np.testing.assert_array_equal(layer.get_table(), _trained(trained))


def test_the_error_counts_all_bad_ids_and_shows_some_of_them():
    _, layer = _model("host")
    ids = np.arange(ROWS, ROWS + 20).reshape(1, -1)
    text = r"20 bad ids in feature 'inputs', among them 60, 61, 62, 63, 64, with input_dim=60"
    with pytest.raises(ERRORS, match=text):
        layer(ids)


def test_the_error_shows_equal_values_once():
    _, layer = _model("host")
    with pytest.raises(ERRORS, match=r"4 bad ids in feature 'inputs', among them nan, -1.0, with"):
        layer(np.array([[np.nan, -1.0, np.nan, -1.0, 3.0]], "float32"))

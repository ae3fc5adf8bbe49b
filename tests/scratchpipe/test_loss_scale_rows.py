"""Rows under a LossScaleOptimizer: steps that overflow are skipped, by rows and by all others.

The twin has the whole table as a weight. A skipped step is over for the pipeline as any other.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.scratchpipe import dense
from tf_scratchpipe import lookahead

STEPS = 12
IDS, TARGETS = dense.data(STEPS)
# Gradients of 4096 times these do not fit float16.
LARGE = (IDS, TARGETS * 100)
WITH_INFINITIES = (IDS, TARGETS.copy())
for _step in (0, 3, 4, STEPS - 1):
    WITH_INFINITIES[1][_step * dense.BATCH + 2] = np.inf


def _scaled(inner=None, scale=2.0**15, growth=3):
    inner = inner or keras.optimizers.Adagrad(0.05)
    return keras.optimizers.LossScaleOptimizer(inner, scale, dynamic_growth_steps=growth)


def _trained_alike(make, arrays, layer, epochs=3, **settings):
    """Train both, compare all, and return the optimizer of one."""
    train = dense.dataset(*arrays)
    expected = dense.train_dense(make, train, epochs=epochs, **settings)
    settings = {"run_eagerly": settings.get("run_eagerly", False)}
    mine, model = dense.train_cached(make, train, layer, epochs=epochs, **settings)
    dense.assert_equal(mine, expected)
    return model.optimizer


@pytest.mark.parametrize("drive", ["graph", pytest.param("eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("mode", "slots"),
    [("pipelined", 120), pytest.param("synchronous", 60, marks=pytest.mark.slow)],
)
def test_float16_with_a_scale_that_grows_and_overflows(mode, slots, drive):
    # Sums of float16 depend on who makes them.
    policy = {"dtype": "mixed_float16", "combiner": None}
    layer = dense.cached(mode=mode, num_slots=slots, **policy)
    # In a graph Adagrad's division is rounded otherwise for other positions.
    inner = keras.optimizers.Adagrad if drive == "eager" else keras.optimizers.SGD
    make = lambda: _scaled(inner(0.002))  # noqa: E731
    optimizer = _trained_alike(make, LARGE, layer, run_eagerly=drive == "eager", **policy)
    # Some steps were skipped, and the scale has grown again since.
    assert 5 < int(optimizer.iterations) < 3 * STEPS - 3
    assert layer.embeddings.dtype == "float32"
    assert layer.stats().evictions > 300
    assert int(layer.engine.rows.applied) >= 3 * STEPS


@pytest.mark.parametrize(
    ("mode", "slots"),
    [
        ("pipelined", 60),
        pytest.param("synchronous", 60, marks=pytest.mark.slow),
        pytest.param("host", None, marks=pytest.mark.slow),
    ],
)
def test_batches_with_infinities_are_skipped(mode, slots):
    """The first of the epoch, two in a row, and the last."""
    layer = dense.cached(mode=mode, num_slots=slots)
    optimizer = _trained_alike(_scaled, WITH_INFINITIES, layer, run_eagerly=True)
    assert int(optimizer.iterations) == 3 * (STEPS - 4)
    assert np.isfinite(layer.get_table()).all()


@pytest.mark.slow
def test_gradients_are_divided_before_they_are_clipped():
    make = lambda: _scaled(keras.optimizers.Adagrad(0.1, clipvalue=0.002), scale=24.0)  # noqa: E731
    layer = dense.cached(num_slots=120)
    _trained_alike(make, WITH_INFINITIES, layer, run_eagerly=True)


@pytest.mark.slow
def test_rows_with_their_own_optimizer_are_unscaled_too():
    layer = dense.cached(num_slots=120, optimizer=keras.optimizers.Adagrad(0.05))
    _trained_alike(lambda: _scaled(scale=24.0), WITH_INFINITIES, layer, run_eagerly=True)


@pytest.mark.parametrize("mode", ["pipelined", "synchronous"])
@pytest.mark.slow
def test_rows_alone_make_a_step_be_skipped(mode):
    layer = dense.cached(mode=mode, num_slots=60)
    model = dense.around(layer, "sgd")
    model.layers[-1].trainable = False
    model.compile(_scaled(), "mse")
    train = dense.dataset(*WITH_INFINITIES).apply(lookahead(model, debug=True))
    model.fit(train, epochs=2, verbose=0)
    assert int(model.optimizer.iterations) == 2 * (STEPS - 4)
    assert np.isfinite(layer.get_table()).all()


@pytest.mark.parametrize(
    "mode",
    [
        "pipelined",
        pytest.param("synchronous", marks=pytest.mark.slow),
        pytest.param("host", marks=pytest.mark.slow),
    ],
)
def test_accumulation_goes_on_after_a_skipped_step(mode):
    """A period has three steps that are applied, and any number that are skipped between."""
    inner = lambda: keras.optimizers.SGD(0.5, gradient_accumulation_steps=3)  # noqa: E731
    layer = dense.cached(mode=mode, num_slots=170)
    optimizer = _trained_alike(
        lambda: _scaled(inner()), WITH_INFINITIES, layer, epochs=4, run_eagerly=True
    )
    assert int(optimizer.iterations) == 4 * (STEPS - 4) // 3
    assert layer.engine.rows.pending.steps == 4 * (STEPS - 4) % 3


@pytest.mark.slow
def test_a_period_that_is_all_skips_but_its_first_step_holds_few_slots():
    """33 rows wait while nine batches are skipped."""
    ids, targets = dense.data(12)
    targets[dense.BATCH : -dense.BATCH] = np.inf
    inner = lambda: keras.optimizers.SGD(0.5, gradient_accumulation_steps=2)  # noqa: E731
    layer = dense.cached(num_slots=80)
    optimizer = _trained_alike(lambda: _scaled(inner()), (ids, targets), layer, epochs=2)
    assert int(optimizer.iterations) == 2


def test_storage_grows_while_steps_are_skipped():
    """Growth waits until all steps are over, skipped ones too; validation comes between."""
    ids, targets = dense.data(16)
    ids[: 8 * dense.BATCH] %= 20
    targets[::5] = np.inf
    layer = dense.cached()
    model = dense.around(layer, _scaled())
    train = dense.dataset(ids, targets).apply(lookahead(model, debug=True, stall_seconds=20))
    start = layer.get_table()
    model.fit(train, epochs=2, validation_data=dense.dataset(*dense.data(2)), verbose=0)
    np.testing.assert_array_equal(layer.get_table(), start)  # All were skipped.
    assert layer.stats().slots > 100
    assert int(model.optimizer.iterations) == 0


def test_layers_and_features_that_share_slots():
    def build(mode):
        ids = {name: keras.Input((dense.LOOKUPS,), dtype="int32", name=name) for name in ("a", "b")}
        layers = [dense.cached(mode=mode, num_slots=150) for _ in range(2)]
        layers = [
            type(layer).from_config({**layer.get_config(), "name": f"table_{i}"})
            for i, layer in enumerate(layers)
        ]
        pooled = [layers[0](ids["a"]), layers[0](ids["b"]), layers[1](ids["b"])]
        kernel = keras.initializers.GlorotUniform(seed=1)
        outputs = keras.layers.Dense(1, kernel_initializer=kernel)(
            keras.layers.Concatenate()(pooled)
        )
        model = keras.Model(ids, outputs)
        model.compile(_scaled(keras.optimizers.Adam(0.01)), "mse")
        features = {"a": IDS, "b": IDS[::-1] // 2}
        train = dense.dataset(features, WITH_INFINITIES[1]).apply(lookahead(model, debug=True))
        model.fit(train, epochs=2, verbose=0)
        assert int(model.optimizer.iterations) == 2 * (STEPS - 4)
        return [layer.get_table() for layer in layers]

    dense.assert_equal(build("pipelined"), build("host"))


@pytest.mark.parametrize("finite", [True, False])
def test_gradients_of_a_skipped_step_are_applied_once(finite):
    layer = dense.cached(mode="synchronous", num_slots=60)
    model = dense.around(layer, _scaled())
    variables = model.trainable_variables
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(IDS[:8], training=True)) * np.inf
    gradients = tape.gradient(loss, variables)
    model.optimizer.apply(gradients, variables)
    if finite:
        gradients = [
            tf.IndexedSlices(tf.zeros_like(g.values), g.indices)
            if isinstance(g, tf.IndexedSlices)
            else tf.zeros_like(g)
            for g in gradients
        ]
    kind = (ValueError, tf.errors.InvalidArgumentError)
    with pytest.raises(kind, match="were applied twice for one lookup"):
        model.optimizer.apply(gradients, variables)


def test_a_batch_out_of_order_is_an_error_after_a_skipped_step():
    layer = dense.cached(num_slots=120)
    model = dense.around(layer, _scaled())
    batches = list(dense.dataset(*WITH_INFINITIES).take(3).apply(lookahead(model)))
    model.train_on_batch(*batches[0])
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="got a batch out of"):
        model.train_on_batch(*batches[2])


@pytest.mark.slow
def test_mixed_float16_compiles_with_a_loss_scale_by_itself():
    layer = dense.cached(dtype="mixed_float16", combiner="mean", num_slots=120)
    inputs = keras.Input((dense.LOOKUPS,), dtype="int32")
    outputs = keras.layers.Dense(1, dtype="mixed_float16")(layer(inputs))
    model = keras.Model(inputs, outputs)
    model.dtype_policy = keras.dtype_policies.get("mixed_float16")
    model.compile("adam", "mse")
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    start = layer.get_table()
    history = model.fit(dense.dataset(IDS, TARGETS).apply(lookahead(model)), epochs=2, verbose=0)
    assert np.isfinite(history.history["loss"]).all()
    assert layer(IDS[:2]).dtype == tf.float16
    assert np.any(layer.get_table() != start)


@pytest.mark.slow
def test_rows_of_float16():
    """All of them, without a loss scale: as Keras trains a weight of float16."""
    layer = dense.cached(dtype="float16", num_slots=120)
    model = dense.around(layer, keras.optimizers.SGD(0.5))
    model.fit(dense.dataset(IDS, TARGETS).apply(lookahead(model, debug=True)), verbose=0)
    host = dense.cached(dtype="float16", mode="host")
    other = dense.around(host, keras.optimizers.SGD(0.5))
    other.fit(dense.dataset(IDS, TARGETS), verbose=0)
    assert layer.get_table().dtype == np.float16
    dense.assert_equal([layer.get_table()], [host.get_table()])

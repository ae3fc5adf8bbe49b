"""Sizes under a nominal batch size are those of the same step with that batch size fixed."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_echo import tracing
from tf_echo.graph_view import GraphView
from tf_echo.op_traits import Kind

L = keras.layers
BATCH = 24


def convolutions() -> keras.Model:
    x = keras.Input((12, 12, 3))
    y = L.BatchNormalization()(L.Conv2D(4, 3, strides=2, padding="same")(x))
    y = L.MaxPooling2D()(L.SeparableConv2D(6, 3, activation="relu")(y))
    y = L.UpSampling2D()(L.Conv2DTranspose(3, 2, strides=2)(y))
    return keras.Model(x, L.Dense(5)(L.Flatten()(y)))


def attention() -> keras.Model:
    x = keras.Input((10, 8))
    y = L.LayerNormalization()(x + L.MultiHeadAttention(2, 4, dropout=0.1)(x, x))
    y = L.Dropout(0.1)(L.Dense(16, activation="gelu")(y))
    return keras.Model(x, L.Dense(5)(L.GlobalAveragePooling1D()(y)))


def recurrent() -> keras.Model:
    x = keras.Input((6, 8))
    y = L.Bidirectional(L.LSTM(4, return_sequences=True, unroll=True))(x)
    return keras.Model(x, L.Dense(5)(L.GRU(4, unroll=True, recurrent_dropout=0.2)(y)))


def reshapes() -> keras.Model:
    x = keras.Input((4, 6))
    y = L.Reshape((6, 4))(L.Permute((2, 1))(x))
    y = L.Concatenate()([y, L.ZeroPadding1D((0, 0))(y), L.GroupNormalization(2)(y)])
    return keras.Model(
        x, L.Dense(5)(keras.ops.reshape(L.RepeatVector(3)(L.Flatten()(y)), (-1, 216)))
    )


def traced(model: keras.Model, batch: int | None) -> GraphView:
    """The view of a train step, with a nominal batch size where it is open."""
    views: list[GraphView] = []
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(model.trainable_variables)

    @tf.function(autograph=False)
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(keras.losses.mean_squared_error(y, model(x, training=True)))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        trace = tracing.trace_step([loss], tracing.flat_gradients(gradients), BATCH)
        views.append(trace.view)
        return loss

    shape = model.input_shape[1:]
    step.get_concrete_function(tf.TensorSpec((batch, *shape)), tf.TensorSpec((batch, 5)))
    return views[0]


@pytest.mark.parametrize("build", [convolutions, attention, recurrent, reshapes])
def test_sizes_of_an_open_batch_are_those_of_the_fixed_batch(build):
    model = build()
    opened, fixed = traced(model, None), traced(model, BATCH)
    assert all(tensor.known for tensor in opened.tensors)
    # TensorFlow traces shape arithmetic only where the batch is open, and names shift in the
    # gradients: there only matrix products and convolutions are compared.
    common = {n.name for n in opened.nodes if not n.backward} & fixed.by_name.keys()
    assert len(common) > 0.8 * sum(not n.backward for n in fixed.nodes)
    for name in common:
        sizes = [[v.tensors[t].nbytes for t in v.node(name).outputs] for v in (opened, fixed)]
        assert sizes[0] == sizes[1], name
    assert heavy_sizes(opened) == heavy_sizes(fixed)


def heavy_sizes(view: GraphView) -> list[tuple[str, list[int]]]:
    """Type and output sizes of all matrix products and convolutions, sorted."""
    heavy = [n for n in view.nodes if view.kinds[n.id] is Kind.HEAVY]
    return sorted((n.op, [view.tensors[t].nbytes for t in n.outputs]) for n in heavy)


def test_a_tensor_of_unknown_rank_has_no_known_size():
    found = {}

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.exp(x) * weight)
        gradient = tape.gradient(loss, weight)
        view = tracing.trace_step([loss], [gradient]).view
        found["exp"] = view.tensors[view.node("Exp").outputs[0]]
        return gradient

    weight = tf.Variable(2.0)
    step.get_concrete_function(tf.TensorSpec(None))
    assert not found["exp"].known


def test_each_kind_of_call_is_inferred_once(monkeypatch):
    from tf_echo.nominal_shapes import NominalShapes

    asked = []
    ask = NominalShapes._ask_tensorflow
    monkeypatch.setattr(
        NominalShapes,
        "_ask_tensorflow",
        lambda self, op, *a: asked.append(op.type) or ask(self, op, *a),
    )
    weight = tf.Variable(np.ones((8, 8), "float32"))

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            y = x
            for _ in range(50):
                y = tf.exp(tf.matmul(y, weight))
            loss = tf.reduce_sum(y)
        gradient = tape.gradient(loss, weight)
        tracing.trace_step([loss], [gradient])
        return gradient

    step.get_concrete_function(tf.TensorSpec((None, 8)))
    assert len(asked) < 12

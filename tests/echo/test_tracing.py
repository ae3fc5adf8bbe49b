"""Which ops of a train step count as forward and which as backward."""

import keras
import tensorflow as tf

from tf_echo import gating, scheduling, tracing
from tf_echo.graph_view import GraphView

L = keras.layers


def traced(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> GraphView:
    views: list[GraphView] = []
    optimizer.build(model.trainable_variables)

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        views.append(tracing.trace_step([loss], tracing.flat_gradients(gradients)).view)
        return loss

    step.get_concrete_function(tf.TensorSpec((16, *model.input_shape[1:])))
    return views[0]


def normalized() -> keras.Model:
    layers = [L.Conv2D(4, 3), L.BatchNormalization(), L.ReLU(), L.Conv2D(4, 3)]
    return keras.Sequential([keras.Input((8, 8, 3)), *layers])


def test_moving_averages_belong_to_the_forward_pass():
    view = traced(normalized(), keras.optimizers.SGD())
    updates = [n for n in view.nodes if n.op.startswith("Assign") and "batch_norm" in n.name]
    assert updates
    assert not any(node.backward for node in updates)


def test_what_a_moving_average_reads_is_not_taken_for_a_residual():
    view = traced(normalized(), keras.optimizers.SGD())
    activations = [
        t for t in view.tensors if gating.holds_values(view, view.nodes[t.node]) and t.nbytes
    ]
    readers = [r for t in activations for r in gating.backward_readers(view, t.id)]
    assert readers
    assert all("gradient_tape" in view.nodes[r].name for r in readers)


def test_updates_and_what_they_read_are_backward_and_learning_rates_are_read_early():
    view = traced(normalized(), keras.optimizers.SGD(momentum=0.9))
    rates = [view.nodes[n] for n in scheduling.early_sources(view)]
    assert any(node.name.startswith("sgd") for node in rates)
    assert all(n.backward for n in view.nodes if n.op.startswith("Assign") and "sgd" in n.name)


def test_a_variable_that_is_written_before_it_is_read_is_not_read_early():
    # Adafactor assigns its moments and reads them again, linked through the variables alone.
    view = traced(normalized(), keras.optimizers.Adafactor(1e-2))
    written = {
        view.nodes[n.id].inputs[0] for n in view.nodes if n.op.startswith("Assign") and n.backward
    }
    first_write = {
        h: min(n.id for n in view.nodes if n.op.startswith("Assign") and h in n.inputs)
        for h in written
    }
    for number in scheduling.early_sources(view):
        handle = view.nodes[number].inputs[0]
        assert number < first_write.get(handle, number + 1)


def test_a_loss_that_no_variable_moves_is_told_apart():
    found = []

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> tf.Tensor:
        found.append(tracing.depends_on_variables(tf.reduce_sum(x)))
        found.append(tracing.depends_on_variables(tf.reduce_sum(x * weight)))
        return x

    weight = tf.Variable(2.0)
    step.get_concrete_function(tf.TensorSpec((2,)))
    assert found == [False, True]

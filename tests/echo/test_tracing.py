"""Which ops of a train step count as forward and which as backward."""

from collections.abc import Callable

import keras
import pytest
import tensorflow as tf

from tf_echo import gating, memory_model, op_traits, scheduling, tracing
from tf_echo.graph_view import GraphView
from tf_echo.tracer import Trace

L = keras.layers


def traced(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> GraphView:
    return traced_and_asked(model, optimizer, lambda trace: [])[0]


def traced_and_asked(
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    ask: Callable[[Trace], list[str]] = lambda trace: tracing.order_question(trace)(),
) -> tuple[GraphView, list[str]]:
    """A step's view, and the names of the operations that Grappler leaves in it."""
    found: list[tuple[GraphView, list[str]]] = []
    optimizer.build(model.trainable_variables)

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        trace = tracing.trace_step([loss], tracing.flat_gradients(gradients))
        found.append((trace.view, ask(trace)))
        return loss

    step.get_concrete_function(tf.TensorSpec((16, *model.input_shape[1:])))
    return found[0]


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


def test_what_computes_the_same_is_there_once():
    x = h = keras.Input((8,))
    branches = [L.Dense(8, name=f"after_{n}")(L.ReLU(name=f"relu_{n}")(h)) for n in range(3)]
    view = traced(keras.Model(x, L.Add()(branches)), keras.optimizers.SGD())
    relus = [node for node in view.nodes if node.op == "Relu"]
    assert len(relus) == 1
    readers = [view.nodes[c].name for c in view.consumers[relus[0].outputs[0]]]
    assert all(any(f"after_{n}" in reader for reader in readers) for n in range(3))


def test_what_draws_or_reads_other_numbers_is_not_taken_for_the_same():
    x = keras.Input((8,))
    branches = [L.Dense(8)(L.Dropout(0.5)(x)) for _ in range(2)]
    branches += [L.Dense(8)(keras.ops.cast(x, kind)) for kind in ("float16", "bfloat16")]
    branches += [L.Dense(8)(x * factor) for factor in (2.0, 3.0)]
    view = traced(keras.Model(x, L.Concatenate()(branches)), keras.optimizers.SGD())
    forward = [node for node in view.nodes if not node.backward]
    drawn = [n for n in forward if n.op.startswith("StatelessRandomUniform")]
    assert len(drawn) == 2
    (data,) = (t.id for t in view.tensors if view.nodes[t.node].name == "x")
    casts = {view.tensors[n.outputs[0]].dtype for n in forward if n.op == "Cast"}
    assert casts >= {"float16", "bfloat16"}
    factors = [n for n in forward if n.op == "Mul" and data in n.inputs]
    assert len(factors) == 2


def test_the_gradient_of_the_loss_is_no_constant_of_the_forward_pass():
    x = keras.Input((8,))
    view = traced(keras.Model(x, L.Dense(8)(L.ReLU()(1.0 - x))), keras.optimizers.SGD())
    assert view.seed is not None
    assert view.nodes[view.tensors[view.seed].node].backward


def test_what_reads_a_variable_again_waits_until_it_is_written():
    view = traced(normalized(), keras.optimizers.RMSprop())
    writes = {n.id: n.inputs[0] for n in view.nodes if n.op == "AssignVariableOp" and n.backward}
    again = [
        n
        for n in view.nodes
        if n.op == "ReadVariableOp"
        and any(w < n.id and h == n.inputs[0] for w, h in writes.items())
    ]
    assert len(again) >= 4
    assert all(any(writes.get(c) == n.inputs[0] for c in n.control_inputs) for n in again)


def test_a_variable_that_a_loop_reads_is_counted_once():
    model = keras.Sequential([keras.Input((6, 4)), L.LSTM(5, recurrent_dropout=0.2)])
    view = traced(model, keras.optimizers.SGD())
    # The zeros that gradients of its weights are added to are as large as these, and no constants.
    zeros = [n for n in view.nodes if n.op == "Fill" and n.backward]
    assert sum(view.tensors[n.outputs[0]].nbytes for n in zeros) >= 4 * 4 * 5 * (4 + 5)
    weights = sum(v.numpy().nbytes for v in [*model.variables, *keras.optimizers.SGD().variables])
    # The optimizer's own count and learning rate are 12 bytes.
    assert weights <= view.weight_bytes <= weights + 12


def test_readers_read_past_what_passes_all_gradients_on():
    # Keras hands them to the optimizer through one op, which Grappler takes apart.
    view = traced(normalized(), keras.optimizers.RMSprop())
    assert not any(node.op == "IdentityN" for node in view.nodes)
    gradients = [n for n in view.nodes if n.op == "Conv2DBackpropFilter"]
    readers = [view.nodes[c] for n in gradients for c in view.consumers[n.outputs[0]]]
    assert {reader.op for reader in readers} >= {"Square", "Mul"}


def test_one_number_repeated_is_a_constant_that_stays():
    x = keras.Input((8,))
    y = keras.ops.where(x > 0, x, keras.ops.zeros_like(x))
    view = traced(keras.Model(x, L.Dense(8)(y)), keras.optimizers.SGD())
    zeros = [n for n in view.nodes if n.op == "Const" and "zeros" in n.name]
    assert zeros
    (node,) = (n for n in zeros if view.tensors[n.outputs[0]].nbytes == 16 * 8 * 4)
    timeline = memory_model.simulate(view)
    assert timeline.born[node.outputs[0]] == -1
    inputs = sum(
        view.tensors[t].nbytes
        for n in view.nodes
        if n.op in ("Const", "Placeholder")
        for t in n.outputs
    )
    assert timeline.resident_bytes == view.weight_bytes + inputs


@pytest.mark.parametrize(("order", "folded"), [((0, 2, 1), True), ((1, 0, 2), False)])
def test_products_read_past_a_transpose_of_matrices(order, folded):
    x = keras.Input((16, 16))
    h = L.Dense(16)(x)
    model = keras.Model(x, L.Dense(8)(keras.ops.matmul(h, keras.ops.transpose(h, order))))
    view, left = traced_and_asked(model, keras.optimizers.SGD())
    (node,) = (n for n in view.nodes if n.op.startswith("Transpose") and not n.backward)
    shares = view.buffers[node.outputs[0]] != node.outputs[0]
    assert shares is folded
    assert (node.name in left) is not folded


def test_a_transpose_that_something_else_reads_is_not_folded():
    x = keras.Input((8, 8))
    h = keras.ops.transpose(L.Dense(8)(x), (0, 2, 1))
    view = traced(keras.Model(x, L.Dense(8)(keras.ops.matmul(x, h) + h)), keras.optimizers.SGD())
    forward = {n.op for n in view.nodes if not n.backward}
    assert "Transpose" in forward
    assert op_traits.FOLDED_TRANSPOSE not in forward


def test_silu_keeps_what_it_reads():
    # It multiplies by a factor that is one, before and after; Grappler leaves that out.
    x = keras.Input((8,))
    h = L.Dense(8, use_bias=False, name="below")(x)
    view = traced(keras.Model(x, L.Dense(8)(L.Activation("silu")(h))), keras.optimizers.SGD())
    kept = [view.nodes[view.tensors[t].node] for t in view.residuals]
    kept = [n for n in kept if view.tensors[n.outputs[0]].nbytes == 16 * 8 * 4]
    assert sum(node.op == "MatMul" for node in kept) == 1
    # What the product above it reads. The sigmoid is made again: silu sees to that.
    assert sum(node.op == "Mul" for node in kept) == 1
    assert sum(node.op == "Sigmoid" for node in kept) == 0
    assert any(node.op == "Sigmoid" and node.backward for node in view.nodes)

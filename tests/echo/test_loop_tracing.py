"""What is seen of TensorFlow's while loops, and what rewriting does to them and their gradients."""

import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_echo import loop_internals, loop_memory, passes, rewriter, tracing
from tf_echo.cost_model import UnitCost
from tf_echo.graph_view import GraphView
from tf_echo.nominal_shapes import NOMINAL_LENGTH, NOMINAL_TRIPS
from tf_echo.plan import RecomputePlan
from tf_echo.tracer import LoopTrace, Trace

ROWS, SIDE = 48, 8
SIZE = 4 * ROWS * SIDE
"""Bytes of one tensor of `ROWS` x `SIDE`, the state of the loops here."""
KERNEL = tf.Variable(np.eye(SIDE, dtype="float32"))
KERNEL_SIZE = 4 * SIDE * SIDE

Tensors = Sequence[tf.Tensor]


class Traced(NamedTuple):
    """A step whose plan was carried out, and what was known before."""

    trace: Trace
    plan: RecomputePlan

    @property
    def loop(self) -> LoopTrace:
        """The step's only loop."""
        (loop,) = self.trace.loops
        return loop

    @property
    def body(self) -> GraphView:
        """One iteration of it."""
        return self.loop.loop.body

    @property
    def kept_bytes(self) -> int:
        """What the loop keeps of each iteration without a plan."""
        return loop_memory.loop_memory(self.loop.loop, self.body).kept.total


def traced(
    forward: Callable[..., tf.Tensor],
    *shapes: Sequence[int | None],
    policy: str = "echo",
    compiled: bool = False,
    weights: Sequence[Any] = (KERNEL,),
) -> Traced:
    """Traces, plans and rewrites the gradient of a sum; nothing is run."""
    found = []

    def step(*inputs: tf.Tensor) -> Tensors:
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            loss = tf.reduce_sum(forward(*inputs))
        gradients = tape.gradient(loss, [*inputs, *weights])
        settings = passes.Settings(policy, UnitCost())
        trace, plan = passes.plan_step([loss], tracing.flat_gradients(gradients), settings)
        rewriter.rewrite(trace, plan)
        found.append(Traced(trace, plan))
        return tracing.flat_gradients(gradients)

    function = tf.function(step, autograph=False, jit_compile=compiled)
    function.get_concrete_function(*(tf.TensorSpec(shape) for shape in shapes))
    return found[0]


def advance(y: tf.Tensor) -> tf.Tensor:
    return tf.matmul(tf.tanh(tf.exp(tf.matmul(y, KERNEL))), KERNEL)


def loop(count: int, start: int = 0, by: int = 1) -> Callable[[tf.Tensor], tf.Tensor]:
    """Advances as long as a counter is below `count`."""

    def forward(x: tf.Tensor) -> tf.Tensor:
        _, y = tf.while_loop(lambda i, _: i < count, lambda i, y: (i + by, advance(y)), (start, x))
        return y

    return forward


def loop_while(
    holds: Callable[[tf.Tensor], tf.Tensor], **settings: int
) -> Callable[[tf.Tensor], tf.Tensor]:
    """Advances as long as something holds of the state."""

    def forward(x: tf.Tensor) -> tf.Tensor:
        (y,) = tf.while_loop(holds, lambda y: (advance(y),), (x,), **settings)
        return y

    return forward


def is_large(y: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(y) > 5.0


def loop_with_two_limits(x: tf.Tensor) -> tf.Tensor:
    _, y = tf.while_loop(
        lambda i, _: i < 5, lambda i, y: (i + 1, advance(y)), (0, x), maximum_iterations=3
    )
    return y


def loop_that_carries_its_limit(x: tf.Tensor) -> tf.Tensor:
    *_, y = tf.while_loop(
        lambda i, n, _: i < n, lambda i, n, y: (i + 1, n, advance(y)), (0, tf.constant(6), x)
    )
    return y


def loop_over_rows(x: tf.Tensor) -> tf.Tensor:
    return loop(tf.shape(x)[0])(x)


def loop_over_columns(x: tf.Tensor) -> tf.Tensor:
    return loop(tf.shape(x)[1])(x[:, 0])


@pytest.mark.parametrize(
    ("forward", "shape", "trips", "known"),
    [
        (loop(5), (ROWS, SIDE), 5, True),
        (loop_while(is_large, maximum_iterations=7), (ROWS, SIDE), 7, False),
        (loop_with_two_limits, (ROWS, SIDE), 3, True),
        (loop_that_carries_its_limit, (ROWS, SIDE), 6, True),
        (loop_over_rows, (9, SIDE), 9, True),
        (loop_over_rows, (None, SIDE), tracing.NOMINAL_BATCH_SIZE, False),
        (loop_over_columns, (ROWS, 9, SIDE), 9, True),
        (loop_over_columns, (ROWS, None, SIDE), NOMINAL_LENGTH, False),
        (loop_while(is_large), (ROWS, SIDE), NOMINAL_TRIPS, False),
    ],
)
def test_how_often_a_loop_runs_is_known_or_nominal(forward, shape, trips, known):
    found = traced(forward, shape)
    assert (found.loop.loop.trips, found.loop.loop.trips_known) == (trips, known)
    assert (found.plan.loops[0].trips, found.plan.loops[0].trips_known) == (trips, known)
    assert found.loop.loop.trips_scale == (shape[0] is None)


def loop_while_one_of_two_holds(x: tf.Tensor) -> tf.Tensor:
    _, y = tf.while_loop(
        lambda i, y: (i < 5) | is_large(y), lambda i, y: (i + 1, advance(y)), (0, x)
    )
    return y


@pytest.mark.parametrize(
    ("forward", "trips"),
    [
        (loop(5, start=2), 3),
        (loop(6, by=2), 3),
        (loop_while_one_of_two_holds, None),
        (loop_while(lambda y: tf.reduce_sum(y) < 3.0), None),
    ],
    ids=["from two", "by two", "or", "data"],
)
def test_no_wrong_number_of_iterations_is_called_certain(forward, trips):
    found = traced(forward, (ROWS, SIDE)).loop.loop
    assert not found.trips_known or found.trips == trips


def test_what_is_popped_is_the_tensor_that_was_pushed():
    body = traced(loop(5), (ROWS, SIDE)).body
    read = {
        node.name.removeprefix("gradient_tape/while/gradients/while/"): [
            body.tensor_name(t)
            for t in node.inputs
            if not body.nodes[body.tensors[t].node].backward
        ]
        for node in body.nodes
        if node.backward
    }
    assert read["Tanh_grad/TanhGrad"] == ["while/Tanh"]
    assert read["Exp_grad/mul"] == ["while/Exp"]
    assert read["MatMul_grad/MatMul"] == ["while/MatMul/ReadVariableOp"]
    assert read["MatMul_grad/MatMul_1"] == ["while/Placeholder_1"]
    assert read["MatMul_1_grad/MatMul_1"] == ["while/Tanh"]


def test_lists_are_no_part_of_a_body():
    body = traced(loop(5), (ROWS, SIDE)).body
    assert not [n.name for n in body.nodes if n.op in ("TensorListPushBack", "TensorListPopBack")]


def test_what_is_the_same_in_each_iteration_is_told_from_what_changes():
    def forward(x: tf.Tensor, z: tf.Tensor) -> tf.Tensor:
        _, y = tf.while_loop(lambda i, _: i < 5, lambda i, y: (i + 1, y * z), (0, x))
        return y

    body = traced(forward, (ROWS, SIDE), (ROWS, SIDE), weights=()).body
    state, constant = body.node("while/mul").inputs
    makers = [body.nodes[body.tensors[t].node].op for t in (state, constant)]
    assert makers == ["LoopVariable", "Placeholder"]
    assert {state, constant} <= body.residuals


def test_kept_bytes_of_a_loop_by_hand():
    plain, compiled = (traced(loop(5), (ROWS, SIDE), compiled=xla) for xla in (False, True))
    assert plain.kept_bytes == 3 * SIZE  # the state, exp, tanh
    assert compiled.kept_bytes == 3 * SIZE + 2 * KERNEL_SIZE  # a copy for each read


def test_the_step_holds_what_all_iterations_keep():
    trace = traced(loop(5), (ROWS, SIDE)).trace
    kept = [trace.view.tensors[t] for t in trace.loops[0].loop.kept]
    assert sum(t.nbytes for t in kept) == 5 * 3 * SIZE
    assert trace.view.nodes[kept[0].node].op == "While"
    assert all(trace.loops[0].loop.backward in trace.view.consumers[t.id] for t in kept)


def test_what_grows_with_an_open_batch_is_told_apart():
    found = traced(loop(5), (None, SIDE), compiled=True)
    kept = loop_memory.loop_memory(found.loop.loop, found.body).kept
    assert kept.scaling == 3 * 4 * tracing.NOMINAL_BATCH_SIZE * SIDE
    assert kept.fixed == 2 * KERNEL_SIZE


def loop_over_arrays(x: tf.Tensor) -> tf.Tensor:
    """Reads its input from an array and writes its results to another one."""
    count = x.shape[0]
    inputs = tf.TensorArray(tf.float32, count).unstack(x)
    outputs = tf.TensorArray(tf.float32, count)

    def body(i: Any, y: Any, made: Any) -> Any:
        y = tf.tanh(tf.exp(tf.matmul(y, KERNEL)) * inputs.read(i))
        return i + 1, y, made.write(i, y)

    start = (0, tf.zeros_like(x[0]), outputs)
    return tf.while_loop(lambda i, *_: i < count, body, start)[2].stack()


def test_what_is_read_from_an_array_of_inputs_is_free():
    found = traced(loop_over_arrays, (6, ROWS, SIDE))
    item = found.body.node("while/TensorArrayV2Read/TensorListGetItem").outputs[0]
    assert item in found.body.residuals
    assert found.body.is_source(item)
    # The state, which is the tanh of the iteration before, and exp; index, length and shape of what
    # the array holds.
    assert found.kept_bytes == 2 * SIZE + 4 + 4 + 2 * 4


def test_under_xla_what_is_read_from_an_array_of_inputs_is_copied_or_read_again():
    found = traced(loop_over_arrays, (6, ROWS, SIDE), compiled=True)
    item = "while/TensorArrayV2Read/TensorListGetItem"
    assert found.kept_bytes == 4 * SIZE + KERNEL_SIZE + 4
    assert item in found.plan.loops[0].reread


def test_what_a_loop_itself_wrote_to_an_array_is_not_free():
    def forward(x: tf.Tensor) -> tf.Tensor:
        array = tf.TensorArray(tf.float32, 5, clear_after_read=False, element_shape=x.shape)

        def body(i: Any, y: Any, made: Any) -> Any:
            made = made.write(i, tf.matmul(y, KERNEL))
            return i + 1, tf.matmul(y * made.read(i), KERNEL), made

        return tf.while_loop(lambda i, *_: i < 5, body, (0, x, array))[1]

    body = traced(forward, (ROWS, SIDE)).body
    (item,) = (n for n in body.nodes if n.op.startswith("TensorListGetItem") and not n.backward)
    assert item.op == "TensorListGetItem(changing)"
    assert item.outputs[0] in body.residuals
    assert not body.is_source(item.outputs[0])


@pytest.mark.parametrize(("rows", "nominal"), [(ROWS, ROWS), (None, NOMINAL_LENGTH)])
def test_sizes_of_arrays_that_a_loop_writes(rows, nominal):
    view = traced(loop_over_arrays, (6, rows, SIDE)).trace.view
    whole = 6 * 4 * nominal * SIDE
    stack = view.node("TensorArrayV2Stack/TensorListStack")
    written = view.tensors[stack.inputs[0]]
    assert view.nodes[written.node].op == "While"
    assert (written.nbytes, written.known, written.scales) == (whole, True, rows is None)
    result = view.tensors[stack.outputs[0]]
    assert (result.nbytes, result.known) == (whole, True)


def test_all_sizes_are_known_behind_a_keras_layer_that_returns_sequences():
    layer = keras.layers.LSTM(SIDE, return_sequences=True)
    layer.build((None, 6, SIDE))
    view = traced(lambda x: tf.exp(layer(x)), (None, 6, SIDE), weights=()).trace.view
    unknown = [view.tensor_name(t.id) for t in view.tensors if not t.known]
    assert unknown == []


UNITS, FEATURES, STEPS = 16, 8, 6


def lstm() -> Callable[[tf.Tensor], tf.Tensor]:
    layer = keras.layers.LSTM(UNITS)
    layer.build((None, STEPS, FEATURES))
    return layer


def test_kept_bytes_of_an_lstm_by_hand():
    found = traced(lstm(), (ROWS, STEPS, FEATURES), weights=())
    # Both states, four gates and tanh of the cell state; index, length and shape of the inputs.
    assert found.kept_bytes == 7 * 4 * ROWS * UNITS + 4 + 4 + 2 * 4


def test_kept_bytes_of_an_lstm_under_xla_by_hand():
    found = traced(lstm(), (ROWS, STEPS, FEATURES), weights=(), compiled=True)
    weights = 4 * (FEATURES + UNITS) * 4 * UNITS
    # The index too; length and shape of the inputs are constants here.
    assert found.kept_bytes == 7 * 4 * ROWS * UNITS + 4 * ROWS * FEATURES + weights + 4


@pytest.mark.parametrize("rows", [ROWS, None])
def test_an_lstm_makes_tanh_of_its_cell_state_again_whether_the_batch_is_open_or_not(rows):
    found = traced(lstm(), (rows, STEPS, FEATURES), weights=())
    (plan,) = found.plan.loops
    assert plan.recompute
    size = 4 * (rows or tracing.NOMINAL_BATCH_SIZE) * UNITS
    assert plan.after_bytes < 7 * size <= plan.before_bytes


def nested(x: tf.Tensor) -> tf.Tensor:
    def inner(i: Any, y: Any) -> Any:
        return i + 1, advance(y)

    def outer(i: Any, y: Any) -> Any:
        y = tf.while_loop(lambda j, _: j < 3, inner, (0, y), maximum_iterations=3)[1]
        return i + 1, tf.exp(y)

    return tf.while_loop(lambda i, _: i < 4, outer, (0, x), maximum_iterations=4)[1]


def test_a_loop_in_a_loop_is_seen_in_its_body():
    found = traced(nested, (ROWS, SIDE))
    (inner,) = found.loop.body.loops
    assert (found.loop.loop.trips, inner.loop.trips) == (4, 3)
    assert found.body.loops == (inner.loop,)
    assert found.body.nodes[inner.loop.forward].op == "While"
    assert found.body.nodes[inner.loop.backward].backward


def test_what_is_the_same_in_all_iterations_of_nested_loops_is_free_in_both():
    def forward(x: tf.Tensor, z: tf.Tensor) -> tf.Tensor:
        def repeat(i: Any, y: Any) -> Any:
            return i + 1, tf.while_loop(lambda j, _: j < 3, lambda j, y: (j + 1, y * z), (0, y))[1]

        return tf.while_loop(lambda i, _: i < 4, repeat, (0, x))[1]

    found = traced(forward, (ROWS, SIDE), (ROWS, SIDE), weights=())
    (inner,) = found.loop.body.loops
    _, constant = inner.loop.body.node("while/while/mul").inputs
    assert constant in inner.loop.body.residuals
    assert loop_memory.loop_memory(inner.loop, inner.loop.body).kept.total == SIZE  # the state


def test_kept_bytes_of_nested_loops_by_hand():
    found = traced(nested, (ROWS, SIDE))
    (inner,) = found.loop.body.loops
    assert loop_memory.loop_memory(inner.loop, inner.loop.body).kept.total == 3 * SIZE
    # Three iterations of the inner loop, exp, and how often the inner loop ran.
    assert found.kept_bytes == 3 * 3 * SIZE + SIZE + 4


def test_a_loop_whose_gradient_is_taken_twice_is_kept_whole():
    plans = []

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> Tensors:
        loss = tf.reduce_sum(loop(5)(x))
        gradients = [tf.gradients(loss * factor, x)[0] for factor in (1.0, 2.0)]
        plans.append(passes.plan_step([loss], gradients, passes.Settings())[1])
        return gradients

    step.get_concrete_function(tf.TensorSpec((ROWS, SIDE)))
    assert plans[0].loops == ()
    assert plans[0].note.endswith("Kept whole: while (its gradient is taken 2 times).")


# TensorFlow calls a function for the loop where it cannot tell what a tape will be used for.
def test_a_loop_under_a_persistent_tape_is_kept_whole():
    plans = []

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> Tensors:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            loss = tf.reduce_sum(loop(5)(x))
        gradients = [tape.gradient(loss, x), tape.gradient(loss, x)]
        plans.append(passes.plan_step([loss], gradients, passes.Settings())[1])
        return gradients

    step.get_concrete_function(tf.TensorSpec((ROWS, SIDE)))
    assert plans[0].loops == ()
    assert plans[0].note.endswith("Kept whole: while/StatefulPartitionedCall (function call).")


@tf.function
def called(y: tf.Tensor) -> tf.Tensor:
    return tf.tanh(y) * y


def branch_and_call(y: tf.Tensor) -> tf.Tensor:
    y = tf.cond(tf.reduce_sum(y) > 0, lambda: tf.tanh(y) * y, lambda: tf.exp(y))
    return called(tf.matmul(y, KERNEL))


def test_conditionals_and_calls_are_named_in_the_note():
    note = traced(branch_and_call, (ROWS, SIDE)).plan.note
    assert note.endswith("Kept whole: cond (conditional), PartitionedCall (function call).")


def test_conditionals_and_calls_in_a_loop_are_named_in_the_note():
    def forward(x: tf.Tensor) -> tf.Tensor:
        def body(i: Any, y: Any) -> Any:
            return i + 1, branch_and_call(y)

        return tf.while_loop(lambda i, _: i < 4, body, (0, x))[1]

    note = traced(forward, (ROWS, SIDE)).plan.note
    assert re.search(r"Kept whole: \S+ \(conditional\), \S+ \(function call\)", note)


def test_no_more_than_five_of_what_is_kept_whole_are_named():
    def forward(x: tf.Tensor) -> tf.Tensor:
        for _ in range(7):
            x = called(x)
        return x

    note = traced(forward, (ROWS, SIDE), weights=()).plan.note
    assert note.count("(function call)") == 5
    assert note.endswith(" and 2 more.")


def pushed(found: LoopTrace) -> list[str]:
    """Names of the tensors' ops that the forward loop puts on lists in each iteration."""
    outputs = loop_internals.body_graph(found.forward).outputs
    return sorted(t.op.inputs[1].op.name for t in outputs if t.op.type == "TensorListPushBack")


def popped(found: LoopTrace) -> int:
    """How many lists the gradient reads."""
    operations = loop_internals.body_graph(found.backward).get_operations()
    pops = [op for op in operations if op.type == "TensorListPopBack"]
    return sum(bool(op.outputs[1].consumers()) for op in pops)


def copies(found: LoopTrace) -> list[str]:
    """Names of the ops that were copied into the gradient's body, and are read."""
    added = rewriter.copies_of(loop_internals.body_graph(found.backward))
    assert all(any(t.consumers() for t in op.outputs) for op in added)
    return sorted(op.name.removesuffix("/recompute") for op in added)


READS = ["while/MatMul/ReadVariableOp", "while/MatMul_1/ReadVariableOp"]


def test_policy_none_leaves_both_loops_as_they_are():
    found = traced(loop(5), (ROWS, SIDE), policy="none").loop
    assert pushed(found) == sorted([*READS, "while/Exp", "while/Placeholder_1", "while/Tanh"])
    assert popped(found) == 5
    assert copies(found) == []


def test_what_is_recomputed_is_neither_pushed_nor_popped():
    found = traced(loop(5), (ROWS, SIDE)).loop
    assert copies(found) == ["while/Tanh"]
    assert pushed(found) == sorted([*READS, "while/Exp", "while/Placeholder_1"])
    assert popped(found) == 4


def test_under_xla_weights_are_read_again_instead_of_popped():
    found = traced(loop(5), (ROWS, SIDE), compiled=True).loop
    assert copies(found) == sorted([*READS, "while/Tanh"])
    assert pushed(found) == ["while/Exp", "while/Placeholder_1"]
    assert popped(found) == 2


def test_a_list_that_is_no_longer_pushed_to_has_room_for_one_tensor():
    # XLA makes room for what a list may hold; -1 is what TensorFlow takes for no limit.
    found = traced(loop(5), (ROWS, SIDE)).loop
    lists = [t.op for t in found.forward.inputs if t.op.type == "EmptyTensorList"]
    assert sorted(int(tf.get_static_value(op.inputs[1])) for op in lists) == [-1, -1, -1, -1, 1]


def test_the_gradient_reads_copies_and_those_wait_for_the_upstream_gradient():
    body = loop_internals.body_graph(traced(loop(5), (ROWS, SIDE)).loop.backward)
    (copy,) = rewriter.copies_of(body)
    assert {op.type for op in copy.outputs[0].consumers()} == {"TanhGrad", "MatMul"}
    (gate,) = copy.control_inputs
    assert gate.type == "Identity"
    assert gate.inputs[0].op.type == "MatMul"


def test_the_inner_loop_is_rewritten_too():
    found = traced(nested, (ROWS, SIDE)).loop
    (inner,) = found.body.loops
    assert copies(inner) == ["while/while/Tanh"]
    assert popped(inner) == 4
    assert "while/while/Tanh" not in pushed(inner)


@pytest.mark.parametrize(
    ("policy", "compiled", "expected"),
    [("echo", False, 1), ("none", False, 10), ("echo", True, 10), ("none", True, 10)],
)
def test_only_planned_loops_that_xla_does_not_compile_run_in_order(policy, compiled, expected):
    found = traced(nested, (ROWS, SIDE), policy=policy, compiled=compiled).loop
    (inner,) = found.body.loops
    loops = [found.forward, found.backward, inner.forward, inner.backward]
    assert [op.get_attr("parallel_iterations") for op in loops] == [expected] * 4


def test_loops_in_loops_run_in_order_where_nothing_is_recomputed_too():
    def multiply(i: Any, y: Any) -> Any:
        return i + 1, tf.matmul(y, KERNEL)

    def repeat(i: Any, y: Any) -> Any:
        return i + 1, tf.while_loop(lambda j, _: j < 3, multiply, (0, y))[1]

    found = traced(lambda x: tf.while_loop(lambda i, _: i < 4, repeat, (0, x))[1], (ROWS, SIDE))
    (plan,), (inner,) = found.plan.loops, found.loop.body.loops
    assert not plan.recompute
    assert (plan.in_order, plan.loops[0].in_order) == (True, True)
    loops = [found.loop.forward, found.loop.backward, inner.forward, inner.backward]
    assert [op.get_attr("parallel_iterations") for op in loops] == [1] * 4


ATTENTION = """
import sys
import tensorflow as tf
from tf_echo import passes, rewriter, tracing

kernel = tf.Variable(tf.ones((32, 32)))

def forward(x, keys):
    def body(i, state):
        energy = tf.tanh(tf.expand_dims(state @ kernel, 1) + keys)
        return i + 1, tf.reduce_sum(energy, 1) @ kernel
    return tf.while_loop(lambda i, _: i < 12, body, (0, x), maximum_iterations=12)[1]

def step_under(policy):
    def step(x, keys):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(forward(x, keys))
        gradients = tape.gradient(loss, [kernel])
        settings = passes.Settings(policy)
        trace, plan = passes.plan_step([loss], tracing.flat_gradients(gradients), settings)
        rewriter.rewrite(trace, plan)
        return gradients
    step.__name__ = f"policy_{policy}"
    return tf.function(step, jit_compile=True, autograph=False)

for policy in ("none", "echo"):
    step_under(policy)(tf.zeros((16, 32)), tf.zeros((16, 64, 32)))
"""


def test_xla_allots_less_to_a_loop_that_is_recomputed(tmp_path):
    root = pathlib.Path(__file__).parents[2]
    flags = f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text"
    environment = {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": str(root)}
    subprocess.run([sys.executable, "-c", ATTENTION], env=environment, timeout=120, check=True)
    found = {
        policy: max(
            int(size)
            for path in tmp_path.glob(f"*policy_{policy}*buffer-assignment.txt")
            for size in re.findall(r"Total bytes used: (\d+)", path.read_text())
        )
        for policy in ("none", "echo")
    }
    # Of each of 12 iterations 128 KiB of energy become 2 KiB of query; there remain the keys,
    # their sum, and one iteration's work. 5.6 when it was written.
    assert found["none"] > 4 * found["echo"]

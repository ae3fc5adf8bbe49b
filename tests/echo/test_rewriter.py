"""What rewriting does to a TensorFlow graph."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

from tf_echo import gating, regions, rewriter, tracing
from tf_echo.memory_model import simulate
from tf_echo.plan import PeakMemory, RecomputePlan, RegionDecision

NO_PEAK = PeakMemory(0, 0, 0, 0)


def plan_of(*decisions: RegionDecision) -> RecomputePlan:
    return RecomputePlan("by hand", decisions, NO_PEAK, NO_PEAK, None)


def recompute_all(trace: tracing.Trace) -> RecomputePlan:
    """A plan that runs every replayable op again whose result, directly or not, the backward pass
    reads."""
    view, decisions = trace.view, []
    steps = gating.steps_of(simulate(view))
    for region in regions.partition(view):
        nodes = [view.nodes[n] for n in region.nodes]
        readers = [r for n in nodes for t in n.outputs for r in gating.backward_readers(view, t)]
        if readers:
            gate = view.tensor_name(gating.find_gates(view, {0: readers}, steps)[0])
            names = tuple(n.name for n in nodes)
            decisions.append(
                RegionDecision(region.index, "", len(nodes), True, 0, 0, 0.0, "", names, gate)
            )
    return plan_of(*decisions)


def run(
    forward: Callable[[tf.Tensor], tf.Tensor],
    x: np.ndarray,
    planner: Callable[[tracing.Trace], RecomputePlan] | None,
    graphs: list[tf.Graph] | None = None,
) -> np.ndarray:
    """The gradient of a loss with respect to its input, planned or not."""

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = forward(x)
        gradient = tape.gradient(loss, x)
        if planner is not None:
            trace = tracing.trace_step([loss], [gradient])
            rewriter.rewrite(trace, planner(trace))
        if graphs is not None:
            graphs.append(gradient.graph)
        return gradient

    return step(tf.constant(x)).numpy()


def chain(x: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.tanh(tf.exp(tf.matmul(x, x)) * 0.5) ** 2)


def test_gradients_are_bit_equal_and_forward_ops_stay():
    x = np.random.default_rng(0).standard_normal((8, 8)).astype("float32")
    before: list[tf.Graph] = []
    after: list[tf.Graph] = []
    plain = run(chain, x, None, before)
    np.testing.assert_array_equal(run(chain, x, recompute_all, after), plain)
    plain_ops = {op.name: op.type for op in before[0].get_operations()}
    rewritten = {op.name: op.type for op in after[0].get_operations()}
    assert plain_ops.items() <= rewritten.items()
    assert len(rewriter.copies_of(after[0])) >= 3


def test_no_backward_op_reads_what_was_recomputed():
    graphs: list[tf.Graph] = []
    run(chain, np.ones((4, 4), "float32"), recompute_all, graphs)
    readers = graphs[0].get_operation_by_name("Tanh").outputs[0].consumers()
    assert [op.name for op in readers if "gradient_tape" in op.name] == []


def test_signs_of_zeros_survive_the_gate():
    # 1 / x tells -0.0 from 0.0. Sign(1 / x) is what the gradient multiplies with.
    def forward(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.tanh(tf.sign(1.0 / (tf.matmul(x, tf.eye(2)) * 1.0)) * x))

    x = np.array([[-0.0, 0.0], [0.5, -0.5]], "float32")
    np.testing.assert_array_equal(run(forward, x, recompute_all), run(forward, x, None))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_gate_that_is_not_finite_changes_nothing(value):
    def forward(x: tf.Tensor) -> tf.Tensor:
        y = tf.tanh(tf.exp(tf.matmul(x, tf.eye(2))))
        return tf.reduce_sum(y[0]) + tf.reduce_sum(y[1] * value)

    x = np.array([[0.1, 0.2], [0.3, 0.4]], "float32")
    np.testing.assert_array_equal(run(forward, x, recompute_all), run(forward, x, None))


def test_an_empty_gate_changes_nothing():
    def forward(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.tanh(tf.exp(tf.matmul(x, x, transpose_a=True))) ** 2)

    x = np.zeros((0, 3), "float32")
    np.testing.assert_array_equal(run(forward, x, recompute_all), run(forward, x, None))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_other_dtypes_are_bit_equal(dtype):
    def forward(x: tf.Tensor) -> tf.Tensor:
        y = tf.cast(x, dtype)
        return tf.reduce_sum(tf.cast(tf.tanh(tf.exp(tf.matmul(y, y))), "float32"))

    x = np.random.default_rng(0).standard_normal((6, 6)).astype("float32")
    np.testing.assert_array_equal(run(forward, x, recompute_all), run(forward, x, None))


def test_random_numbers_are_drawn_again_from_the_same_seed():
    seed = tf.Variable([3, 4])

    def forward(x: tf.Tensor) -> tf.Tensor:
        y = tf.nn.experimental.stateless_dropout(tf.matmul(x, x), 0.5, seed=seed.read_value())
        return tf.reduce_sum(tf.exp(y) ** 2)

    x = np.random.default_rng(0).standard_normal((16, 16)).astype("float32") / 8
    graphs: list[tf.Graph] = []
    np.testing.assert_array_equal(run(forward, x, recompute_all, graphs), run(forward, x, None))
    assert "StatelessRandomUniformV2" in {op.type for op in rewriter.copies_of(graphs[0])}


def test_the_empty_plan_changes_nothing():
    plain: list[tf.Graph] = []
    planned: list[tf.Graph] = []
    x = np.ones((4, 4), "float32")
    run(chain, x, None, plain)
    run(chain, x, lambda trace: plan_of(), planned)
    texts = [str(graphs[0].as_graph_def().node) for graphs in (plain, planned)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodes": ("NoSuchOp",)}, "which this graph does not hold"),
        ({"nodes": ("MatMul",)}, "which may not run twice"),
        ({"gate": "no_such_gate"}, "which this graph does not hold"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_and_the_graph_unchanged(change, message):
    sizes = []

    def planner(trace: tracing.Trace) -> RecomputePlan:
        good = recompute_all(trace)
        bad = dataclasses.replace(good.decisions[-1], **change)
        sizes.append(len(trace.graph.get_operations()))
        with pytest.raises(ValueError, match=message):
            rewriter.rewrite(trace, plan_of(*good.decisions[:-1], bad))
        sizes.append(len(trace.graph.get_operations()))
        return plan_of()

    run(chain, np.ones((4, 4), "float32"), planner)
    assert sizes[0] == sizes[1]


def test_a_gate_that_needs_the_region_is_refused():
    def planner(trace: tracing.Trace) -> RecomputePlan:
        good = recompute_all(trace).decisions[0]
        last = trace.view.tensor_name(
            [n for n in trace.view.nodes if n.backward and n.outputs][-1].outputs[0]
        )
        with pytest.raises(ValueError, match="itself needs what the region recomputes"):
            rewriter.rewrite(trace, plan_of(dataclasses.replace(good, gate=last)))
        return plan_of()

    run(chain, np.ones((4, 4), "float32"), planner)


def test_of_two_that_compute_the_same_none_goes_on_reading_what_is_recomputed():
    def twice(x: tf.Tensor) -> tf.Tensor:
        h = tf.matmul(x, x)
        return tf.reduce_sum(tf.exp(h) * tf.matmul(tf.exp(h), x) * tf.tanh(tf.exp(h)))

    x = np.random.default_rng(0).standard_normal((8, 8)).astype("float32") / 8
    graphs: list[tf.Graph] = []
    expected = run(twice, x, None)
    np.testing.assert_array_equal(run(twice, x, recompute_all, graphs), expected)
    exps = [op for op in graphs[0].get_operations() if op.type == "Exp"]
    original, *others = (op for op in exps if "/recompute" not in op.name)
    assert len(others) == 2
    assert not any(op.outputs[0].consumers() for op in others)
    readers = original.outputs[0].consumers()
    assert readers
    assert not any("gradient_tape" in reader.name for reader in readers)

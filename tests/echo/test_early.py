"""What gradients make of forward values alone waits for the upstream gradient."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_echo
from tests import reference
from tf_echo import early, evaluation, passes, rewriter
from tf_echo.cost_model import UnitCost
from tf_echo.graph_view import GraphView, parse_view
from tf_echo.memory_model import simulate
from tf_echo.plan import PeakMemory, RecomputePlan

SOFTPLUS = """
    x = Placeholder [1MiB]
    v = Placeholder [0B resource fixed]
    w = ReadVariableOp v [1KiB fixed]
    a = MatMul x w [1MiB]
    s = Softplus a [1MiB]
    y = MatMul s w [1MiB]
    loss = Mean y [4B]
    backward:
    g = Const [4B fixed]
    dy = Mul g loss [1MiB]
    ds = MatMul dy w [1MiB]
    scaled = Mul ds g [1MiB]
    {derivative}
    da = Mul scaled d [1MiB]
    dw = MatMul x da [1KiB fixed]
    loss: loss
    seed: g
"""
DERIVATIVES = {
    "one op": ("d = Sigmoid a [1MiB]", [("d", "ds")]),
    "several": ("b = Square a [1MiB]\n c = Exp b [1MiB]\n d = Mul c a [1MiB]", [("b", "ds")]),
    "two that meet": (
        "b = Square a [1MiB]\n c = Exp a [1MiB]\n d = Mul b c [1MiB]",
        [("b", "ds"), ("c", "ds")],
    ),
    "a constant": ("d = Const [1MiB]", []),
    "small": ("d = Mean a [4B]", []),
    "a gradient": ("d = Mul a scaled [1MiB]", []),
    # `a` would be held for it.
    "a mask": ("d = Greater a w [256KiB bool]", []),
}


def softplus(derivative: str) -> GraphView:
    return parse_view(SOFTPLUS.format(derivative=derivative))


def named(view: GraphView) -> list[tuple[str, str]]:
    found = early.upstream(view)
    return [(view.nodes[n].name, view.nodes[found[n]].name) for n in early.worthwhile(view)]


@pytest.mark.parametrize(("derivative", "expected"), DERIVATIVES.values(), ids=DERIVATIVES)
def test_what_waits_and_for_what(derivative, expected):
    assert named(softplus(derivative)) == expected


def test_a_mask_waits_where_what_it_is_made_of_is_held_anyway():
    view = softplus("d = Greater a w [256KiB bool]\n e = Mul scaled a [1MiB]")
    assert named(view) == [("d", "ds")]


def test_what_is_small_beside_the_largest_is_left_alone():
    view = softplus("d = Sigmoid a [1MiB]\n e = Mean a [16KiB]\n f = Mul scaled e [1MiB]")
    assert named(view) == [("d", "ds")]
    larger = softplus("d = Sigmoid a [1MiB]\n e = Mean a [32KiB]\n f = Mul scaled e [1MiB]")
    assert named(larger) == [("d", "ds"), ("e", "ds")]


HELD = """
    x = Placeholder [1KiB]
    a = MatMul x x [4MiB]
    y = MatMul a x [1KiB]
    b = MatMul x x [1KiB]
    loss = MatMul y b [4B]
    backward:
    g = Const [4B fixed]
    dy = Mul g loss [1KiB]
    ds = MatMul dy x [4MiB]
    d = {derivative}
    da = Mul ds d [4MiB]
    loss: loss
    seed: g
"""


@pytest.mark.parametrize(
    ("derivative", "waits"), [("Sigmoid a [4MiB]", ("d",)), ("Greater a x [1MiB bool]", ())]
)
def test_what_would_raise_the_peak_does_not_wait(derivative, waits):
    """By the rule the derivative runs before `b`, and so before the backward pass."""
    view = parse_view(HELD.format(derivative=derivative))
    assert list(early.upstream(view)) == [view.node("d").id]
    trial = evaluation._try(view, (), evaluation.Schedule(), 1.0)
    found = evaluation._wait(view, trial, ("d",), 1.0)
    assert found.schedule.waits == waits


def test_what_waits_runs_after_the_gradient():
    view = softplus("d = Sigmoid a [1MiB]")
    schedule = evaluation.Schedule(waits=("d",))
    with_wait = evaluation.rewire(view, (), schedule).view
    with_wait.verify()
    names = [with_wait.nodes[n].name for n in simulate(with_wait).order]
    assert names.index("d") > names.index("ds")


def test_what_is_there_from_the_start_is_not_waited_for():
    """The gradient of a mean is made of constants."""
    view = parse_view("""
        x = Placeholder [1MiB]
        a = MatMul x x [1MiB]
        s = Softplus a [1MiB]
        loss = Mean s [4B]
        backward:
        g = Const [4B fixed]
        ds = Tile g [1MiB]
        d = Sigmoid a [1MiB]
        da = Mul ds d [1MiB]
        dx = MatMul x da [1MiB]
        loss: loss
        seed: g
    """)
    assert early.upstream(view) == {}


def test_a_plan_says_what_waits_what_that_saves_and_may_leave_it_out():
    """By the rule `d` runs before `b`, and is held meanwhile."""
    view = parse_view("""
        x = Placeholder [1KiB]
        w = Const [1KiB fixed]
        a = MatMul x w [4MiB]
        s = Softplus a [4MiB]
        y = MatMul s w [1KiB]
        b = MatMul x w [1KiB]
        t = MatMul y b [4MiB]
        loss = Mean t [4B]
        backward:
        g = Const [4B fixed]
        dt = Mul t g [4MiB]
        dy = MatMul dt w [1KiB]
        ds = MatMul dy w [4MiB]
        d = Sigmoid a [4MiB]
        da = Mul ds d [4MiB]
        dw = MatMul a da [1KiB fixed]
        loss: loss
        seed: g
    """)
    settings = passes.Settings(cost_model=UnitCost())
    plan = passes.plan_view(view, settings)
    assert plan.waits == ("d",)
    (share,) = plan.shares
    assert (share.technique, share.count) == ("waits", 1)
    assert share.saved_bytes > 0
    without = passes.plan_view(view, dataclasses.replace(settings, without=("waits",)))
    assert without.waits == ()
    assert without.after.total_bytes == plan.after.total_bytes + share.saved_bytes


class Softplus(keras.layers.Layer):
    """Activations of which the derivatives are made of forward values first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [keras.layers.Dense(48, activation=name) for name in ("softplus", "mish")]

    def call(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def trained(optimizer: keras.optimizers.Optimizer) -> tuple[list[np.ndarray], keras.Model]:
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((48,)), Softplus(), keras.layers.Dense(1)])
    model.compile(optimizer, "mse", jit_compile=False)
    rng = np.random.default_rng(0)
    with reference.grappler(enabled=False):
        model.fit(rng.normal(size=(96, 48)), rng.normal(size=(96, 1)), batch_size=32, verbose=0)
    return [v.numpy() for v in model.variables], model


def test_training_is_the_same_bit_by_bit():
    expected, _ = trained(keras.optimizers.Adam())
    actual, model = trained(tf_echo.EchoOptimizer("adam"))
    plan = model.optimizer.plan
    assert any(name.endswith("Sigmoid") for name in plan.waits), plan.waits
    assert "derivatives wait" in tf_echo.report(plan)
    assert tf_echo.RecomputePlan.from_json(plan.to_json()) == plan
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(one, other)


PEAK = PeakMemory(0, 0, 0, 0)


@pytest.mark.parametrize("name", ["no/such/op", "Sum", "gradient"])
def test_a_plan_that_lets_something_else_wait_is_refused_and_changes_nothing(name):
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, (32, 32), "x")
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.matmul(tf.math.softplus(x * 2.0) * x, tf.ones((32, 32)))
            loss = tf.reduce_sum(y**2, name="Sum")
        gradient = tf.identity(tape.gradient(loss, x), "gradient")
        trace = passes.trace_step([loss], [gradient])
        waits = tuple(trace.view.nodes[n].name for n in early.worthwhile(trace.view))
        assert waits
        before = graph.as_graph_def().SerializeToString(deterministic=True)
        plan = RecomputePlan("hand", (), PEAK, PEAK, None, waits=(*waits, name))
        with pytest.raises(rewriter.PlanMismatchError, match=f"lets '{name}' wait"):
            rewriter.rewrite(trace, plan)
        assert graph.as_graph_def().SerializeToString(deterministic=True) == before
        rewriter.rewrite(trace, dataclasses.replace(plan, waits=waits))
        assert all(graph.get_operation_by_name(name).control_inputs for name in waits)

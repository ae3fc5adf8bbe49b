"""Models with loops train the same with and without EchoOptimizer, bit by bit, with and without
XLA, and keep less of each iteration.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_echo
from tests import reference
from tests.echo import forcing, loop_models, models, small
from tf_echo import loop_internals, loop_rewriter, passes, rewriter
from tf_echo.plan import LoopPlan, RegionDecision

_RUNS = [
    pytest.param(
        case.name,
        planner,
        ("open", "fixed")[(number + place) % 2],
        id=f"{case}-{planner}",
        marks=[pytest.mark.slow] if (number + place) % 8 else [],
    )
    for number, case in enumerate(loop_models.CASES)
    for place, planner in enumerate(forcing.PLANNERS)
]
_COMPILED = [
    pytest.param(
        case.name,
        ("open", "fixed")[number % 2],
        marks=[pytest.mark.slow] if number % 14 else [],
    )
    for number, case in enumerate(loop_models.CASES)
    if case.name not in loop_models.WITHOUT_XLA
]


def _sgd() -> keras.optimizers.SGD:
    return keras.optimizers.SGD(0.01, momentum=0.9)


def _train(
    case: models.Case,
    optimizer: Callable[[], keras.optimizers.Optimizer],
    batch: str,
    compiled: bool = False,
) -> reference.Run:
    options = {**case.compiling, "jit_compile": compiled}
    with reference.grappler(enabled=False):
        dataset = case.dataset(batch == "open")
        return reference.train(case.build, optimizer, dataset, options, case.fitting)


@functools.lru_cache(maxsize=4)
def _train_plain(name: str, batch: str, compiled: bool = False) -> reference.Run:
    return _train(loop_models.named(name), _sgd, batch, compiled)


def _all_loops(plans: Iterator[LoopPlan] | tuple[LoopPlan, ...]) -> Iterator[LoopPlan]:
    for plan in plans:
        yield plan
        yield from _all_loops(plan.loops)


@pytest.mark.parametrize(("name", "planner", "batch"), _RUNS)
def test_model_with_loops_trains_the_same(name, planner, batch, monkeypatch):
    forcing.force(monkeypatch, planner)
    run = _train(loop_models.named(name), lambda: tf_echo.EchoOptimizer(_sgd()), batch)
    loops = list(_all_loops(run.model.optimizer.plan.loops))
    assert loops
    if planner != "echo":
        assert all(loop.recompute for loop in loops)
    assert reference.differences(run, _train_plain(name, batch)) == []


@pytest.mark.parametrize(("name", "batch"), _COMPILED)
def test_model_with_loops_trains_the_same_under_xla(name, batch):
    run = _train(loop_models.named(name), lambda: tf_echo.EchoOptimizer(_sgd()), batch, True)
    # XLA fuses, and so rounds, what is around a loop differently.
    assert reference.differences(run, _train_plain(name, batch, True), 1e-6) == []
    assert any(loop.recompute for loop in run.model.optimizer.plan.loops)


def _taken_apart(apply_between: bool, optimizer: Callable[[], keras.optimizers.Optimizer]) -> list:
    """Weights after two losses of one loop, each with an optimizer of its own."""
    x = tf.constant(np.random.default_rng(0).normal(size=(64, 12)), tf.float32)
    start = np.random.default_rng(1).normal(size=(2, 12, 12)).astype("float32") / 3
    weights = [keras.Variable(value) for value in start]
    optimizers = [optimizer() for _ in weights]
    for one, weight in zip(optimizers, weights, strict=True):
        one.build([weight])

    @tf.function(autograph=False)
    def step():
        def body(i, y):
            y = tf.nn.gelu(tf.matmul(y, weights[0])) * tf.sigmoid(y)
            return i + 1, tf.tanh(tf.matmul(y, weights[1])) * y

        y = tf.while_loop(lambda i, _: i < 5, body, (0, x))[1]
        losses = [one.scale_loss(tf.reduce_mean(y**2)) for one in optimizers]
        if apply_between:
            for one, weight, loss in zip(optimizers, weights, losses, strict=True):
                one.apply(tf.gradients(loss, [weight]), [weight])
        else:
            found = [tf.gradients(t, [w]) for t, w in zip(losses, weights, strict=True)]
            for one, weight, gradient in zip(optimizers, weights, found, strict=True):
                one.apply(gradient, [weight])

    with reference.grappler(enabled=False), tf.device("CPU:0"):
        step()
        step()
    return [weight.numpy() for weight in weights]


@pytest.mark.parametrize("apply_between", [True, False])
def test_a_loop_may_be_differentiated_again_after_it_was_changed(apply_between, monkeypatch):
    forcing.force(monkeypatch, "proposed")
    found = _taken_apart(apply_between, lambda: tf_echo.EchoOptimizer(_sgd()))
    small.assert_equal(found, _taken_apart(apply_between, _sgd))


@pytest.mark.parametrize("name", ["loop_nested", "lstm_with_dropout_and_recurrent_dropout"])
def test_what_the_gradient_does_not_read_is_not_kept(name, monkeypatch):
    """Also in a loop within a loop."""
    forcing.force(monkeypatch, "everything")
    gradients: list[tf.Operation] = []
    rewrite = loop_rewriter.rewrite_loop
    monkeypatch.setattr(
        loop_rewriter,
        "rewrite_loop",
        lambda trace, plan: (gradients.append(trace.backward), rewrite(trace, plan)),
    )
    _train(loop_models.named(name), lambda: tf_echo.EchoOptimizer(_sgd()), "fixed")
    unread = [
        pop
        for loop in gradients
        for pop in loop_internals.body_graph(loop).get_operations()
        if pop.type == "TensorListPopBack" and not pop.outputs[1].consumers()
    ]
    assert unread
    for pop in unread:
        # On a list of its own, not on one that the loop hands it.
        assert pop.inputs[0].op.type == "EmptyTensorList"


def _by_hand(node: str) -> RegionDecision:
    gate = "gradient_tape/while/Placeholder"
    return RegionDecision(0, "", 1, True, 0, 0, 0.0, "by hand", (node,), gate)


_PLAN = LoopPlan("while", 5, True, True, 0, 0, "by hand")


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (dataclasses.replace(_PLAN, loop="none"), "'none', which is no loop"),
        (dataclasses.replace(_PLAN, loops=(_PLAN,)), "'while', which is no loop"),
        (dataclasses.replace(_PLAN, sums=("while/Tanh",)), "no AddN"),
        (dataclasses.replace(_PLAN, reread=("while/Tanh",)), "stays as it is"),
        (dataclasses.replace(_PLAN, decisions=(_by_hand("while/MatMul"),)), "may not run twice"),
        (dataclasses.replace(_PLAN, decisions=(_by_hand("nothing"),)), "does not hold"),
    ],
)
def test_a_plan_that_does_not_fit_a_loop_changes_nothing(plan, message):
    kernel = tf.Variable(tf.eye(4))

    @tf.function(autograph=False)
    def step(x):
        def body(i, y):
            return i + 1, tf.tanh(tf.matmul(y, kernel))

        with tf.GradientTape() as tape:
            y = tf.while_loop(lambda i, _: i < 5, body, (0, x))[1]
            loss = tf.reduce_mean(y)
        gradients = [tape.gradient(loss, kernel)]
        trace, empty = passes.plan_step([loss], gradients, passes.Settings("none"))
        before = trace.graph.as_graph_def().SerializeToString(deterministic=True)
        with pytest.raises(ValueError, match=message):
            rewriter.rewrite(trace, dataclasses.replace(empty, loops=(plan,)))
        assert trace.graph.as_graph_def().SerializeToString(deterministic=True) == before
        return loss

    step.get_concrete_function(tf.TensorSpec((3, 4)))

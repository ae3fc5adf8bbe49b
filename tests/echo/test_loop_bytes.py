"""What a plan says that a loop keeps of each iteration is what the loop's body then pushes on
lists.
"""

import keras
import pytest
import tensorflow as tf

import tf_echo
from tests import reference
from tests.echo import forcing, loop_models
from tf_echo import loop_internals, rewriter
from tf_echo.plan import LoopPlan, RecomputePlan
from tf_echo.tracer import LoopTrace, Trace

_SHAPE_BYTES = 16
"""Under XLA shapes are worked out again; the plan counts them as kept."""


_RUNS = [
    pytest.param(
        case.name,
        ("open", "fixed")[number % 2],
        compiled,
        id=f"{case}-{'xla' if compiled else 'plain'}",
        marks=[] if number % 28 == 3 else [pytest.mark.slow],
    )
    for number, case in enumerate(loop_models.CASES)
    for compiled in (False, True)
    if not (compiled and case.name in loop_models.WITHOUT_XLA)
]


def _pushed(graph: tf.Graph) -> list[tf.Tensor]:
    """What the body of a loop keeps of an iteration."""
    pairs = zip(graph.inputs, graph.outputs, strict=True)
    return [o.op.inputs[1] for i, o in pairs if o.op.type == "TensorListPushBack" and o is not i]


def _kept_bytes(trace: LoopTrace) -> int:
    """Bytes of what is pushed. Without XLA what shares memory with a variable, with an input of the
    loop or with the state that the next iteration pushes takes none.
    """
    view = trace.body.view
    pushed = [
        trace.body.numbers[id(item)][1]
        for item in _pushed(loop_internals.body_graph(trace.forward))
        if item.dtype != tf.variant  # the lists of a loop inside
    ]
    if not trace.loop.compiled:
        roots = {view.buffers[t] for t in pushed if not view.is_source(t)}
        states = {view.buffers[result] for result, variable in view.carried if variable in pushed}
        pushed = sorted(roots - states)
    inside = sum(inner.loop.trips * _kept_bytes(inner) for inner in trace.body.loops)
    return sum(view.tensors[t].nbytes for t in pushed) + inside


def _pairs(
    traces: tuple[LoopTrace, ...], plans: tuple[LoopPlan, ...]
) -> list[tuple[LoopTrace, LoopPlan]]:
    found = list(zip(traces, plans, strict=True))
    return found + [pair for t, p in found for pair in _pairs(t.body.loops, p.loops)]


@pytest.mark.parametrize(
    "planner", [pytest.param("echo", marks=pytest.mark.slow), "proposed"], ids=["echo", "proposed"]
)
@pytest.mark.parametrize(("name", "batch", "compiled"), _RUNS)
def test_loops_push_what_their_plans_say(name, batch, planner, compiled, monkeypatch):
    case = loop_models.named(name)
    forcing.force(monkeypatch, planner)
    steps: list[tuple[Trace, RecomputePlan]] = []
    rewrite = rewriter.rewrite
    monkeypatch.setattr(rewriter, "rewrite", lambda t, p: (rewrite(t, p), steps.append((t, p))))
    optimizer = tf_echo.EchoOptimizer(keras.optimizers.SGD(0.01))
    options = {**case.compiling, "jit_compile": compiled}
    reference.train(
        case.build, lambda: optimizer, case.dataset(batch == "open").take(1), options, case.fitting
    )
    pairs = _pairs(steps[0][0].loops, steps[0][1].loops)
    assert pairs
    if planner == "proposed":
        assert all(plan.recompute for _, plan in pairs)
    for trace, plan in pairs:
        expected = plan.after_bytes if plan.recompute else plan.before_bytes
        assert _kept_bytes(trace) == pytest.approx(expected, abs=_SHAPE_BYTES), plan.loop

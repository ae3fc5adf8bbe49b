"""In which order the executor runs a step: by rule, and as Grappler leaves the graph."""

import dataclasses
import threading
from collections.abc import Iterator

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

import tf_echo
from tests import reference
from tests.echo import small
from tf_echo import (
    evaluation,
    executor_order,
    grappler_order,
    passes,
    rewriter,
    tf_internals,
    tracing,
)
from tf_echo.graph_view import GraphView, parse_view
from tf_echo.memory_model import simulate
from tf_echo.tracer import Trace

L = keras.layers


def _ran(text: str) -> list[str]:
    view = parse_view(text)
    return [view.nodes[number].name for number in view.execution_order]


def _constants(text: str, batch_size: int | None = None) -> set[str]:
    view = dataclasses.replace(parse_view(text), batch_size=batch_size)
    found = view._constants()
    return {node.name for node in view.nodes if found[node.id]}


def test_what_needs_nothing_runs_before_all_that_waits_for_data():
    ran = _ran("""
        x = Placeholder [1KiB]
        a = MatMul x x [1KiB]
        one = Const [4B fixed]
        w = Placeholder [0B resource fixed]
        r = ReadVariableOp w [1KiB fixed]
        s = MatMul r r [1KiB fixed]
        b = MatMul a s [1KiB]
    """)
    assert set(ran[:3]) == {"one", "w", "r"}
    assert ran.index("s") < ran.index("x")


def test_what_is_made_of_constants_alone_is_there_at_once():
    text = """
        x = Placeholder [1KiB]
        a = MatMul x x [1KiB]
        n = Const [4B int32 fixed]
        k = Range n n n [400B int32 fixed]
        g = MatMul a k [1KiB]
        h = MatMul a a [1KiB]
        h2 = MatMul h h [1KiB]
        h3 = MatMul h2 g [1KiB]
    """
    assert _constants(text) == {"n", "k"}
    assert _ran(text)[:2] == ["n", "k"]
    # Grappler makes no constants that are larger, and none of what draws numbers.
    for made in ("Range n n n [200KiB int32 fixed]", "StatelessRandomUniform n n [400B fixed]"):
        assert _constants(text.replace("Range n n n [400B int32 fixed]", made)) == {"n"}


def test_the_shape_of_what_grows_with_an_open_batch_is_no_constant():
    text = """
        x = Placeholder [1KiB]
        s = Shape x [8B int32 fixed]
        t = Cast s [8B fixed]
        loss = Mean x
    """
    assert _constants(text) == {"s", "t"}
    assert _constants(text, batch_size=32) == set()


def test_places_of_what_was_merged_or_removed_follow_from_the_rest():
    #      0 -> 1 -> 2 -> 3, and 4 reads 0 and is read by nobody
    sources = [(), (0,), (1,), (2,), (0,)]
    assert executor_order.known_places(sources, [5, None, 9, 12, None]) == [5, 8.5, 9, 12, 5.5]
    assert executor_order.known_places(sources, [5, None, None, 12, 7]) == [5, 11, 11.5, 12, 7]


def test_a_known_order_is_that_of_the_simulation():
    view = parse_view("x = Placeholder\na = MatMul x x\nb = MatMul x x\nc = MatMul a b")
    order = (0, 2, 1, 3)
    assert view.execution_order != order
    known = GraphView(view.nodes, view.tensors, view.loss, known_order=order)
    assert simulate(known).order == order


# What Grappler says.


def _pooled() -> keras.Model:
    """Three branches, of which the gradients are made of much that the forward pass gives."""
    x = keras.Input((32, 8))
    pooled = [L.GlobalMaxPooling1D()(L.Conv1D(16, k, activation="relu")(x)) for k in (2, 3, 4)]
    h = L.Dense(16, activation="tanh")(L.Dropout(0.3)(L.Concatenate()(pooled)))
    return keras.Model(x, L.Dense(1)(h))


def _residual() -> keras.Model:
    x = h = keras.Input((16,))
    for _ in range(6):
        h = h + L.Dense(16, activation="sigmoid")(L.LayerNormalization()(h)) * L.Dense(16)(h)
    return keras.Model(x, L.Dense(1)(h))


def _convolutions() -> keras.Model:
    x = h = keras.Input((12, 12, 3))
    for _ in range(4):
        h = L.Conv2D(8, 3, padding="same", activation="relu")(h)
    return keras.Model(x, L.Dense(1)(L.Flatten()(L.MaxPooling2D()(h))))


@pytest.fixture
def collecting() -> Iterator[None]:
    """Lets TensorFlow note the graphs that run, as Grappler left them."""
    current = context.context()
    current.enable_graph_collection()
    with reference.grappler(enabled=True):
        yield
    current.disable_graph_collection()


def _largest_graph() -> tf.compat.v1.GraphDef:
    functions = context.context().export_run_metadata().function_graphs
    graphs = [function.post_optimization_graph for function in functions]
    return max(graphs, key=lambda graph: len(graph.node))


def _in_known_order(trace: Trace) -> GraphView:
    return tracing.in_known_order(trace.view, tracing.order_question(trace)())


def _trained(model: keras.Model, monkeypatch: pytest.MonkeyPatch) -> GraphView:
    """The view of the step that Keras trains, in the order that is asked for."""
    views: list[GraphView] = []
    trace_step = tracing.trace_step

    def record(*args: object) -> object:
        trace = trace_step(*args)
        views.append(_in_known_order(trace))
        return trace

    monkeypatch.setattr(passes, "trace_step", record)
    model.compile(tf_echo.EchoOptimizer("sgd", policy="none"), "mse", jit_compile=False)
    x = np.zeros((16, *model.input_shape[1:]), "float32")
    data = tf.data.Dataset.from_tensors((x, np.zeros((16, 1), "float32")))
    context.context().export_run_metadata()
    model.fit(data, verbose=0)
    return views[-1]


@pytest.mark.parametrize("build", [_residual, _convolutions])
def test_the_order_is_that_of_the_graph_that_runs(build, collecting, monkeypatch):
    keras.backend.clear_session()
    view = _trained(build(), monkeypatch)
    places = {
        node.name.partition("/")[2]: place for place, node in enumerate(_largest_graph().node)
    }
    known = executor_order.known_places(view.sources, [places.get(n.name) for n in view.nodes])
    assert sum(node.name in places for node in view.nodes) > len(view.nodes) / 2
    assert view.known_order

    def heavy(order: Iterator[int]) -> list[str]:
        names = ("MatMul", "Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter", "Equal")
        return [view.nodes[n].name for n in order if view.nodes[n].op in names]

    assert heavy(iter(view.known_order)) == heavy(view.run(known))


def test_what_reads_only_the_forward_pass_runs_as_early_as_it_does(collecting, monkeypatch):
    """The gradients of three maxima: by rule the masks are made when they are needed."""
    keras.backend.clear_session()
    view = _trained(_pooled(), monkeypatch)
    steps = {node: step for step, node in enumerate(view.known_order)}
    masks = [n.id for n in view.nodes if n.op == "Equal" and n.backward]
    gradients = [n.id for n in view.nodes if n.op == "MatMul" and n.backward]
    assert len(masks) == 3
    assert max(steps[n] for n in masks) < min(steps[n] for n in gradients)
    rule = GraphView(view.nodes, view.tensors, view.loss)
    assert rule.execution_order != view.known_order


def test_a_graph_that_grappler_does_not_take_is_ordered_by_rule(monkeypatch):
    monkeypatch.setattr(tf_internals, "optimize", lambda *_: None)
    view = _trained(small.mlp(), monkeypatch)
    assert view.known_order == ()
    assert len(view.execution_order) == len(view.nodes)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows whenever Grappler is asked."""
    found: list[int] = []
    optimize = tf_internals.optimize
    monkeypatch.setattr(tf_internals, "optimize", lambda *a: (found.append(1), optimize(*a))[1])
    return found


def test_grappler_is_not_asked_for_a_trace_that_is_repeated_before_it_runs(asked):
    model = small.compiled(lambda: tf_echo.EchoOptimizer("adam", policy="none"), build=False)
    model.fit(small.dataset(), verbose=0)
    # The first trace creates the optimizer's variables.
    assert len(model.optimizer.plans) == 2
    assert len(asked) == 1


def test_plans_do_not_depend_on_whether_grappler_is_on():
    plans = []
    for enabled in (True, False):
        model = small.compiled("adam")
        with reference.grappler(enabled=enabled):
            plans.append(tf_echo.explain(model, *small.one_batch()))
    assert plans[0].recomputed
    assert plans[0] == plans[1]


def test_the_peak_is_predicted_once_more_when_the_plan_is_carried_out(monkeypatch):
    copies: list[set[str]] = []
    question = grappler_order.question

    def record(graph: tf.Graph, *args: object) -> object:
        copies.append({copy.name for copy in rewriter.copies_of(graph)})
        return question(graph, *args)

    orders: list[set[str]] = []
    views: list[GraphView] = []
    in_known_order = tracing.in_known_order

    def record_order(view: GraphView, names: list[str]) -> GraphView:
        orders.append(set(names))
        views.append(in_known_order(view, names))
        return views[-1]

    monkeypatch.setattr(grappler_order, "question", record)
    monkeypatch.setattr(passes, "in_known_order", record_order)
    model = small.compiled("adam")
    plan = tf_echo.explain(model, *small.one_batch())
    assert plan.recomputed
    assert not copies[0]
    assert len(copies[1] & orders[1]) > len(copies[1]) / 2
    before, after = views
    assert not copies[1] & orders[0]
    assert simulate(before).peak_bytes == plan.before.total_bytes
    assert simulate(after).peak_bytes == plan.after.total_bytes
    assert before.known_order
    assert after.known_order


def test_decisions_compare_like_with_like(monkeypatch):
    """Both peaks that decide are those of the rule; Grappler's order is not known by then."""
    choices = []
    choose = evaluation.choose

    def record(view: GraphView, *args: object) -> object:
        assert view.known_order == ()
        choices.append((view, choose(view, *args)))
        return choices[-1][1]

    monkeypatch.setattr(evaluation, "choose", record)
    plan = tf_echo.explain(small.compiled("adam"), *small.one_batch())
    assert plan.recomputed
    for view, choice in choices:
        rewired = evaluation.rewire(view, choice.decisions, choice.schedule).view
        assert choice.before.total_bytes == simulate(view).peak_bytes
        assert choice.after.total_bytes == simulate(rewired).peak_bytes


def test_training_does_not_wait_for_the_order(monkeypatch):
    ends = threading.Event()

    def optimize(*_: object) -> None:
        ends.wait()

    monkeypatch.setattr(tf_internals, "optimize", optimize)
    model = small.compiled(lambda: tf_echo.EchoOptimizer("adam"))
    try:
        model.fit(small.dataset(), verbose=0)
        plans = model.optimizer._steps.plans
        assert plans
        assert not any(plan.done() for plan in plans)
    finally:
        ends.set()  # The process would wait for it at its end.
    assert model.optimizer.plan.recomputed


def test_a_plan_that_changes_nothing_predicts_one_peak(asked):
    model = small.compiled(lambda: tf_echo.EchoOptimizer("sgd", policy="none"))
    plan = tf_echo.explain(model, *small.one_batch())
    assert plan.before == plan.after
    assert len(asked) == 1


def test_results_that_nothing_reads_are_asked_for():
    weight = tf.Variable(np.eye(8, dtype="float32"))
    views: list[GraphView] = []

    @tf.function(autograph=False)
    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.tanh(tf.ones((4, 8)) @ weight))
        gradients = [tape.gradient(loss, weight)]
        trace = tracing.trace_step([loss], tracing.flat_gradients(gradients))
        assert trace.wanted[-2:] == (loss.op, gradients[0].op)
        views.append(_in_known_order(trace))
        return loss

    step.get_concrete_function()
    (view,) = views
    order = [view.nodes[number].op for number in view.known_order]
    assert order.index("TanhGrad") < len(order) - 1 - order[::-1].index("MatMul")

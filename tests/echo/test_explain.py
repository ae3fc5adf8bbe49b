"""Plans for people: `optimizer.plans`, its report, and `explain`, which plans without training."""

import dataclasses
import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_echo
from tests.echo import small
from tf_echo import EchoOptimizer, RecomputePlan, rewriter, tracing
from tf_echo.plan import PeakMemory


def _decisions(plan: RecomputePlan) -> list[tuple]:
    return [(d.recompute, d.nodes) for d in plan.decisions]


def test_before_training_there_is_no_plan():
    optimizer = EchoOptimizer("adam")
    assert (optimizer.plan, optimizer.plans) == (None, [])
    assert "No train step was planned yet" in optimizer.report()


def test_each_trace_is_planned_and_logged_once(caplog):
    model = small.compiled(lambda: EchoOptimizer("sgd"))
    x, y = small.arrays()
    with caplog.at_level(logging.INFO, logger="tf_echo"):
        model.train_on_batch(x[:128], y[:128])
        model.train_on_batch(x[:128], y[:128])
        model.train_on_batch(x[:256], y[:256])
        plans = model.optimizer.plans
    assert plans[-1] is model.optimizer.plan
    levels = [r.levelname for r in caplog.records if r.name.startswith("tf_echo")]
    assert levels == ["INFO"] * len(plans)
    assert 1 < len(plans) <= 3


def test_the_log_line_says_what_was_saved(caplog):
    model = small.compiled(lambda: EchoOptimizer("sgd"))
    with caplog.at_level(logging.INFO, logger="tf_echo"):
        model.train_on_batch(*small.one_batch())
        plan = model.optimizer.plan
    (line,) = (r.getMessage() for r in caplog.records if r.name.startswith("tf_echo"))
    assert f"{len(plan.recomputed)} of {len(plan.decisions)} regions recomputed" in line
    assert f"{plan.ratio:.2f}x" in line


def test_plans_cannot_be_tampered_with():
    model = small.compiled(lambda: EchoOptimizer("sgd"))
    model.train_on_batch(*small.one_batch())
    model.optimizer.plans.clear()
    assert len(model.optimizer.plans) == 1


def test_the_optimizers_report_is_that_of_its_plan():
    model = small.compiled(lambda: EchoOptimizer("sgd"))
    model.train_on_batch(*small.one_batch())
    assert model.optimizer.report() == tf_echo.report(model.optimizer.plan)
    every = model.optimizer.report(every_region=True)
    assert all(d.reason in every for d in model.optimizer.plan.decisions)


def test_the_predicted_peak_is_lower():
    model = small.compiled(lambda: EchoOptimizer("sgd"))
    model.train_on_batch(*small.one_batch())
    plan = model.optimizer.plan
    assert plan.after.total_bytes < plan.before.total_bytes
    assert plan.ratio > 1.0


@pytest.mark.parametrize(
    "make", [lambda: "sgd", lambda: EchoOptimizer("sgd")], ids=["plain", "echo"]
)
@pytest.mark.parametrize("built", [True, False], ids=["built", "not built"])
def test_explaining_a_dataset_gives_the_plan_that_training_makes(make, built):
    explained = tf_echo.explain(small.compiled(make, build=built), small.dataset())
    model = small.compiled(lambda: EchoOptimizer("sgd"))
    model.fit(small.dataset(), verbose=0)
    assert explained.recomputed
    assert dataclasses.replace(explained, name="") == dataclasses.replace(
        model.optimizer.plan, name=""
    )


def test_explaining_a_batch_gives_the_plan_of_training_on_it():
    explained = tf_echo.explain(small.compiled("adam"), *small.one_batch())
    model = small.compiled(lambda: EchoOptimizer("adam"))
    model.train_on_batch(*small.one_batch())
    assert dataclasses.replace(explained, name="") == dataclasses.replace(
        model.optimizer.plan, name=""
    )


def test_explaining_a_scaled_model_gives_the_plan_that_training_makes():
    explained = tf_echo.explain(
        small.compiled(lambda: EchoOptimizer("sgd", loss_scale="dynamic")), *small.one_batch()
    )
    model = small.compiled(lambda: EchoOptimizer("sgd", loss_scale="dynamic"))
    model.train_on_batch(*small.one_batch())
    assert dataclasses.replace(explained, name="") == dataclasses.replace(
        model.optimizer.plan, name=""
    )


BATCHES = {
    "weights": lambda x, y: (x, y, np.ones(len(x), "float32")),
    "float64": lambda x, y: (x.astype("float64"), y.astype("float64")),
    "tensors": lambda x, y: (tf.constant(x), tf.constant(y)),
    "specs": lambda x, y: tuple(tf.TensorSpec(a.shape, a.dtype) for a in (x, y)),
}


@pytest.mark.parametrize("as_batch", BATCHES.values(), ids=BATCHES)
def test_a_batch_may_be_given_as(as_batch):
    assert tf_echo.explain(small.compiled("sgd"), *as_batch(*small.one_batch())).recomputed


MODELS = {
    "plain": lambda: small.compiled("adam"),
    "echo": lambda: small.compiled(lambda: EchoOptimizer("adam")),
    "not built": lambda: small.compiled("adam", build=False),
    "echo, not built": lambda: small.compiled(lambda: EchoOptimizer("adam"), build=False),
    "metrics": lambda: small.compiled("adam", metrics=["mae"], weighted_metrics=["mse"]),
}


def _observed(model: keras.Model) -> dict:
    optimizer = model.optimizer
    return {
        "optimizer": id(optimizer),
        "built": optimizer.built,
        "plans": getattr(optimizer, "plans", None),
        "values": [v.numpy().tolist() for v in [*model.variables, *optimizer.variables]],
        "metrics": [(m.name, any(v.numpy().any() for v in m.variables)) for m in model.metrics],
        "children": sorted(tf.train.Checkpoint(model=model).model._trackable_children()),
        "train_function": model.train_function,
        "learning rate": float(optimizer.learning_rate),
    }


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_explaining_changes_nothing(make):
    model = make()
    before = _observed(model)
    tf_echo.explain(model, *small.one_batch())
    assert _observed(model) == before


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_training_after_explaining_is_as_without(make):
    explained, expected = make(), make()
    tf_echo.explain(explained, *small.one_batch())
    small.assert_equal(small.fit(explained), small.fit(expected))
    small.assert_equal(small.state(explained), small.state(expected))


def test_explaining_a_trained_model_changes_nothing():
    model = small.compiled(lambda: EchoOptimizer("adam"))
    small.fit(model)
    before = _observed(model)
    tf_echo.explain(model, *small.one_batch())
    assert _observed(model) == before


def test_explaining_leaves_the_random_generators_alone():
    model = small.compiled("sgd")
    keras.utils.set_random_seed(3)
    expected = float(tf.random.normal([])), float(keras.random.normal([]))
    keras.utils.set_random_seed(3)
    tf_echo.explain(model, *small.one_batch())
    assert (float(tf.random.normal([])), float(keras.random.normal([]))) == expected


def test_explaining_under_another_policy():
    model = small.compiled(EchoOptimizer("sgd", policy="none"))
    assert tf_echo.explain(model, *small.one_batch()).recomputed == ()
    assert tf_echo.explain(model, *small.one_batch(), policy="echo").recomputed


@pytest.mark.parametrize("size", [128, 512])
def test_an_open_batch_size_is_planned_like_a_fixed_one_of_that_size(size):
    def spec(batch):
        return tf.TensorSpec((batch, small.FEATURES)), tf.TensorSpec((batch, 1))

    model = small.compiled("sgd", dropout=0.0)
    opened = tf_echo.explain(model, *spec(None), nominal_batch_size=size)
    fixed = tf_echo.explain(model, *spec(size))
    assert opened.recomputed
    assert (opened.batch_size, fixed.batch_size) == (size, None)
    assert [d.layer for d in opened.recomputed] == [d.layer for d in fixed.recomputed]


@pytest.mark.parametrize("batch", [None, small.BATCH])
def test_dropout_masks_are_packed_or_drawn_again(batch):
    def masks(**options):
        x, y = tf.TensorSpec((batch, small.FEATURES)), tf.TensorSpec((batch, 1))
        model = small.compiled(EchoOptimizer("sgd", **options))
        plan = tf_echo.explain(model, x, y, nominal_batch_size=small.BATCH)
        drawn = [n for d in plan.recomputed for n in d.nodes if "StatelessRandomUniform" in n]
        return len(plan.bits), len(drawn)

    packed, drawn = masks()
    assert drawn == 0
    assert packed == (2 if batch is None else 0)  # too small for the peak to tell
    packed, drawn = masks(without=["bits"])
    assert packed == 0
    assert drawn > 0


def test_training_on_open_batches_recomputes_what_fixed_ones_do():
    plans = []
    for drop_remainder in (True, False):
        optimizer = EchoOptimizer("sgd", nominal_batch_size=small.BATCH)
        model = small.compiled(optimizer, dropout=0.0)
        model.fit(small.dataset(drop_remainder), verbose=0)
        plans.append(model.optimizer.plan)
    fixed, opened = plans
    assert [d.layer for d in opened.recomputed] == [d.layer for d in fixed.recomputed]


def test_a_function_is_explained_with_its_arguments():
    model = small.mlp()
    before = [v.numpy() for v in model.variables]
    x, y = small.one_batch()
    plan = tf_echo.explain(lambda x, y: tf.reduce_mean((model(x, training=True) - y) ** 2), x, y)
    assert plan.recomputed
    small.assert_equal(model.variables, before)


def test_a_function_of_a_structure_is_explained():
    model = small.mlp()
    x, _ = small.one_batch()
    assert tf_echo.explain(
        lambda batch: tf.reduce_mean(model(batch["x"], training=True) ** 2), {"x": x}
    ).recomputed


ERRORS = {
    "not compiled": (
        lambda: tf_echo.explain(small.mlp(), *small.one_batch()),
        ValueError,
        "must be compiled",
    ),
    "no target": (lambda: tf_echo.explain(3), TypeError, "compiled Keras model or a function.*3"),
    "no variable": (
        lambda: tf_echo.explain(tf.reduce_sum, tf.ones([2])),
        ValueError,
        "must depend on a variable",
    ),
}


@pytest.mark.parametrize(("explain", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_explain_says_what_is_wrong_with(explain, error, message):
    with pytest.raises(error, match=message):
        explain()


def test_a_model_that_is_not_built_cannot_be_explained():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse")
    with pytest.raises(ValueError, match="must be built"):
        tf_echo.explain(model, *small.one_batch())


@pytest.fixture(scope="module")
def plan() -> RecomputePlan:
    return tf_echo.explain(small.compiled("sgd"), *small.one_batch())


def test_a_plan_goes_to_json_and_back(plan):
    assert RecomputePlan.from_json(plan.to_json()) == plan


GARBAGE = {
    "no text": "",
    "no json": "region 0: keep",
    "a number": "3",
    "null": "null",
    "a list": "[]",
    "a string": '"plan"',
    "an empty object": "{}",
    "decisions of a wrong kind": '{"decisions": [3], "before": {}, "after": {}, "sums": []}',
    "decisions no list": '{"decisions": 3}',
}


@pytest.mark.parametrize("text", GARBAGE.values(), ids=GARBAGE)
def test_garbage_is_no_plan(text):
    with pytest.raises(ValueError, match=r"must be what `RecomputePlan\.to_json` returned"):
        RecomputePlan.from_json(text)


def test_a_plan_with_an_unknown_field_is_no_plan(plan):
    with pytest.raises(ValueError, match="must be what"):
        RecomputePlan.from_json(plan.to_json().replace('"policy"', '"polity"'))


def _trace(optimizer) -> tracing.Trace:
    """A train step that is traced, with its gradients, and not rewritten."""
    model = small.mlp()
    found = {}

    @tf.function(autograph=False)
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.build(model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        found["trace"] = tracing.trace_step([loss], gradients)

    step.get_concrete_function(*map(tf.constant, small.one_batch()))
    return found["trace"]


def _text(trace: tracing.Trace) -> str:
    return str(trace.graph.as_graph_def())


@pytest.fixture(scope="module")
def trace() -> tracing.Trace:
    return _trace(keras.optimizers.SGD())


PEAK = PeakMemory(0, 0, 0, 0)
FOREIGN = {
    "an op": lambda d: dataclasses.replace(d, nodes=("no/such/op",)),
    "a later op": lambda d: dataclasses.replace(d, nodes=(*d.nodes, "no/such/op")),
    "a gate": lambda d: dataclasses.replace(d, gate="no/such/gate:0"),
    "no gate": lambda d: dataclasses.replace(d, gate=""),
}


def _some_decision(trace: tracing.Trace) -> tf_echo.RegionDecision:
    name = next(n.name for n in trace.view.nodes if n.op == "Erfc" and not n.backward)
    gate = trace.view.tensor_name(trace.view.loss)
    return tf_echo.RegionDecision(0, "", 1, True, 0, 0, 0.0, "by hand", (name,), gate)


@pytest.mark.parametrize("change", FOREIGN.values(), ids=FOREIGN)
def test_a_plan_of_another_graph_is_refused_and_changes_nothing(change, trace):
    good, before = _some_decision(trace), _text(trace)
    plan = RecomputePlan("hand", (good, change(good)), PEAK, PEAK, None)
    with pytest.raises(ValueError, match="does not hold"):
        rewriter.rewrite(trace, plan)
    assert _text(trace) == before


def test_a_plan_with_another_graphs_sums_is_refused_and_changes_nothing(trace):
    before = _text(trace)
    plan = RecomputePlan("hand", (_some_decision(trace),), PEAK, PEAK, None, sums=("no/such/op",))
    with pytest.raises(ValueError, match="no AddN of this graph"):
        rewriter.rewrite(trace, plan)
    assert _text(trace) == before


@pytest.mark.parametrize("op", ["MatMul", "ReadVariableOp"])
def test_an_op_that_may_not_run_twice_is_refused(op, trace):
    before = _text(trace)
    name = next(n.name for n in trace.view.nodes if n.op == op and not n.backward)
    bad = dataclasses.replace(_some_decision(trace), nodes=(name,))
    with pytest.raises(ValueError, match="may not run twice"):
        rewriter.rewrite(trace, RecomputePlan("hand", (bad,), PEAK, PEAK, None))
    assert _text(trace) == before


def test_the_empty_plan_changes_nothing(trace):
    before = _text(trace)
    rewriter.rewrite(trace, RecomputePlan("hand", (), PEAK, PEAK, None))
    assert _text(trace) == before

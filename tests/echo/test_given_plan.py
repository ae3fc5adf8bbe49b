"""Plans that are saved, changed by hand, and given back."""

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tf_echo
from tests import reference
from tests.echo import forcing, small
from tf_echo import EchoOptimizer, RecomputePlan, passes


def _train(optimizer: tf_echo.EchoOptimizer, **options) -> keras.Model:
    model = small.compiled(optimizer, jit_compile=False, **options)
    model.fit(small.dataset(), verbose=0, shuffle=False)
    return model


def _recurrent(optimizer: tf_echo.EchoOptimizer) -> keras.Model:
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(5)
    model = keras.Sequential(
        [keras.Input((12, 8)), layers.LSTM(16, recurrent_dropout=0.2), layers.Dense(1)]
    )
    model.compile(optimizer, "mse", jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    model.fit(np.ones((64, 12, 8)), np.ones((64, 1)), batch_size=64, epochs=2, verbose=0)
    return model


@pytest.mark.parametrize("train", [_train, _recurrent])
def test_a_saved_plan_does_the_same_again(train):
    first = train(tf_echo.EchoOptimizer("sgd"))
    plan = first.optimizer.plan
    assert plan.recomputed or plan.loops[0].recompute
    again = train(tf_echo.EchoOptimizer("sgd", plan=RecomputePlan.from_json(plan.to_json())))
    assert again.optimizer.plan == plan
    small.assert_equal(first.get_weights(), again.get_weights())


def test_a_plan_changed_by_hand_is_carried_out_and_judged_anew():
    plan = _train(tf_echo.EchoOptimizer("sgd")).optimizer.plan
    nothing = tuple(
        dataclasses.replace(d, recompute=False, nodes=()) if d.recompute else d
        for d in plan.decisions
    )
    changed = dataclasses.replace(plan, decisions=nothing)
    found = _train(tf_echo.EchoOptimizer("sgd", plan=changed)).optimizer.plan
    assert found.decisions == nothing
    assert found.after.total_bytes > plan.after.total_bytes
    assert found.before == plan.before


def test_a_plan_for_another_graph_is_refused_with_the_first_difference():
    plan = _train(tf_echo.EchoOptimizer("sgd")).optimizer.plan
    first = plan.recomputed[0].nodes[0]
    model = keras.Sequential([keras.Input((small.FEATURES,)), layers.Dense(1, name="other")])
    model.compile(tf_echo.EchoOptimizer("sgd", plan=plan), "mse", jit_compile=False)
    before = model.get_weights()
    with pytest.raises(ValueError, match=f"op '{first}', which this graph does not hold"):
        model.fit(small.dataset(), verbose=0)
    small.assert_equal(before, model.get_weights())


def test_a_plan_does_not_depend_on_the_name_that_keras_gives_an_optimizer():
    plan = _train(tf_echo.EchoOptimizer(keras.optimizers.SGD(name="one"))).optimizer.plan
    other = tf_echo.EchoOptimizer(keras.optimizers.SGD(name="two"), plan=plan)
    found = _train(other).optimizer.plan
    assert found.decisions == plan.decisions
    assert found.after == plan.after


def test_a_plan_with_another_loop_is_refused():
    plan = _recurrent(tf_echo.EchoOptimizer("sgd")).optimizer.plan
    with pytest.raises(ValueError, match="which is no loop of this graph"):
        _train(tf_echo.EchoOptimizer("sgd", plan=plan))


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "none"},
        {"policy": "mirror"},
        {"exclude": "a"},
        {"include": "a"},
        {"without": ["sums"]},
    ],
)
def test_a_plan_says_itself_what_to_recompute(options):
    plan = tf_echo.explain(small.compiled("sgd"), *small.one_batch())
    with pytest.raises(ValueError, match="must not be given with it"):
        tf_echo.EchoOptimizer("sgd", plan=plan, **options)


@pytest.mark.parametrize("plan", ["plan.json", {}, 3])
def test_a_plan_must_be_a_plan(plan):
    with pytest.raises(TypeError, match="`plan` must be a `RecomputePlan`"):
        tf_echo.EchoOptimizer("sgd", plan=plan)


def test_a_given_plan_survives_serialization_and_is_explained():
    plan = _train(tf_echo.EchoOptimizer("sgd")).optimizer.plan
    optimizer = tf_echo.EchoOptimizer("sgd", plan=plan)
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(optimizer))
    assert again.get_config() == optimizer.get_config()
    x, y = small.one_batch()
    explained = tf_echo.explain(small.compiled(again, jit_compile=False), x, y)
    assert explained.decisions == plan.decisions
    fresh = tf_echo.EchoOptimizer("sgd", plan=plan)
    other = tf_echo.explain(small.compiled(fresh, jit_compile=False), x, y, policy="none")
    assert not other.recomputed


Arrays = tuple[np.ndarray, np.ndarray]


def _mlp() -> keras.Model:
    return small.mlp()


def _lstm() -> keras.Model:
    small.mlp()  # clears the session
    return keras.Sequential(
        [keras.Input((6, 4)), layers.LSTM(12, recurrent_dropout=0.2), layers.Dense(1)], name="lstm"
    )


def _sequences() -> Arrays:
    x = np.random.default_rng(0).normal(size=(96, 6, 4)).astype("float32")
    return x, x[:, 0, :1] ** 2


@dataclasses.dataclass(frozen=True)
class _Case:
    build: Callable[[], keras.Model]
    data: Callable[[], Arrays]
    open_batch: bool


CASES = {
    "mlp, fixed batch": _Case(_mlp, small.arrays, False),
    "mlp, open batch": _Case(_mlp, small.arrays, True),
    "lstm, fixed batch": _Case(_lstm, _sequences, False),
    "lstm, open batch": _Case(_lstm, _sequences, True),
}


def _train_case(case: _Case, optimizer: Any) -> keras.Model:
    """A fresh model, trained on a few batches."""
    model = case.build()
    model.compile(optimizer, "mse")
    model.optimizer.build(model.trainable_variables)
    batches = tf.data.Dataset.from_tensor_slices(case.data())
    with reference.grappler(enabled=False):
        batches = batches.batch(32, drop_remainder=not case.open_batch)
        model.fit(batches, shuffle=False, verbose=0)
    return model


@functools.cache
def _made(name: str) -> tuple[RecomputePlan, list[np.ndarray]]:
    """The plan that Echo makes, and what training with it leaves."""
    model = _train_case(CASES[name], EchoOptimizer("adam"))
    return model.optimizer.plan, small.state(model)


def _without_name(plan: RecomputePlan) -> RecomputePlan:
    return dataclasses.replace(plan, name="")


def _no_planning(*_: object) -> None:
    raise AssertionError("A plan was given, but another was made.")


@pytest.mark.parametrize(
    "name",
    [
        "mlp, fixed batch",
        "mlp, open batch",
        pytest.param("lstm, open batch", marks=pytest.mark.slow),
    ],
)
def test_a_plan_that_was_saved_is_carried_out_again(name, monkeypatch):
    plan, expected = _made(name)
    monkeypatch.setattr(passes, "plan_view", _no_planning)
    again = RecomputePlan.from_json(plan.to_json())
    replayed = forcing.record_replayed_ops(monkeypatch)
    model = _train_case(CASES[name], EchoOptimizer("adam", plan=again))
    assert plan.recomputed or any(loop.recompute for loop in plan.loops)
    # The peaks were judged anew, and are what they were.
    assert _without_name(model.optimizer.plan) == _without_name(plan)
    assert sum(replayed.values()) == sum(len(d.nodes) for d in plan.recomputed)
    small.assert_equal(small.state(model), expected)


def _change(plan: RecomputePlan, kept: set[int]) -> RecomputePlan:
    """The plan with some regions kept."""
    decisions = [
        dataclasses.replace(d, recompute=False, reason="by hand") if d.region in kept else d
        for d in plan.decisions
    ]
    return dataclasses.replace(plan, decisions=tuple(decisions))


def test_a_plan_of_which_one_region_is_kept_by_hand_is_carried_out_as_changed(monkeypatch):
    plan, expected = _made("mlp, fixed batch")
    largest = max(plan.recomputed, key=lambda d: d.released_bytes - d.kept_bytes)
    changed = _change(plan, {largest.region})
    replayed = forcing.record_replayed_ops(monkeypatch)
    model = _train_case(CASES["mlp, fixed batch"], EchoOptimizer("adam", plan=changed))
    carried_out = model.optimizer.plan
    assert carried_out.decisions == changed.decisions
    assert sum(replayed.values()) == sum(len(d.nodes) for d in changed.recomputed)
    assert carried_out.before == plan.before
    assert carried_out.after.total_bytes > plan.after.total_bytes
    small.assert_equal(small.state(model), expected)


def test_a_loop_that_is_kept_by_hand_is_judged_anew():
    plan, expected = _made("lstm, fixed batch")
    (loop,) = plan.loops
    changed = dataclasses.replace(plan, loops=(dataclasses.replace(loop, recompute=False),))
    model = _train_case(CASES["lstm, fixed batch"], EchoOptimizer("adam", plan=changed))
    assert not model.optimizer.plan.loops[0].recompute
    assert model.optimizer.plan.after.total_bytes > plan.after.total_bytes
    small.assert_equal(small.state(model), expected)


def test_peaks_that_a_plan_claims_are_not_believed():
    plan, _ = _made("mlp, fixed batch")
    peaks = {key: dataclasses.replace(plan.after, total_bytes=1) for key in ("before", "after")}
    model = _train_case(
        CASES["mlp, fixed batch"],
        EchoOptimizer("adam", plan=dataclasses.replace(plan, **peaks)),
    )
    assert _without_name(model.optimizer.plan) == _without_name(plan)


# Other graphs.


def _stack(count: int = 2, first: str = "one") -> keras.Model:
    small.mlp()  # clears the session
    names = [first, "two", "three"][:count]
    inner = [layers.Dense(small.FEATURES, activation="gelu", name=name) for name in names]
    last = layers.Dense(1, name="last")
    return keras.Sequential([keras.Input((small.FEATURES,)), *inner, last], name="stack")


@functools.cache
def _plan_of(count: int, first: str) -> RecomputePlan:
    model = _stack(count, first)
    model.compile(EchoOptimizer("sgd"), "mse")
    plan = tf_echo.explain(model, *small.one_batch())
    assert plan.recomputed
    return plan


OTHERS = {
    "with one more layer": (lambda: _plan_of(3, "one"), r"Region \d+ of the plan"),
    "with another name": (lambda: _plan_of(2, "other"), "op 'stack_1/other_1/"),
}


@pytest.mark.parametrize(("plan", "message"), OTHERS.values(), ids=OTHERS)
def test_a_plan_of_a_model_is_refused_before_anything_is_trained(plan, message):
    plan = plan()
    model = _stack()
    model.compile(EchoOptimizer("sgd", plan=plan), "mse")
    before = [v.numpy() for v in model.variables]
    with pytest.raises(ValueError, match=message):
        small.fit(model)
    small.assert_equal(model.variables, before)
    assert model.optimizer.plans == []


def test_a_plan_that_fits_part_of_a_larger_model_trains_it_the_same():
    plan = _plan_of(2, "one")
    model = _stack(3)
    model.compile(EchoOptimizer("sgd", plan=plan), "mse")
    found = tf_echo.verify(model, *small.one_batch())
    assert found.plan.decisions == plan.decisions
    assert found.bit_equal


def test_a_plan_of_another_graph_is_not_explained_either():
    model = _stack()
    own = EchoOptimizer("sgd", plan=_plan_of(2, "other"))
    model.compile(own, "mse")
    with pytest.raises(ValueError, match="which this graph does not hold"):
        tf_echo.explain(model, *small.one_batch())
    assert model.optimizer is own


# Round trips.


def test_a_plan_of_a_loop_survives_serialization():
    plan, _ = _made("lstm, fixed batch")
    optimizer = EchoOptimizer("adam", plan=plan)
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(optimizer))
    for copy in (again, EchoOptimizer.from_config(optimizer.get_config())):
        assert copy.get_config() == optimizer.get_config()
        assert RecomputePlan.from_json(copy.get_config()["plan"]) == plan


def test_a_model_that_is_saved_keeps_its_plan(tmp_path):
    plan, _ = _made("mlp, fixed batch")
    model = _train_case(CASES["mlp, fixed batch"], EchoOptimizer("adam", plan=plan))
    model.save(tmp_path / "model.keras")
    small.mlp()  # clears the session, from which scopes are numbered
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert RecomputePlan.from_json(again.optimizer.get_config()["plan"]) == plan


@pytest.mark.parametrize("name", ["mlp, fixed batch", "lstm, fixed batch"])
def test_explaining_a_model_gives_the_plan_that_it_was_given(name):
    case = CASES[name]
    plan = _change(_made(name)[0], {0})
    model = case.build()
    model.compile(EchoOptimizer("adam", plan=plan), "mse")
    x, y = case.data()
    explained = tf_echo.explain(model, x[:32], y[:32])
    assert explained.decisions == plan.decisions
    assert explained.loops == plan.loops
    assert explained.sums == plan.sums
    assert explained.before == plan.before


@pytest.mark.parametrize(
    "told", [{"policy": "none"}, {"exclude": ("*",)}, {"include": ("last",)}], ids=str
)
def test_explain_makes_a_plan_where_it_is_told_how(told):
    model = _stack()
    model.compile(EchoOptimizer("sgd", plan=_plan_of(2, "one")), "mse")
    assert tf_echo.explain(model, *small.one_batch()).recomputed
    assert not tf_echo.explain(model, *small.one_batch(), **told).recomputed


def test_verify_carries_out_the_plan_that_was_given():
    plan = _change(_plan_of(2, "one"), {_plan_of(2, "one").recomputed[0].region})
    model = _stack()
    model.compile(EchoOptimizer("sgd", plan=plan), "mse")
    found = tf_echo.verify(model, *small.one_batch())
    assert found.plan.decisions == plan.decisions
    assert found.bit_equal


def test_each_trace_is_given_the_plan():
    plan = _plan_of(2, "one")
    model = _stack()
    model.compile(EchoOptimizer("sgd", plan=plan), "mse")
    x, y = small.arrays()
    for size in (128, 256):
        model.train_on_batch(x[:size], y[:size])
    counted = collections.Counter(p.decisions for p in model.optimizer.plans)
    assert counted == {plan.decisions: len(model.optimizer.plans)}
    assert len(model.optimizer.plans) > 1

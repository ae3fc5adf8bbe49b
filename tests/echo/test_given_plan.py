"""Plans that are saved, changed by hand, and given back."""

import dataclasses

import keras
import numpy as np
import pytest
from keras import layers

import tf_echo
from tests.echo import small
from tf_echo import RecomputePlan


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
    assert plan.untied[0].startswith("one")
    other = tf_echo.EchoOptimizer(keras.optimizers.SGD(name="two"), plan=plan)
    found = _train(other).optimizer.plan
    assert found.untied[0].startswith("two")
    assert found.after == plan.after


def test_a_plan_with_another_loop_is_refused():
    plan = _recurrent(tf_echo.EchoOptimizer("sgd")).optimizer.plan
    with pytest.raises(ValueError, match="which is no loop of this graph"):
        _train(tf_echo.EchoOptimizer("sgd", plan=plan))


@pytest.mark.parametrize(
    "options", [{"policy": "none"}, {"policy": "mirror"}, {"exclude": "a"}, {"include": "a"}]
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
    optimizer = tf_echo.EchoOptimizer("sgd", plan=plan, without=("sums",))
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(optimizer))
    assert again.get_config() == optimizer.get_config()
    x, y = small.one_batch()
    explained = tf_echo.explain(small.compiled(again, jit_compile=False), x, y)
    assert explained.decisions == plan.decisions
    fresh = tf_echo.EchoOptimizer("sgd", plan=plan)
    other = tf_echo.explain(small.compiled(fresh, jit_compile=False), x, y, policy="none")
    assert not other.recomputed

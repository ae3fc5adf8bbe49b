"""`EchoOptimizer` is the inner optimizer: same updates, same variables, same attributes."""

import copy
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_echo
from tests.echo import small
from tf_echo import EchoOptimizer


def _multi() -> keras.optimizers.Optimizer:
    by_layer = keras.optimizers.OptimizerMap(
        keras.optimizers.Adam(1e-2), {"dense/.*": keras.optimizers.SGD(1e-2)}
    )
    return keras.optimizers.MultiOptimizer(by_layer)


def _with_exclusions() -> keras.optimizers.Optimizer:
    optimizer = keras.optimizers.AdamW(1e-2, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["bias", "dense_1"])
    return optimizer


OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(1e-2),
    "amsgrad": lambda: keras.optimizers.Adam(1e-2, amsgrad=True),
    "adamw": lambda: keras.optimizers.AdamW(1e-2, weight_decay=0.1),
    "adamw with exclusions": _with_exclusions,
    "sgd": lambda: keras.optimizers.SGD(1e-2),
    "momentum": lambda: keras.optimizers.SGD(1e-2, momentum=0.9, nesterov=True),
    "rmsprop": lambda: keras.optimizers.RMSprop(1e-2, momentum=0.5, centered=True),
    "adagrad": lambda: keras.optimizers.Adagrad(1e-2),
    "lion": lambda: keras.optimizers.Lion(1e-2),
    "adafactor": lambda: keras.optimizers.Adafactor(1e-2),
    "lamb": lambda: keras.optimizers.Lamb(1e-2),
    "muon": lambda: keras.optimizers.Muon(1e-2),
    "multi": _multi,
    "clipnorm": lambda: keras.optimizers.Adam(1e-2, clipnorm=0.1),
    "clipvalue": lambda: keras.optimizers.Adam(1e-2, clipvalue=0.01),
    "global_clipnorm": lambda: keras.optimizers.Adam(1e-2, global_clipnorm=0.1),
    "ema": lambda: keras.optimizers.Adam(1e-2, use_ema=True, ema_momentum=0.5),
    "ema overwrites": lambda: keras.optimizers.Adam(1e-2, use_ema=True, ema_overwrite_frequency=2),
    "accumulation": lambda: keras.optimizers.Adam(1e-2, gradient_accumulation_steps=4),
    "accumulation and clipping": lambda: keras.optimizers.SGD(
        1e-1, gradient_accumulation_steps=2, global_clipnorm=0.1
    ),
    "loss_scale_factor": lambda: keras.optimizers.SGD(1e-2, loss_scale_factor=1024.0),
    "schedule": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(1e-1, 2, 0.5)
    ),
    "callable rate": lambda: keras.optimizers.SGD(lambda: 1e-2),
}


@pytest.mark.parametrize("plain", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_trains_bit_for_bit_like_the_inner_optimizer(plain):
    small.assert_trains_equally(lambda: EchoOptimizer(plain()), plain)


def _set_rate_at_once(epoch, rate):
    return 1e-3 if epoch else rate


CALLBACKS = {
    "ReduceLROnPlateau": lambda: keras.callbacks.ReduceLROnPlateau(
        "loss", 0.1, patience=1, min_delta=100.0
    ),
    "LearningRateScheduler": lambda: keras.callbacks.LearningRateScheduler(_set_rate_at_once),
    "EarlyStopping": lambda: keras.callbacks.EarlyStopping("loss", restore_best_weights=True),
}


@pytest.mark.parametrize("callback", CALLBACKS.values(), ids=CALLBACKS)
def test_callbacks_act_on_the_inner_optimizer(callback):
    small.assert_trains_equally(
        lambda: EchoOptimizer(keras.optimizers.Adam(1e-2)),
        lambda: keras.optimizers.Adam(1e-2),
        epochs=3,
        callbacks=lambda: [callback()],
    )


def test_reduce_lr_on_plateau_is_seen_by_the_inner_optimizer():
    inner = keras.optimizers.SGD(1.0)
    model = small.compiled(EchoOptimizer(inner))
    reduce = keras.callbacks.ReduceLROnPlateau("loss", 0.5, patience=1, min_delta=1e9)
    small.fit(model, epochs=3, callbacks=[reduce])
    assert float(inner.learning_rate) == 0.25


def test_swap_ema_weights_swaps_the_inner_optimizers_averages():
    def train(optimizer):
        model = small.compiled(optimizer)
        swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
        small.fit(model, epochs=2, callbacks=[swap], validation_data=small.one_batch())
        return small.state(model)

    plain = keras.optimizers.Adam(1e-2, use_ema=True, ema_momentum=0.5)
    wrapped = EchoOptimizer(keras.optimizers.Adam(1e-2, use_ema=True, ema_momentum=0.5))
    small.assert_equal(train(wrapped), train(plain))


def test_setting_the_learning_rate_sets_the_inner_optimizers():
    optimizer = EchoOptimizer("sgd")
    optimizer.learning_rate = 0.5
    assert float(optimizer.learning_rate) == 0.5
    assert optimizer.learning_rate is optimizer.inner_optimizer.learning_rate


def test_assigning_the_learning_rate_variable_changes_a_compiled_step():
    model = small.compiled(EchoOptimizer("sgd"))
    small.fit(model)
    before = model.get_weights()
    model.optimizer.learning_rate.assign(0.0)
    small.fit(model)
    small.assert_equal(before[0], model.get_weights()[0])


def test_a_schedule_stays_unsettable():
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 10)
    optimizer = EchoOptimizer(keras.optimizers.SGD(schedule))
    assert float(optimizer.learning_rate) == pytest.approx(0.1)
    with pytest.raises(TypeError, match="not settable"):
        optimizer.learning_rate = 0.5


def test_iterations_count_the_inner_optimizers_steps():
    model = small.compiled(EchoOptimizer("adam"))
    small.fit(model, epochs=2)
    assert (
        int(model.optimizer.iterations)
        == int(model.optimizer.inner_optimizer.iterations)
        == 2 * small.STEPS
    )


def test_iterations_under_accumulation_count_updates():
    model = small.compiled(EchoOptimizer(keras.optimizers.SGD(gradient_accumulation_steps=2)))
    small.fit(model)
    assert int(model.optimizer.iterations) == small.STEPS // 2


def test_variables_are_the_inner_optimizers():
    optimizer = EchoOptimizer("adam")
    optimizer.build(small.mlp().trainable_variables)
    assert optimizer.built
    pairs = zip(optimizer.variables, optimizer.inner_optimizer.variables, strict=True)
    assert all(one is other for one, other in pairs)


def test_weights_can_be_set():
    one, other = (small.compiled(EchoOptimizer("adam")) for _ in range(2))
    small.fit(one)
    other.optimizer.set_weights([v.numpy() for v in one.optimizer.variables])
    small.assert_equal(one.optimizer.variables, other.optimizer.variables)


def test_attributes_are_read_and_written_through():
    optimizer = EchoOptimizer(keras.optimizers.Adam(clipnorm=1.0, beta_1=0.8))
    assert (optimizer.clipnorm, optimizer.beta_1, optimizer.use_ema) == (1.0, 0.8, False)
    optimizer.clipnorm = 2.0
    assert optimizer.inner_optimizer.clipnorm == 2.0


def test_a_missing_attribute_is_missing():
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = EchoOptimizer("adam").no_such_thing


def test_excluding_from_weight_decay_reaches_the_inner_optimizer():
    def train(optimizer):
        optimizer.exclude_from_weight_decay(var_names=["kernel"])
        model = small.compiled(optimizer)
        small.fit(model)
        return small.state(model)

    plain = train(keras.optimizers.AdamW(1e-2, weight_decay=0.5))
    small.assert_equal(train(EchoOptimizer(keras.optimizers.AdamW(1e-2, weight_decay=0.5))), plain)


INNERS = {
    "name": "rmsprop",
    "instance": keras.optimizers.RMSprop(),
    "config": keras.optimizers.serialize(keras.optimizers.RMSprop()),
}


@pytest.mark.parametrize("inner", INNERS.values(), ids=INNERS)
def test_inner_optimizer_may_be_given_as(inner):
    assert isinstance(EchoOptimizer(inner).inner_optimizer, keras.optimizers.RMSprop)


def test_name_is_the_inner_optimizers_unless_given():
    assert EchoOptimizer(keras.optimizers.SGD(name="mine")).name == "mine"
    assert EchoOptimizer("sgd", name="given").name == "given"


def test_repr_names_policy_and_inner_optimizer():
    text = repr(EchoOptimizer("sgd", policy="none"))
    assert "none" in text
    assert "SGD" in text


@keras.saving.register_keras_serializable("test_echo")
class HalvedSGD(keras.optimizers.SGD):
    """A user's optimizer."""


CONFIGURATIONS = {
    "defaults": lambda: EchoOptimizer("adam"),
    "policy": lambda: EchoOptimizer("adam", policy="none"),
    "name": lambda: EchoOptimizer("adam", name="given"),
    "nominal batch size": lambda: EchoOptimizer("adam", nominal_batch_size=64),
    "unit cost": lambda: EchoOptimizer("adam", cost_model=tf_echo.UnitCost()),
    "roofline cost": lambda: EchoOptimizer("adam", cost_model=tf_echo.RooflineCost(1e12, 1e11)),
    "schedule": lambda: EchoOptimizer(
        keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 10))
    ),
    "loss scale": lambda: EchoOptimizer("adam", loss_scale="dynamic"),
    "around a LossScaleOptimizer": lambda: EchoOptimizer(
        keras.optimizers.LossScaleOptimizer(
            keras.optimizers.Adam(), initial_scale=8.0, dynamic_growth_steps=3
        )
    ),
    "custom inner optimizer": lambda: EchoOptimizer(HalvedSGD(0.25, momentum=0.5)),
    "multi": lambda: EchoOptimizer(_multi()),
}

COPIES = {
    "from_config": lambda o: type(o).from_config(o.get_config()),
    "serialize": lambda o: keras.saving.deserialize_keras_object(
        keras.saving.serialize_keras_object(o)
    ),
    "optimizers.serialize": lambda o: keras.optimizers.deserialize(keras.optimizers.serialize(o)),
    "optimizers.get": lambda o: keras.optimizers.get(keras.optimizers.serialize(o)),
    "deepcopy": copy.deepcopy,
    "pickle": lambda o: pickle.loads(pickle.dumps(o)),
}


@pytest.mark.parametrize("make_copy", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("make", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_a_copy_has_the_same_type_and_config(make, make_copy):
    optimizer = make()
    copied = make_copy(optimizer)
    assert type(copied) is type(optimizer)
    assert type(copied.inner_optimizer) is type(optimizer.inner_optimizer)
    assert copied.get_config() == optimizer.get_config()
    assert copied.inner_optimizer is not optimizer.inner_optimizer


def test_a_copy_shares_no_variable():
    optimizer = small.compiled(EchoOptimizer("adam")).optimizer
    copied = EchoOptimizer.from_config(optimizer.get_config())
    copied.learning_rate = 0.5
    assert float(optimizer.learning_rate) != 0.5
    assert not copied.built


def test_cost_models_survive_a_round_trip():
    measured = tf_echo.MeasuredCost({"Tanh": 1e-10}, 1e-6, tf_echo.RooflineCost(2e12))
    optimizer = EchoOptimizer("adam", cost_model=measured)
    config = optimizer.get_config()["cost_model"]
    copied = EchoOptimizer.from_config(optimizer.get_config())
    assert copied.get_config()["cost_model"] == config


def test_config_is_not_consumed_by_from_config():
    config = EchoOptimizer("adam", cost_model=tf_echo.UnitCost()).get_config()
    expected = copy.deepcopy(config)
    EchoOptimizer.from_config(config)
    assert config == expected


def test_config_holds_the_current_learning_rate():
    optimizer = EchoOptimizer("sgd")
    optimizer.learning_rate = 0.125
    copied = EchoOptimizer.from_config(optimizer.get_config())
    assert float(copied.learning_rate) == 0.125


def test_custom_objects_are_passed_on():
    class Unregistered(keras.optimizers.SGD):
        pass

    config = EchoOptimizer(Unregistered(0.5)).get_config()
    copied = EchoOptimizer.from_config(config, custom_objects={"Unregistered": Unregistered})
    assert type(copied.inner_optimizer) is Unregistered


ERRORS = {
    "no optimizer": (
        lambda: EchoOptimizer(3),
        TypeError,
        r"must be a Keras optimizer.*inner_optimizer=3",
    ),
    "None": (lambda: EchoOptimizer(None), TypeError, "must be a Keras optimizer"),
    "a class": (
        lambda: EchoOptimizer(keras.optimizers.Adam),
        TypeError,
        "must be a Keras optimizer",
    ),
    "unknown name": (lambda: EchoOptimizer("adamant"), ValueError, "adamant"),
    "twice": (
        lambda: EchoOptimizer(EchoOptimizer("adam")),
        ValueError,
        "must not be an `EchoOptimizer` already",
    ),
    "twice, by config": (
        lambda: EchoOptimizer(keras.optimizers.serialize(EchoOptimizer("adam"))),
        ValueError,
        "must not be an `EchoOptimizer` already",
    ),
    "twice, around a LossScaleOptimizer": (
        lambda: EchoOptimizer(keras.optimizers.LossScaleOptimizer(EchoOptimizer("adam"))),
        ValueError,
        "must not be an `EchoOptimizer` already",
    ),
    "policy": (
        lambda: EchoOptimizer("adam", policy="minor"),
        ValueError,
        "`policy` must be one of 'echo', 'mirror', 'none'.*'minor'",
    ),
    "loss scale": (
        lambda: EchoOptimizer("adam", loss_scale="fixed"),
        ValueError,
        "`loss_scale` must be .*'fixed'",
    ),
    "loss scale number": (
        lambda: EchoOptimizer("adam", loss_scale=2.0),
        ValueError,
        r"`loss_scale` must be .*2\.0",
    ),
    "batch 0": (
        lambda: EchoOptimizer("adam", nominal_batch_size=0),
        ValueError,
        "positive integer or None.*0",
    ),
    "batch -1": (
        lambda: EchoOptimizer("adam", nominal_batch_size=-1),
        ValueError,
        "positive integer or None",
    ),
    "batch 1.5": (
        lambda: EchoOptimizer("adam", nominal_batch_size=1.5),
        ValueError,
        r"positive integer or None.*1\.5",
    ),
    "batch True": (
        lambda: EchoOptimizer("adam", nominal_batch_size=True),
        ValueError,
        "positive integer or None",
    ),
}


@pytest.mark.parametrize(("make", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_says_what_is_wrong_with(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("loss_scale", ["auto", "dynamic", None])
def test_errors_do_not_depend_on_the_loss_scale(loss_scale):
    with pytest.raises(TypeError, match="must be a Keras optimizer"):
        EchoOptimizer(3, loss_scale=loss_scale)


def test_needs_the_tensorflow_backend(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(ValueError, match=r"KERAS_BACKEND=tensorflow.*backend='jax'"):
        EchoOptimizer("adam")


def test_fitting_twice_plans_once():
    model = small.compiled(EchoOptimizer("adam"))
    small.fit(model)
    small.fit(model)
    assert len(model.optimizer.plans) == 1


def test_an_optimizer_that_is_not_built_yet_is_built_by_fit():
    model, expected = (small.compiled(o, build=False) for o in (EchoOptimizer("adam"), "adam"))
    assert not model.optimizer.built
    assert small.fit(model) == small.fit(expected)
    small.assert_equal(small.state(model), small.state(expected))


def test_parts_that_do_not_exist_cannot_be_left_out():
    with pytest.raises(ValueError, match=r"`without` must be a sequence of some of 'recompute'"):
        EchoOptimizer("sgd", without=("everything",))


def test_recompiling_with_and_without_echo_goes_on_training_equally():
    def train(wrap):
        inner = keras.optimizers.Adam(1e-2)
        model = small.compiled(wrap(inner))
        losses = small.fit(model)
        model.compile(optimizer=inner, loss="mse")
        losses += small.fit(model)
        model.compile(optimizer=wrap(inner), loss="mse")
        losses += small.fit(model)
        return losses, small.state(model)

    losses, state = train(EchoOptimizer)
    expected_losses, expected_state = train(lambda inner: inner)
    assert losses == expected_losses
    small.assert_equal(state, expected_state)


def test_freezing_a_layer_and_recompiling_leaves_it_alone():
    def train(make):
        model = small.compiled(make)
        small.fit(model)
        model.layers[0].trainable = False
        model.compile(optimizer=make(), loss="mse")
        frozen = model.layers[0].get_weights()
        small.fit(model)
        small.assert_equal(model.layers[0].get_weights(), frozen)
        return model

    model = train(lambda: EchoOptimizer("adam"))
    assert model.optimizer.plans
    small.assert_equal(small.state(model), small.state(train(lambda: keras.optimizers.Adam())))


def test_evaluate_and_predict_plan_nothing_and_see_the_trained_weights():
    model = small.compiled(EchoOptimizer("adam"))
    expected = small.compiled("adam")
    x, y = small.one_batch()
    model.predict(x, verbose=0)
    assert model.optimizer.plans == []
    small.fit(model)
    small.fit(expected)
    traces = len(model.optimizer.plans)
    assert model.evaluate(x, y, verbose=0) == expected.evaluate(x, y, verbose=0)
    small.assert_equal(model.predict(x, verbose=0), expected.predict(x, verbose=0))
    assert len(model.optimizer.plans) == traces


@pytest.mark.parametrize(
    "arguments", [{"steps_per_execution": 3}, {"metrics": ["mae"]}, {"jit_compile": True}], ids=str
)
def test_trains_equally_when_compiled_with(arguments):
    # XLA sums in its own order, which changes with what it fuses.
    rtol = 1e-5 if "jit_compile" in arguments else 0
    model = small.compiled(EchoOptimizer("sgd"), **arguments)
    expected = small.compiled("sgd", **arguments)
    np.testing.assert_allclose(small.fit(model), small.fit(expected), rtol=rtol)
    assert model.optimizer.plan.recomputed
    for one, other in zip(small.state(model), small.state(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=rtol, atol=rtol)


def test_sample_and_class_weights_are_honoured():
    _, y = small.arrays()
    weights = np.linspace(0.0, 1.0, len(y))
    model, expected = small.compiled(EchoOptimizer("sgd")), small.compiled("sgd")
    assert small.fit(model, sample_weight=weights) == small.fit(expected, sample_weight=weights)
    small.assert_equal(small.state(model), small.state(expected))


def _train_step_graph(optimizer) -> list[tuple]:
    model = small.compiled(optimizer)
    spec = tuple(tf.TensorSpec(a.shape, a.dtype) for a in small.one_batch())
    step = tf.function(model.train_step, autograph=False).get_concrete_function(spec)
    # Automatic control dependencies come in any order.
    return [
        (op.type, op.name, [t.name for t in op.inputs], {c.name for c in op.control_inputs})
        for op in step.graph.get_operations()
    ]


def test_policy_none_traces_the_inner_optimizers_graph_op_for_op():
    assert _train_step_graph(lambda: EchoOptimizer("adam", policy="none")) == _train_step_graph(
        "adam"
    )


def test_policy_echo_only_adds_ops_to_the_inner_optimizers_graph():
    plain = {(kind, name) for kind, name, *_ in _train_step_graph("adam")}
    echo = {(kind, name) for kind, name, *_ in _train_step_graph(lambda: EchoOptimizer("adam"))}
    assert plain < echo


def test_policy_none_trains_and_plans_nothing():
    model = small.compiled(EchoOptimizer("adam", policy="none"))
    small.fit(model)
    assert model.optimizer.policy == model.optimizer.plan.policy == "none"
    assert model.optimizer.plan.recomputed == ()
    assert model.optimizer.plan.ratio == 1.0

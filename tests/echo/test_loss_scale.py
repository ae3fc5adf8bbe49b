"""An `EchoOptimizer` is a `LossScaleOptimizer` where the loss is to be scaled, and nowhere else."""

from collections.abc import Iterator

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.echo import small
from tf_echo import EchoOptimizer

LossScaleOptimizer = keras.optimizers.LossScaleOptimizer


@pytest.fixture
def policy(request) -> Iterator[str]:
    """Sets the global dtype policy that a test is parametrized with."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(request.param)
    yield request.param
    keras.config.set_dtype_policy(before)


def under(*policies: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("policy", policies, indirect=True)


def _scaled(**arguments) -> LossScaleOptimizer:
    return LossScaleOptimizer(keras.optimizers.SGD(1e-2), **arguments)


TYPES = {
    ("float32", "auto"): False,
    ("float32", "dynamic"): True,
    ("float32", None): False,
    ("mixed_bfloat16", "auto"): False,
    ("mixed_bfloat16", "dynamic"): True,
    ("mixed_float16", "auto"): True,
    ("mixed_float16", "dynamic"): True,
    ("mixed_float16", None): False,
}


@pytest.mark.parametrize(("policy", "loss_scale"), TYPES, indirect=["policy"])
@pytest.mark.parametrize("how", ["keyword", "position"])
def test_is_a_loss_scale_optimizer(policy, loss_scale, how):
    if how == "keyword":
        optimizer = EchoOptimizer(inner_optimizer="sgd", loss_scale=loss_scale)
    else:
        optimizer = EchoOptimizer("sgd", "echo", loss_scale)
    assert isinstance(optimizer, LossScaleOptimizer) is TYPES[policy, loss_scale]
    assert isinstance(optimizer, EchoOptimizer)
    assert isinstance(optimizer.inner_optimizer, keras.optimizers.SGD)


@keras.saving.register_keras_serializable("test_echo")
class OwnLossScale(LossScaleOptimizer):
    """A user's own."""


AROUND = {
    "instance": lambda: _scaled(),
    "config": lambda: keras.optimizers.serialize(_scaled()),
    "subclass": lambda: OwnLossScale(keras.optimizers.SGD()),
    "config of a subclass": lambda: keras.optimizers.serialize(
        OwnLossScale(keras.optimizers.SGD())
    ),
}


@pytest.mark.parametrize("loss_scale", ["auto", "dynamic", None])
@pytest.mark.parametrize("inner", AROUND.values(), ids=AROUND)
def test_stays_one_around_a_loss_scale_optimizer(inner, loss_scale):
    optimizer = EchoOptimizer(inner(), loss_scale=loss_scale)
    assert isinstance(optimizer, LossScaleOptimizer)
    assert isinstance(optimizer.inner_optimizer, keras.optimizers.SGD)


def test_the_scales_settings_are_kept_around_a_loss_scale_optimizer():
    optimizer = EchoOptimizer(_scaled(initial_scale=8.0, dynamic_growth_steps=3))
    assert (optimizer.initial_scale, optimizer.dynamic_growth_steps) == (8.0, 3)


@under("float32", "mixed_bfloat16")
def test_without_scaling_it_has_the_inner_optimizers_variables_only(policy):
    variables = small.mlp().trainable_variables
    optimizer, inner = EchoOptimizer("adam"), keras.optimizers.Adam()
    optimizer.build(variables)
    inner.build(variables)
    assert [v.path for v in optimizer.variables] == [
        v.path.replace(inner.name, optimizer.name) for v in inner.variables
    ]


@under("mixed_float16")
def test_compile_does_not_wrap_it_again(policy):
    optimizer = EchoOptimizer("adam")
    assert small.compiled(optimizer).optimizer is optimizer


def _scales_seen(optimizer, bad_steps=()) -> list[tuple]:
    """Scale, counter, iterations and first weight after each of six steps."""
    model = small.compiled(optimizer)
    scaler = getattr(model.optimizer, "_wrapped", model.optimizer)
    x, y = small.one_batch()
    seen = []
    for step in range(6):
        model.train_on_batch(x, np.full_like(y, np.inf) if step in bad_steps else y)
        values = (
            scaler.dynamic_scale,
            scaler.step_counter,
            model.optimizer.iterations,
            model.variables[0],
        )
        seen.append(tuple(np.array(v.numpy()).sum().item() for v in values))
    if isinstance(model.optimizer, EchoOptimizer):
        assert model.optimizer.plan.recomputed
    return seen


SCALES = {
    "grows": ({"initial_scale": 2.0, "dynamic_growth_steps": 2}, (), [2, 4, 4, 8, 8, 16]),
    "shrinks": ({"initial_scale": 8.0}, (0, 1), [4, 2, 2, 2, 2, 2]),
    "both": ({"initial_scale": 8.0, "dynamic_growth_steps": 2}, (2,), [8, 16, 8, 8, 16, 16]),
}


@pytest.mark.parametrize(("settings", "bad_steps", "expected"), SCALES.values(), ids=SCALES)
def test_the_scale(settings, bad_steps, expected):
    seen = _scales_seen(EchoOptimizer(_scaled(**settings)), bad_steps)
    assert seen == _scales_seen(_scaled(**settings), bad_steps)
    assert [scale for scale, *_ in seen] == expected


def test_a_step_that_overflows_is_skipped():
    model = small.compiled(EchoOptimizer(_scaled(initial_scale=2.0**127)))
    before = model.get_weights()[0]
    x, y = small.one_batch()
    model.train_on_batch(x, 1e6 * y)
    np.testing.assert_array_equal(model.get_weights()[0], before)
    assert float(model.optimizer.dynamic_scale) == 2.0**126
    assert int(model.optimizer.iterations) == 0


def test_in_float32_a_nan_is_not_skipped():
    model = small.compiled(EchoOptimizer("sgd"))
    x, y = small.one_batch()
    model.train_on_batch(x, np.full_like(y, np.nan))
    assert np.isnan(model.get_weights()[0]).all()


def test_the_loss_scale_factor_of_the_inner_optimizer_is_kept():
    optimizer = EchoOptimizer(keras.optimizers.SGD(loss_scale_factor=4.0))
    assert optimizer.loss_scale_factor == 4.0
    assert optimizer.scale_loss(2.0) == 8.0


@under("mixed_float16")
def test_never_scales_if_told_so(policy):
    optimizer = EchoOptimizer("sgd", loss_scale=None)
    model = small.compiled(optimizer, auto_scale_loss=False)
    assert model.optimizer is optimizer
    small.fit(model)
    assert optimizer.plan.recomputed


def test_inside_a_loss_scale_optimizer_it_trains_and_warns():
    wrapped = LossScaleOptimizer(EchoOptimizer(keras.optimizers.SGD(1e-2)))
    model, expected = small.compiled(wrapped), small.compiled(_scaled)
    with pytest.warns(UserWarning, match="nothing is recomputed"):
        losses = small.fit(model)
    assert losses == small.fit(expected)
    small.assert_equal(model.get_weights(), expected.get_weights())


INNERS = {
    "plain": lambda: keras.optimizers.SGD(),
    "factor": lambda: keras.optimizers.SGD(loss_scale_factor=4.0),
    "scaled": lambda: _scaled(initial_scale=4.0),
}
LOSSES = {
    "float": lambda: 3.0,
    "int": lambda: 3,
    "numpy": lambda: np.float32(3.0),
    "eager": lambda: tf.constant(3.0),
}


@pytest.mark.parametrize("make_loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("inner", INNERS.values(), ids=INNERS)
def test_scales_a_number_as_the_inner_optimizer(inner, make_loss):
    scaled, expected = (
        EchoOptimizer(inner()).scale_loss(make_loss()),
        inner().scale_loss(make_loss()),
    )
    assert type(scaled) is type(expected)
    assert float(scaled) == float(expected)


@pytest.mark.parametrize("inner", INNERS.values(), ids=INNERS)
def test_a_constant_in_a_graph_is_scaled_and_never_planned(inner, recwarn):
    optimizer = EchoOptimizer(inner())

    @tf.function
    def scaled():
        return optimizer.scale_loss(tf.constant(3.0))

    assert float(scaled()) == float(inner().scale_loss(3.0))
    assert optimizer.plans == []


def test_scaling_one_beside_the_loss_changes_no_plan():
    def plan(also):
        model = small.mlp()
        optimizer = EchoOptimizer("sgd")
        optimizer.build(model.trainable_variables)

        @tf.function
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
                scaled = optimizer.scale_loss(loss)
            also(optimizer, x)
            optimizer.apply(
                tape.gradient(scaled, model.trainable_variables), model.trainable_variables
            )

        step(*small.one_batch())
        return [d.nodes for d in optimizer.plan.recomputed]

    expected = plan(lambda optimizer, x: None)
    assert expected
    assert plan(lambda optimizer, x: optimizer.scale_loss(1.0)) == expected
    assert plan(lambda optimizer, x: optimizer.scale_loss(tf.constant(1.0))) == expected
    assert plan(lambda optimizer, x: optimizer.scale_loss(tf.reduce_sum(x))) == expected

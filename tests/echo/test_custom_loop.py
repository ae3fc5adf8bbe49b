"""Training loops written by hand: `scale_loss` inside the tape, `apply` after it."""

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.echo import small
from tf_echo import EchoOptimizer, EchoWarning, training

Step = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


@pytest.fixture(autouse=True)
def _without_grappler() -> Iterator[None]:
    """Its fusions round differently with and without the copies."""
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    yield
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})


def _loss(model: keras.Model, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean((model(x, training=True) - y) ** 2)


def _plain_loop(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> Step:
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = _loss(model, x, y)
            scaled = optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    return step


def _apply_gradients(model, optimizer):
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(_loss(model, x, y))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return step


def _apply_without_variables(model, optimizer):
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(_loss(model, x, y))
        optimizer.apply(tape.gradient(loss, model.trainable_variables))
        return loss

    return step


def _two_losses(model, optimizer):
    def step(x, y):
        with tf.GradientTape() as tape:
            output = model(x, training=True)
            first = optimizer.scale_loss(tf.reduce_mean((output - y) ** 2))
            second = optimizer.scale_loss(tf.reduce_mean(tf.abs(output)))
        optimizer.apply(
            tape.gradient([first, second], model.trainable_variables), model.trainable_variables
        )
        return first + second

    return step


def _two_tapes(model, optimizer):
    def step(x, y):
        with tf.GradientTape() as one:
            first = optimizer.scale_loss(_loss(model, x, y))
        with tf.GradientTape() as other:
            second = optimizer.scale_loss(_loss(model, -x, y))
        variables = model.trainable_variables
        pairs = zip(one.gradient(first, variables), other.gradient(second, variables), strict=True)
        optimizer.apply([a + b for a, b in pairs], variables)
        return first + second

    return step


def _two_updates(model, optimizer):
    once = _plain_loop(model, optimizer)
    return lambda x, y: once(x, y) + once(-x, y)


def _gradients_changed(model, optimizer):
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(_loss(model, x, y))
        gradients, norm = tf.clip_by_global_norm(
            tape.gradient(loss, model.trainable_variables), 0.1
        )
        optimizer.apply(gradients, model.trainable_variables)
        return loss + norm

    return step


def _missing_gradient(model, optimizer):
    unused = model.layers[0].kernel

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(_loss(model, x, y))
        gradients = tape.gradient(loss, model.trainable_variables)
        gradients = [
            None if v is unused else g
            for g, v in zip(gradients, model.trainable_variables, strict=True)
        ]
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    return step


def _gradient_of_inputs(model, optimizer):
    def step(x, y):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = optimizer.scale_loss(_loss(model, x, y))
        towards, gradients = tape.gradient(loss, (x, model.trainable_variables))
        optimizer.apply(gradients, model.trainable_variables)
        return loss + tf.norm(towards)

    return step


def _gradient_of_an_activation(model, optimizer):
    def step(x, y):
        with tf.GradientTape() as tape:
            hidden = model.layers[0](x)
            output = hidden
            for layer in model.layers[1:]:
                output = layer(output, training=True) if "dropout" in layer.name else layer(output)
            loss = optimizer.scale_loss(tf.reduce_mean((output - y) ** 2))
        towards, gradients = tape.gradient(loss, (hidden, model.trainable_variables))
        optimizer.apply(gradients, model.trainable_variables)
        return loss + tf.norm(towards)

    return step


def _gradient_penalty(model, optimizer):
    def step(x, y):
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = _loss(model, x, y)
            penalty = tf.reduce_mean(inner.gradient(loss, x) ** 2)
            scaled = optimizer.scale_loss(loss + penalty)
        optimizer.apply(tape.gradient(scaled, model.trainable_variables), model.trainable_variables)
        return scaled

    return step


def _persistent_tape(model, optimizer):
    def step(x, y):
        with tf.GradientTape(persistent=True) as tape:
            loss = optimizer.scale_loss(_loss(model, x, y))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss + tf.norm(tape.gradient(loss, model.trainable_variables[0]))

    return step


def _rate_by_loss(model, optimizer):
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(_loss(model, x, y))
        optimizer.learning_rate.assign(0.01 * tf.tanh(loss))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    return step


def _rate_by_another_gradient(model, optimizer):
    def step(x, y):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            loss = optimizer.scale_loss(_loss(model, x, y))
        towards = tape.gradient(loss, x)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.learning_rate.assign(0.01 * tf.tanh(tf.norm(towards)))
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    return step


def _weights_averaged_by_hand(model, optimizer):
    averages = [tf.Variable(v.value) for v in model.trainable_variables]
    once = _plain_loop(model, optimizer)

    def step(x, y):
        loss = once(x, y)
        for average, variable in zip(averages, model.trainable_variables, strict=True):
            average.assign(0.9 * average + 0.1 * variable)
        return loss + tf.norm(averages[0])

    return step


def _loop_of_steps(model, optimizer):
    once = _plain_loop(model, optimizer)

    def step(x, y):
        total = 0.0
        for _ in tf.range(3):
            total += once(x, y)
        return total

    return step


def _inside_another_function(model, optimizer):
    once = tf.function(_plain_loop(model, optimizer))
    return lambda x, y: once(x, y) + 1.0


LOOPS = {
    "apply": _plain_loop,
    "apply_gradients": _apply_gradients,
    "apply without variables": _apply_without_variables,
    "two losses": _two_losses,
    "two tapes": _two_tapes,
    "two updates": _two_updates,
    "gradients changed": _gradients_changed,
    "a missing gradient": _missing_gradient,
    "gradient of inputs": _gradient_of_inputs,
    "gradient of an activation": _gradient_of_an_activation,
    "gradient penalty": _gradient_penalty,
    "persistent tape": _persistent_tape,
    "rate by loss": _rate_by_loss,
    "rate by another gradient": _rate_by_another_gradient,
    "weights averaged by hand": _weights_averaged_by_hand,
    "loop of steps": _loop_of_steps,
    "inside another function": _inside_another_function,
}


def _train(loop, make_optimizer, steps: int = 2, **function_arguments):
    model, optimizer = small.mlp(), make_optimizer()
    optimizer.build(model.trainable_variables)
    step = tf.function(loop(model, optimizer), **function_arguments)
    x, y = map(tf.constant, small.one_batch())
    losses = [step(x, y).numpy() for _ in range(steps)]
    return losses, [v.numpy() for v in [*model.variables, *optimizer.variables]], optimizer


def _assert_same(actual: Sequence, expected: Sequence) -> None:
    small.assert_equal(actual[0], expected[0])
    small.assert_equal(actual[1], expected[1])


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_a_loop_trains_bit_for_bit_like_without_echo(loop):
    actual = _train(loop, lambda: EchoOptimizer(keras.optimizers.Adam(1e-2)))
    assert actual[2].plans
    _assert_same(actual, _train(loop, lambda: keras.optimizers.Adam(1e-2)))


def _adversaries(wrap):
    """Two optimizers of one step, each with its own loss and network."""
    generator, critic = small.mlp(), small.mlp(1)
    first, second = wrap(keras.optimizers.Adam(1e-2)), wrap(keras.optimizers.SGD(1e-2))
    first.build(generator.trainable_variables)
    second.build(critic.trainable_variables)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as one, tf.GradientTape() as other:
            made = generator(x, training=True)
            judged = critic(x * made, training=True)
            generator_loss = first.scale_loss(tf.reduce_mean((judged - 1.0) ** 2))
            critic_loss = second.scale_loss(tf.reduce_mean(judged**2 + y))
        pulls = one.gradient(generator_loss, generator.trainable_variables)
        pushes = other.gradient(critic_loss, critic.trainable_variables)
        first.apply(pulls, generator.trainable_variables)
        second.apply(pushes, critic.trainable_variables)
        return generator_loss + critic_loss

    losses = [step(*small.one_batch()).numpy() for _ in range(2)]
    return losses, [v.numpy() for v in [*generator.variables, *critic.variables]], (first, second)


def test_two_optimizers_in_one_step_train_like_without_echo():
    actual = _adversaries(EchoOptimizer)
    assert any(optimizer.plan.recomputed for optimizer in actual[2])
    _assert_same(actual, _adversaries(lambda inner: inner))


def _two_functions(wrap):
    model, optimizer = small.mlp(), wrap(keras.optimizers.SGD(1e-2))
    optimizer.build(model.trainable_variables)
    one, other = (
        tf.function(_plain_loop(model, optimizer)),
        tf.function(_two_losses(model, optimizer)),
    )
    x, y = map(tf.constant, small.one_batch())
    losses = [step(x, y).numpy() for step in (one, other, one)]
    return losses, [v.numpy() for v in model.variables], optimizer


def test_one_optimizer_in_two_functions_has_a_plan_for_each():
    actual = _two_functions(EchoOptimizer)
    assert len(actual[2].plans) == 2
    assert all(plan.recomputed for plan in actual[2].plans)
    _assert_same(actual, _two_functions(lambda inner: inner))


def test_each_batch_shape_has_a_plan():
    model, optimizer = small.mlp(), EchoOptimizer("sgd")
    optimizer.build(model.trainable_variables)
    step = tf.function(_plain_loop(model, optimizer))
    x, y = map(tf.constant, small.one_batch())
    for size in (128, 96, 128):
        step(x[:size], y[:size])
    assert len(optimizer.plans) == 2


def test_a_loop_under_xla_trains_like_without_echo():
    losses, values, optimizer = _train(_plain_loop, lambda: EchoOptimizer("sgd"), jit_compile=True)
    assert optimizer.plan.recomputed
    expected_losses, expected, _ = _train(
        _plain_loop, lambda: keras.optimizers.SGD(), jit_compile=True
    )
    # XLA fuses differently with and without the copies.
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    for one, other in zip(values, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def _forgetful(model, optimizer):
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = _loss(model, x, y)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    return step


def test_forgetting_scale_loss_trains_and_warns_once():
    with pytest.warns(
        EchoWarning, match=r"was not told the loss.*optimizer\.scale_loss\(loss\)"
    ) as caught:
        actual = _train(lambda *both: _two_steps(_forgetful(*both)), lambda: EchoOptimizer("adam"))
    assert len(caught) == 1
    assert actual[2].plans == []
    _assert_same(
        actual, _train(lambda *both: _two_steps(_forgetful(*both)), lambda: keras.optimizers.Adam())
    )


def _two_steps(step: Step) -> Step:
    return lambda x, y: step(x, y) + step(x, y)


def test_running_eagerly_trains_and_warns_once():
    model, expected = (small.compiled(o, run_eagerly=True) for o in (EchoOptimizer("adam"), "adam"))
    with pytest.warns(EchoWarning, match="runs eagerly") as caught:
        losses = small.fit(model)
    assert len(caught) == 1
    assert model.optimizer.plans == []
    assert losses == small.fit(expected)
    small.assert_equal(small.state(model), small.state(expected))


def test_a_failed_trace_leaves_no_loss_behind():
    model, optimizer = small.mlp(), EchoOptimizer("sgd")
    optimizer.build(model.trainable_variables)

    @tf.function
    def broken(x, y):
        optimizer.scale_loss(_loss(model, x, y))
        raise RuntimeError("no")

    x, y = map(tf.constant, small.one_batch())
    with pytest.raises(RuntimeError, match="no"):
        broken(x, y)
    tf.function(_plain_loop(model, optimizer))(x, y)
    assert len(optimizer.plans) == 1
    assert optimizer.plan.recomputed


def test_a_step_that_cannot_be_planned_trains_and_warns(monkeypatch):
    def fail(*arguments, **keywords):
        raise RuntimeError("cannot plan")

    monkeypatch.setattr(training.passes, "plan_step", fail)
    with pytest.warns(EchoWarning, match="cannot plan"):
        actual = _train(_plain_loop, lambda: EchoOptimizer("adam"))
    _assert_same(actual, _train(_plain_loop, lambda: keras.optimizers.Adam()))


def test_autograph_does_not_convert_the_planner(monkeypatch):
    """Converted, planning is an order of magnitude slower, and tracebacks name no file of ours."""
    seen = []
    original = training.passes.plan_step

    def spy(*arguments, **keywords):
        seen.extend(frame.filename for frame in inspect.stack())
        return original(*arguments, **keywords)

    monkeypatch.setattr(training.passes, "plan_step", tf.autograph.experimental.do_not_convert(spy))
    _train(_plain_loop, lambda: EchoOptimizer("sgd"), steps=1)
    assert training.__file__ in seen


def test_sparse_gradients_are_applied():
    def train(wrap):
        keras.utils.set_random_seed(0)
        embedding, dense = keras.layers.Embedding(50, 16), keras.layers.Dense(16, activation="gelu")
        tokens = tf.constant(np.random.default_rng(0).integers(0, 50, (64, 8)))
        dense(embedding(tokens))
        variables = [*embedding.trainable_variables, *dense.trainable_variables]
        optimizer = wrap(keras.optimizers.Adam(1e-2))
        optimizer.build(variables)

        @tf.function
        def step():
            with tf.GradientTape() as tape:
                loss = optimizer.scale_loss(tf.reduce_mean(dense(embedding(tokens)) ** 2))
            gradients = tape.gradient(loss, variables)
            assert isinstance(gradients[0], tf.IndexedSlices)
            optimizer.apply(gradients, variables)
            return loss

        return [step().numpy() for _ in range(2)], [v.numpy() for v in variables], optimizer

    actual = train(EchoOptimizer)
    assert len(actual[2].plans) == 1
    _assert_same(actual, train(lambda inner: inner))


def test_no_gradients_at_all_change_nothing():
    optimizer = EchoOptimizer("sgd")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tf.function(lambda: optimizer.apply([], []))()
    assert optimizer.plans == []


def test_losses_of_traced_steps_are_not_kept_alive():
    model, optimizer = small.mlp(), EchoOptimizer("sgd")
    optimizer.build(model.trainable_variables)
    _ = tf.function(_plain_loop(model, optimizer)).get_concrete_function(
        *map(tf.constant, small.one_batch())
    )
    assert len(optimizer._steps._losses) == 0

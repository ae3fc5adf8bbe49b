"""In half precision a model trains the same with and without EchoOptimizer, bit by bit, and its
loss scale takes the same course.

A copy is the same op on the same inputs, in whatever precision; nothing is summed in another order.
Grappler is off: what it fuses, and so rounds, depends on what else is in the graph.
"""

import functools
from collections.abc import Callable, Iterator

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tf_echo
from tests import reference
from tests.echo import forcing, models
from tf_echo import passes, tracing

HALF = ("mixed_float16", "mixed_bfloat16")
WIDTH = 64

Optimizer = Callable[[], keras.optimizers.Optimizer]


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """The dtype policy of all tests, and no Grappler."""
    before = keras.config.dtype_policy()
    with reference.grappler(enabled=False):
        yield
    keras.config.set_dtype_policy(before)


def _dense_gelu_and_dropout(x):
    for _ in range(3):
        x = layers.Dropout(0.2)(layers.Dense(WIDTH, activation="gelu")(x))
    return layers.Dense(3, dtype="float32")(x)


CHAIN = models.Case("dense_gelu_and_dropout", _dense_gelu_and_dropout, (models.VECTOR,))


def _named(name: str) -> models.Case:
    return CHAIN if name == CHAIN.name else models.named(name)


def _train(
    case: models.Case, policy: str, optimizer: Optimizer, dataset: tf.data.Dataset | None = None
) -> reference.Run:
    def build() -> keras.Model:
        # Not before: starting from a clear session sets the policy back.
        keras.config.set_dtype_policy(policy)
        return case.build()

    dataset = case.dataset(open_batch=False) if dataset is None else dataset
    return reference.train(build, optimizer, dataset, dict(case.compiling))


def _sgd() -> keras.optimizers.SGD:
    return keras.optimizers.SGD(0.01, momentum=0.9)


def _echo() -> keras.optimizers.Optimizer:
    return tf_echo.EchoOptimizer(_sgd())


@functools.lru_cache(maxsize=2)
def _train_plain(name: str, policy: str) -> reference.Run:
    return _train(_named(name), policy, _sgd)


# By default the first few models, each in one of the two precisions, with one of two planners.
_NAMES = """
    dense_gelu_and_dropout layer_normalization lstm_in_a_loop masking_and_time_distributed
    bidirectional_gru_in_a_loop batch_normalization_after_conv transformer unrolled_lstm
    rms_and_unit_normalization custom_gradients own_train_step
""".split()
_RUNS = [
    pytest.param(
        name,
        policy,
        planner,
        id=f"{name}-{policy}-{planner}",
        marks=[pytest.mark.slow] * ((number, turn) not in [(n, n % 4) for n in range(3)]),
    )
    for number, name in enumerate(_NAMES)
    for turn, (policy, planner) in enumerate(
        (policy, planner) for planner in ("echo", "everything") for policy in HALF
    )
]


@pytest.mark.parametrize(("name", "policy", "planner"), _RUNS)
def test_model_trains_the_same(name, policy, planner, monkeypatch):
    forcing.force(monkeypatch, planner)
    forcing.ignore_workspaces(monkeypatch)
    run = _train(_named(name), policy, _echo)
    assert run.model.compute_dtype == policy.removeprefix("mixed_")
    assert run.model.optimizer.plan.recomputed
    assert reference.differences(run, _train_plain(name, policy)) == []


# The loss scale. In a bad step the loss is finite, and its gradients are too large for float16.


def _scaled(scale: float, growth_steps: int) -> Optimizer:
    return lambda: keras.optimizers.LossScaleOptimizer(
        _sgd(), initial_scale=scale, dynamic_growth_steps=growth_steps
    )


def _batches(bad_step: int | None) -> tf.data.Dataset:
    def spoil(step, batch):
        x, y = batch
        return x, tf.where(step == -1 if bad_step is None else step == bad_step, 1e7 * y, y)

    return CHAIN.dataset(open_batch=False).enumerate().map(spoil)


def _history(run: reference.Run, name: str) -> list[np.ndarray]:
    """The values of a variable after each step, found by the end of its path."""
    return [value for path, value in run.values.items() if path.endswith(name)]


COURSES = {
    "shrinks in a bad step": (1024.0, 100, 2, [1024, 1024, 512, 512, 512]),
    "grows again after a bad step": (1024.0, 2, 2, [1024, 2048, 1024, 1024, 2048]),
    "grows until it is too large, time and again": (2.0**19, 1, None, None),
}


@pytest.mark.parametrize(
    ("scale", "growth_steps", "bad_step", "expected"), COURSES.values(), ids=COURSES
)
def test_the_loss_scale(scale, growth_steps, bad_step, expected):
    plain = _scaled(scale, growth_steps)
    run, other = (
        _train(CHAIN, "mixed_float16", optimizer, _batches(bad_step))
        for optimizer in (lambda: tf_echo.EchoOptimizer(plain()), plain)
    )
    assert run.model.optimizer.plan.recomputed
    assert reference.differences(run, other) == []
    course = [float(value) for value in _history(run, "dynamic_scale")]
    if expected is None:
        assert set(np.sign(np.diff(course))) == {-1, 1}
    else:
        assert course == expected


def test_a_step_that_overflows_changes_the_forward_passes_state_only():
    run = _train(CHAIN, "mixed_float16", _echo, _batches(bad_step=2))
    assert run.model.optimizer.plan.recomputed
    losses = _history(run, "loss")
    assert np.isfinite(losses).all()
    kernels, scales = _history(run, "0.dense_1/kernel"), _history(run, "dynamic_scale")
    momenta = _history(run, "1.sgd/dense_1_kernel_momentum")
    seeds = _history(run, "seed_generator_state")[::3]  # of the first of three
    for step in range(1, models.STEPS):
        skipped = step == 2
        assert np.array_equal(kernels[step], kernels[step - 1]) is skipped
        assert np.array_equal(momenta[step], momenta[step - 1]) is skipped
        assert scales[step] == scales[step - 1] * (0.5 if skipped else 1.0)
        assert not np.array_equal(seeds[step], seeds[step - 1])
    assert int(run.model.optimizer.iterations) == models.STEPS - 1


# What plans count.

BYTES = {"float32": 4, "mixed_float16": 2, "mixed_bfloat16": 2}


@functools.cache
def _plan(policy: str) -> tuple[tracing.Trace, tf_echo.RecomputePlan]:
    traces: list[tracing.Trace] = []

    def trace_step(*arguments, **settings):
        traces.append(tracing.trace_step(*arguments, **settings))
        return traces[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes, "trace_step", trace_step)
        optimizer = _train(CHAIN, policy, _echo, _batches(None).take(1)).model.optimizer
    return traces[0], optimizer.plan


@pytest.mark.parametrize(("policy", "size"), BYTES.items())
def test_an_activation_counts_by_its_true_dtype(policy, size):
    view = _plan(policy)[0].view
    elements = models.BATCH * WIDTH
    for op, expected in {"Erfc": size * elements, "GreaterEqual": elements}.items():
        made = [tensor for node in view.nodes if node.op == op for tensor in node.outputs]
        assert [view.tensors[tensor].nbytes for tensor in made] == [expected] * 3


@pytest.mark.parametrize(("policy", "size"), BYTES.items())
def test_a_region_releases_by_true_dtypes(policy, size):
    _, plan = _plan(policy)
    # A gelu and a dropout hold four activations for the backward pass, and the bits of a mask.
    released = models.BATCH * WIDTH * 4 * size
    assert max(decision.released_bytes for decision in plan.recomputed) == released


@pytest.mark.parametrize("policy", BYTES)
def test_weights_count_as_float32(policy):
    shapes = [(16, WIDTH), (WIDTH, WIDTH), (WIDTH, WIDTH), (WIDTH, 3)]
    elements = sum(rows * columns + columns for rows, columns in shapes)
    weight_bytes = _plan(policy)[1].before.weight_bytes
    # Weights, momenta, and a few counters: iterations, learning rate, seeds, loss scale, metrics.
    assert 0 <= weight_bytes - 2 * 4 * elements < 200

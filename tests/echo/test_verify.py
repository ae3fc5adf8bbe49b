"""`verify` finds what differs between a step with and without Echo, and leaves nothing changed."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tf_echo
from tests import reference
from tests.echo import small
from tf_echo import EchoOptimizer, rewriter, tf_internals
from tf_echo.plan import RecomputePlan
from tf_echo.tracing import Trace
from tf_echo.verify import Verification

OPTIMIZERS = {"plain": lambda: "adam", "echo": lambda: EchoOptimizer("adam")}


@pytest.fixture(autouse=True)
def _plain_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device does not tell its peak, which saves tracing each step once more to measure it."""

    def refuse(device: str) -> None:
        raise ValueError(f"Allocator stats not available for device '{device}'")

    monkeypatch.setattr(tf.config.experimental, "get_memory_info", refuse)


@pytest.fixture
def half_precision() -> Iterator[None]:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy(before)


def _verify(model: keras.Model) -> Verification:
    return tf_echo.verify(model, *small.one_batch())


def _expected_names(model: keras.Model) -> set[str]:
    """What must at least be compared."""
    gradients = {f"gradient of {v.path}" for v in model.trainable_variables}
    variables = [*model.variables, *model.optimizer.variables]
    return {"loss"} | gradients | {f"{v.path}:0 after the step" for v in variables}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_loss_gradients_and_variables_of_a_small_model_are_bit_equal(optimizer):
    model = small.compiled(optimizer)
    found = _verify(model)
    assert found.plan.recomputed
    assert found.plan.policy == "echo"
    assert found.bit_equal
    assert found.largest_difference == 0.0
    assert _expected_names(model) <= found.differences.keys()
    text = str(found)
    assert text.startswith(f"All {len(found.differences)} values compared are equal bit by bit.")
    assert (found.peak_before, found.peak_after) == (None, None)
    assert "TF_CPU_ALLOCATOR_USE_BFC=1" in text


def test_a_model_under_policy_none_is_verified_with_a_plan():
    found = _verify(small.compiled(lambda: EchoOptimizer("adam", policy="none")))
    assert found.plan.policy == "echo"
    assert found.plan.recomputed


def test_a_model_under_policy_mirror_is_verified_with_its_plan():
    found = _verify(small.compiled(lambda: EchoOptimizer("adam", policy="mirror")))
    assert found.plan.policy == "mirror"
    assert found.plan.recomputed
    assert found.bit_equal


def test_the_plan_decides_as_that_of_training():
    model = small.compiled(lambda: EchoOptimizer("adam"))
    found = _verify(model)
    model.train_on_batch(*small.one_batch())
    assert found.plan.decisions == model.optimizer.plan.decisions


# What verifying leaves alone.


def _normalized(optimizer: Any) -> tuple[keras.Model, np.ndarray, np.ndarray]:
    """A trained model with seeds, metrics and moving averages, and a batch."""
    small.mlp()  # clears the session
    network = [
        keras.Input((small.FEATURES,)),
        layers.Dense(small.FEATURES, activation="gelu"),
        layers.BatchNormalization(momentum=0.5),
        layers.Dropout(0.2),
        layers.Dense(1),
    ]
    model = keras.Sequential(network)
    model.compile(optimizer, "mse", metrics=["mae"])
    small.fit(model)
    return model, *small.one_batch()


def _stateful_lstm(optimizer: Any) -> tuple[keras.Model, np.ndarray, np.ndarray]:
    """A model with a loop whose state goes on from batch to batch, and a batch."""
    small.mlp()  # clears the session
    x = np.random.default_rng(0).normal(size=(16, 6, 4)).astype("float32")
    lstm = layers.LSTM(16, stateful=True, recurrent_dropout=0.2)
    model = keras.Sequential([keras.Input((6, 4), batch_size=16), lstm, layers.Dense(1)])
    model.compile(optimizer, "mse")
    model.optimizer.build(model.trainable_variables)
    model(x)  # leaves a state
    return model, x, x[:, :1, 0]


def _observed(model: keras.Model) -> dict[str, Any]:
    owners = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    return {
        "values": [v.numpy().tobytes() for v in owners],
        "optimizer": id(model.optimizer),
        "plans": getattr(model.optimizer, "plans", None),
        "train function": model.train_function,
    }


@pytest.mark.parametrize(
    "optimizer",
    [pytest.param(OPTIMIZERS["plain"], marks=pytest.mark.slow), OPTIMIZERS["echo"]],
    ids=OPTIMIZERS,
)
def test_verifying_twice_finds_the_same_and_changes_nothing(optimizer):
    model, x, y = _normalized(optimizer())
    before = _observed(model)
    first, second = (tf_echo.verify(model, x, y) for _ in range(2))
    assert _observed(model) == before
    assert first.bit_equal
    assert first.differences == second.differences
    assert dataclasses.replace(first.plan, name="") == dataclasses.replace(second.plan, name="")


def test_a_loop_is_verified_and_its_state_stays_as_it_was():
    model, x, y = _stateful_lstm("adam")
    before = _observed(model)
    assert all(state.numpy().any() for state in model.layers[0].states)
    found = tf_echo.verify(model, x, y)
    assert _observed(model) == before
    assert any(loop.recompute for loop in found.plan.loops)
    assert found.bit_equal
    assert _expected_names(model) <= found.differences.keys()


def test_an_optimizer_without_variables_still_has_none():
    model = small.compiled("adam", build=False)
    assert _verify(model).bit_equal
    assert not model.optimizer.built


@pytest.mark.slow
def test_training_after_verifying_is_as_without():
    verified, expected = (small.compiled(OPTIMIZERS["echo"]) for _ in range(2))
    _verify(verified)
    small.assert_equal(small.fit(verified), small.fit(expected))
    small.assert_equal(small.state(verified), small.state(expected))


def test_the_random_generators_are_left_alone():
    model = small.compiled("sgd")
    keras.utils.set_random_seed(3)
    expected = float(tf.random.normal([])), float(keras.random.normal([]))
    keras.utils.set_random_seed(3)
    _verify(model)
    assert (float(tf.random.normal([])), float(keras.random.normal([]))) == expected


@pytest.mark.parametrize("enabled", [True, False])
def test_grappler_stays_on_or_off(enabled):
    weight = tf.Variable(tf.ones([4]))
    with reference.grappler(enabled):
        tf_echo.verify(lambda: tf.reduce_sum(tf.exp(weight)))
        options = tf.config.optimizer.get_experimental_options()
        assert options.get("disable_meta_optimizer", False) is not enabled


# Other targets.


def test_a_loss_function_is_verified_with_its_arguments():
    model = small.mlp()
    before = [v.numpy() for v in model.variables]
    x, y = small.one_batch()
    found = tf_echo.verify(lambda x, y: tf.reduce_mean((model(x, training=True) - y) ** 2), x, y)
    assert found.plan.recomputed
    assert found.bit_equal
    assert "loss" in found.differences
    gradients = [name for name in found.differences if name.startswith("gradient of ")]
    assert len(gradients) == len(model.trainable_variables)
    small.assert_equal(model.variables, before)


def test_a_function_of_a_structure_is_verified():
    model = small.mlp()
    x, _ = small.one_batch()
    assert tf_echo.verify(
        lambda batch: tf.reduce_mean(model(batch["x"], training=True) ** 2), {"x": x}
    ).bit_equal


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_scaled_model_in_half_precision_is_verified(half_precision, optimizer):
    model = small.compiled(optimizer)
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    before = _observed(model)
    found = _verify(model)
    assert found.plan.recomputed
    assert found.bit_equal
    assert any("dynamic_scale" in name for name in found.differences)
    assert _observed(model) == before


def test_sample_weights_are_part_of_the_batch():
    x, y = small.one_batch()
    model = small.compiled("adam")
    whole = tf_echo.verify(model, x, y, np.ones(len(x), "float32"))
    assert whole.bit_equal
    assert "loss" in whole.differences


@pytest.mark.slow
def test_a_model_that_xla_compiles_differs_by_rounding_only():
    model = small.compiled("adam", dropout=0.0, jit_compile=True)
    found = _verify(model)
    assert found.plan.recomputed
    # XLA fuses, and so rounds, differently.
    assert found.largest_difference < 1e-5
    assert _expected_names(model) <= found.differences.keys()


# What it is for.

Rewrite = Callable[[Trace, RecomputePlan], None]


def _negate_an_input(rewrite: Rewrite) -> Rewrite:
    """Makes a rewriter that spoils the gradient of the first kernel."""

    def spoiled(trace: Trace, plan: RecomputePlan) -> None:
        rewrite(trace, plan)
        products = [n for n in trace.view.nodes if n.backward and n.op == "MatMul"]
        last = trace.operations[products[-1].id]
        if plan.recomputed:
            with trace.graph.as_default():
                tf_internals.replace_input(last, 1, -last.inputs[1])

    return spoiled


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_rewriter_that_spoils_a_gradient_is_noticed(optimizer, monkeypatch):
    monkeypatch.setattr(rewriter, "rewrite", _negate_an_input(rewriter.rewrite))
    model = small.compiled(optimizer)
    found = _verify(model)
    name = model.trainable_variables[0].path
    assert not found.bit_equal
    assert found.differences[f"gradient of {name}"] == found.largest_difference == 2.0
    assert found.differences[f"{name}:0 after the step"] > 0
    assert found.differences["loss"] == 0.0
    assert f"gradient of {name}: 2 of its largest element" in str(found)
    assert f"of {len(found.differences)} values compared differ" in str(found)


def test_a_rewriter_that_spoils_a_gradient_of_a_function_is_noticed(monkeypatch):
    monkeypatch.setattr(rewriter, "rewrite", _negate_an_input(rewriter.rewrite))
    model = small.mlp()
    x, _ = small.one_batch()
    found = tf_echo.verify(lambda x: tf.reduce_mean(model(x, training=True) ** 2), x)
    (different,) = [name for name, distance in found.differences.items() if distance]
    assert found.differences[different] == 2.0
    assert different in str(found)


class Chain(keras.Model):
    """A model of which TensorFlow and, if layers have one name, Keras name variables alike."""

    def __init__(self, *names: str) -> None:
        super().__init__(name="chain")
        self.inner = [layers.Dense(small.FEATURES, activation="gelu", name=name) for name in names]
        self.last = layers.Dense(1, name="last")

    def call(self, x: tf.Tensor) -> tf.Tensor:
        for layer in self.inner:
            x = layer(x)
        return self.last(x)


def _chain(*names: str) -> keras.Model:
    model = Chain(*names)
    model(small.one_batch()[0])
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    return model


@pytest.mark.parametrize("names", [("one", "two"), ("one", "one")], ids=["two names", "one name"])
def test_variables_that_are_named_alike_are_told_apart(names, monkeypatch):
    monkeypatch.setattr(rewriter, "rewrite", _negate_an_input(rewriter.rewrite))
    model = _chain(*names)
    found = _verify(model)
    gradients = [name for name in found.differences if name.startswith("gradient of ")]
    variables = [name for name in found.differences if name.endswith(" after the step")]
    assert not found.bit_equal
    assert len(gradients) == len(model.trainable_variables)
    assert len(variables) >= len(model.variables) + len(model.optimizer.variables)


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_a_loss_may_be_of(dtype):
    weight = tf.Variable(tf.ones([4], dtype), name="weight")
    found = tf_echo.verify(lambda: tf.reduce_sum(tf.exp(weight)))
    assert found.bit_equal
    assert {"loss", "gradient of 0 weight:0"} <= found.differences.keys()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_values_that_are_not_numbers_in_the_same_places_are_equal(dtype):
    values = tf.constant([1.0, float("nan")], dtype)
    weight = tf.Variable(tf.zeros([2], dtype), name="weight")
    found = tf_echo.verify(lambda: tf.reduce_sum(tf.cast(tf.exp(weight) * values, "float32")))
    assert found.bit_equal


ERRORS = {
    "not compiled": (lambda: _verify(small.mlp()), ValueError, "compiled .* can be verified"),
    "no target": (
        lambda: tf_echo.verify(3),
        TypeError,
        "must be a compiled Keras model or a function.*3",
    ),
    "no variable": (
        lambda: tf_echo.verify(tf.reduce_sum, tf.ones([2])),
        ValueError,
        "must depend on a variable",
    ),
}


@pytest.mark.parametrize(("verify", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_verify_says_what_is_wrong_with(verify, error, message):
    with pytest.raises(error, match=message):
        verify()


def test_a_model_that_is_not_built_cannot_be_verified():
    model = keras.Sequential([layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse")
    with pytest.raises(ValueError, match="must be built before it can be verified"):
        _verify(model)


class Untold(keras.Model):
    """A train step that tells the optimizer no loss."""

    def train_step(self, data: Any) -> dict[str, tf.Tensor]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


@pytest.mark.filterwarnings("ignore::tf_echo.EchoWarning")
def test_a_step_that_tells_no_loss_cannot_be_verified_and_stays_as_it_was():
    inputs = keras.Input((small.FEATURES,))
    model = Untold(inputs, layers.Dense(1)(inputs))
    model.compile("sgd", "mse")
    model.optimizer.build(model.trainable_variables)
    before = _observed(model)
    with pytest.raises(ValueError, match="could not be planned"):
        _verify(model)
    assert _observed(model) == before


# Peaks: whether the device tells them is settled when TensorFlow is imported.

CHILD = """
import json

import numpy as np

import tf_echo
from tests import reference
from tests.echo import small

x = np.random.default_rng(0).normal(size=(2048, small.FEATURES)).astype("float32")
found = tf_echo.verify(small.compiled("adam"), x, x[:, :1])
print("RESULT " + json.dumps([found.peak_before, found.peak_after, found.bit_equal, str(found)]))
"""


def _in_a_process(**variables: str) -> list[Any]:
    root = str(pathlib.Path(__file__).parents[2])
    inherited = {k: v for k, v in os.environ.items() if k != "TF_CPU_ALLOCATOR_USE_BFC"}
    environment = {**inherited, "PYTHONPATH": root, **variables}
    command = [sys.executable, "-c", CHILD]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT "))


@pytest.mark.slow
def test_a_plain_cpu_does_not_tell_its_peaks_and_the_text_says_how_to_let_it():
    before, after, bit_equal, text = _in_a_process()
    assert (before, after, bit_equal) == (None, None, True)
    assert "Predicted peak: " in text
    assert "Measured peak" not in text
    assert "TF_CPU_ALLOCATOR_USE_BFC=1" in text


def test_the_measured_peak_is_lower_where_activations_outweigh_weights():
    before, after, bit_equal, text = _in_a_process(TF_CPU_ALLOCATOR_USE_BFC="1")
    assert isinstance(before, int)
    assert isinstance(after, int)
    assert after < before
    assert bit_equal
    assert "Measured peak: " in text
    assert "TF_CPU_ALLOCATOR_USE_BFC" not in text

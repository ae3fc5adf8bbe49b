"""Train a model and write down all that training changed, to compare two runs name by name.

It knows nothing of tf_echo: one run gets a plain Keras optimizer, the other the same optimizer
wrapped.
"""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Run:
    """What one training run left behind."""

    model: keras.Model
    values: dict[str, np.ndarray]
    """After each step: what the step returned, all variables of the model, and those of its
    optimizers. With SGD and momentum the latter tell every gradient, as momentum = 0.9 * momentum -
    rate * gradient."""


class _Recorder(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, np.ndarray] = {}

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        found = {name: np.asarray(value) for name, value in (logs or {}).items()}
        owners = [self.model, *optimizers_of(self.model)]
        for number, owner in enumerate(owners):
            for variable in owner.variables:
                found[f"{number}.{variable.path}"] = variable.numpy().copy()
        self.values.update((f"step {batch}: {name}", value) for name, value in found.items())


def optimizers_of(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """The optimizer that a model was compiled with, and more where its class keeps more."""
    return [model.optimizer, *getattr(model, "more_optimizers", [])]


def train(
    build: Callable[[], keras.Model],
    optimizer: Callable[[], keras.optimizers.Optimizer],
    dataset: tf.data.Dataset,
    compiling: dict[str, Any] | None = None,
    fitting: dict[str, Any] | None = None,
) -> Run:
    """Trains a fresh model for one epoch; two calls start from the same weights and the same seeds.

    Args:
        build: makes the model.
        optimizer: makes its optimizer.
        dataset: batches, in order.
        compiling: arguments for `compile`.
        fitting: arguments for `fit`.
    """
    policy = keras.config.dtype_policy()
    keras.utils.clear_session(free_memory=False)
    keras.config.set_dtype_policy(policy)  # which that resets
    keras.utils.set_random_seed(11)
    model, recorder = build(), _Recorder()
    options = {"loss": "mse", "jit_compile": False, **(compiling or {})}
    model.compile(optimizer=optimizer(), **options)
    model.optimizer.build(model.trainable_variables)  # or the step is traced twice
    model.fit(dataset, verbose=0, shuffle=False, callbacks=[recorder], **(fitting or {}))
    return Run(model, recorder.values)


def differences(run: Run, reference: Run, tolerance: float = 0.0) -> list[str]:
    """Names and distances of all values that differ.

    Args:
        run: a run.
        reference: the run that it should equal.
        tolerance: largest distance, as a multiple of the norm of all that the reference holds of
            the same layer (a bias before a normalization has a gradient of rounding errors); 0 asks
            for the same bits.
    """
    assert run.values.keys() == reference.values.keys()
    norms: dict[str, float] = {}
    for name, value in reference.values.items():
        norms[_layer(name)] = max(norms.get(_layer(name), 0.0), float(np.linalg.norm(value)))
    found = []
    for name, expected in reference.values.items():
        value = run.values[name]
        if value.dtype != expected.dtype or value.shape != expected.shape:
            found.append(
                f"{name}: {value.dtype}{value.shape}, not {expected.dtype}{expected.shape}"
            )
        elif value.tobytes() != expected.tobytes():
            distance = float(np.linalg.norm(value.astype("float64") - expected))
            relative = distance / (norms[_layer(name)] or 1.0)
            if not relative <= tolerance:
                found.append(f"{name}: {relative:.2g} of the layer's norm")
    return found


def _layer(name: str) -> str:
    """What the values of one layer in one step have in common: all but the last part of a path."""
    return re.sub(r"[/_][a-z]+(_momentum)?$", "", name)


@contextlib.contextmanager
def grappler(enabled: bool) -> Iterator[None]:
    """Runs Grappler or not: its fusions round differently in graphs that differ elsewhere."""
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": not enabled})
    try:
        yield
    finally:
        was_off = before.get("disable_meta_optimizer", False)
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": was_off})

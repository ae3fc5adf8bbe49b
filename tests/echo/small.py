"""A model of which activations outweigh weights, so that Echo recomputes, and ways to train it."""

from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

BATCH, STEPS, FEATURES = 128, 4, 32

Optimizer = keras.optimizers.Optimizer


def mlp(seed: int = 0, dropout: float = 0.2) -> keras.Sequential:
    """Dense-gelu and Dropout, twice, named and initialized equally each time; traces fast."""
    policy = keras.config.dtype_policy()
    keras.backend.clear_session(free_memory=False)
    keras.config.set_dtype_policy(policy)  # which that resets
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((FEATURES,), name="features")], name="mlp")
    for _ in range(2):
        model.add(keras.layers.Dense(FEATURES, activation="gelu", use_bias=False))
        model.add(keras.layers.Dropout(dropout))
    model.add(keras.layers.Dense(1, dtype="float32"))
    return model


def arrays() -> tuple[np.ndarray, np.ndarray]:
    """`STEPS` batches of features and targets."""
    random = np.random.default_rng(0)
    x = random.normal(size=(BATCH * STEPS, FEATURES)).astype("float32")
    return x, x[:, :1] ** 2


def one_batch() -> tuple[np.ndarray, np.ndarray]:
    """The first batch."""
    x, y = arrays()
    return x[:BATCH], y[:BATCH]


def dataset(drop_remainder: bool = True) -> tf.data.Dataset:
    """The batches, of fixed size unless `drop_remainder` is False."""
    return tf.data.Dataset.from_tensor_slices(arrays()).batch(BATCH, drop_remainder=drop_remainder)


def compiled(
    optimizer: Any, seed: int = 0, build: bool = True, dropout: float = 0.2, **arguments: Any
) -> keras.Sequential:
    """An `mlp` compiled with the optimizer, or with what a function of no arguments returns.

    The optimizer is built, so that `fit` need not trace the step a second time.
    """
    model = mlp(seed, dropout)
    if not isinstance(optimizer, (str, Optimizer)):
        optimizer = optimizer()
    model.compile(**{"optimizer": optimizer, "loss": "mse", **arguments})
    if build:
        model.optimizer.build(model.trainable_variables)
    return model


def fit(model: keras.Model, epochs: int = 1, **arguments: Any) -> list[float]:
    """Trains on the batches in order; the losses."""
    x, y = arrays()
    settings = {"batch_size": BATCH, "epochs": epochs, "shuffle": False, "verbose": 0}
    return model.fit(x, y, **{**settings, **arguments}).history["loss"]


def state(model: keras.Model) -> list[np.ndarray]:
    """All that training changes: weights, seeds, optimizer variables."""
    return [v.numpy() for v in [*model.variables, *model.optimizer.variables]]


def assert_equal(actual: Iterable[Any], expected: Iterable[Any]) -> None:
    """Equal, bit for bit."""
    actual, expected = list(actual), list(expected)
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(
            *(np.array(keras.ops.convert_to_numpy(a)) for a in (one, other))
        )


def assert_trains_equally(
    echo: Callable[[], Optimizer],
    plain: Callable[[], Optimizer],
    epochs: int = 1,
    callbacks: Callable[[], list[keras.callbacks.Callback]] = list,
    **compile_arguments: Any,
) -> keras.Model:
    """Trains two equal models, one with Echo, which must recompute, and compares all; that one."""
    expected = compiled(plain, **compile_arguments)
    expected_losses = fit(expected, epochs, callbacks=callbacks())
    model = compiled(echo, **compile_arguments)
    losses = fit(model, epochs, callbacks=callbacks())
    assert model.optimizer.plan.recomputed
    assert_equal(losses, expected_losses)
    assert_equal(state(model), state(expected))
    return model

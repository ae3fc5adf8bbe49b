"""Optimizers that touch the rows of one batch only.

Each is Keras' formula, in the order in which Keras computes it, on gathered rows whose gradients
have been added up: every distinct row takes one step, however often the batch looks it up. For SGD
without momentum and Adagrad that is exactly what the dense optimizer does. With momentum and with
Adam it is the *lazy* variant: a row that the batch does not look up keeps its values and moments,
while the dense optimizer would go on moving it and decaying them.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf
from keras import ops

Step: TypeAlias = Callable[[Sequence[tf.Tensor], tf.Tensor, tf.Tensor, tf.Tensor], list[tf.Tensor]]
"""From the rows and their slots, summed gradients, learning rate and number of the step (from 1)
to new rows and slots."""


@dataclasses.dataclass(frozen=True, slots=True)
class RowOptimizer:
    """One optimizer's formula.

    Args:
        slots: Name and initial value of each value that goes with a row's value.
        step: The formula.
    """

    slots: tuple[tuple[str, float], ...]
    step: Step


def row_optimizer(optimizer: keras.optimizers.Optimizer) -> RowOptimizer:
    """The formula of a Keras optimizer.

    Raises:
        ValueError: There is none for its class, or it has settings that cannot be kept row by row.
    """
    maker = _MAKERS.get(type(optimizer).__name__)
    if maker is None or not type(optimizer).__module__.startswith("keras."):
        known = ", ".join(f"'{name}'" for name in _MAKERS)
        raise ValueError(
            "The rows of a ScratchPipeEmbedding can be trained by "
            f"{known}. Received: optimizer={type(optimizer).__name__}. Pass one of these as "
            "`optimizer` of the layer; the other variables keep the model's optimizer."
        )
    refuse_settings(optimizer, _ROW_SETTINGS)
    return maker(_config(optimizer))


def refuse_settings(optimizer: keras.optimizers.Optimizer, settings: Sequence[str]) -> None:
    """Raise `ValueError` if the optimizer uses one of these settings."""
    config = _config(optimizer)
    used = [f"{key}={config[key]}" for key in settings if config.get(key)]
    if used:
        raise ValueError(
            f"A ScratchPipeEmbedding cannot keep {', '.join(used)} of optimizer "
            f"'{type(optimizer).__name__}': its rows are updated apart from the other variables. "
            "Leave this setting out."
        )


def _config(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    with tf.init_scope():  # The config holds the learning rate's value.
        return dict(optimizer.get_config())


SHARED_SETTINGS = (
    "clipnorm",
    "clipvalue",
    "global_clipnorm",
    "use_ema",
    "loss_scale_factor",
    "gradient_accumulation_steps",
)
"""What an optimizer of the whole model may not use, because it would not reach the rows."""

_ROW_SETTINGS = (*SHARED_SETTINGS, "weight_decay")


def _sgd(config: dict[str, Any]) -> RowOptimizer:
    momentum, nesterov = config["momentum"], config["nesterov"]

    def step(
        values: Sequence[tf.Tensor], gradient: tf.Tensor, rate: tf.Tensor, _: tf.Tensor
    ) -> list[tf.Tensor]:
        scaled = ops.multiply(gradient, rate)
        if not momentum:
            return [ops.subtract(values[0], scaled)]
        moment = ops.subtract(ops.multiply(values[1], momentum), scaled)
        change = ops.subtract(ops.multiply(moment, momentum), scaled) if nesterov else moment
        return [ops.add(values[0], change), moment]

    return RowOptimizer((("momentum", 0.0),) if momentum else (), step)


def _adagrad(config: dict[str, Any]) -> RowOptimizer:
    def step(
        values: Sequence[tf.Tensor], gradient: tf.Tensor, rate: tf.Tensor, _: tf.Tensor
    ) -> list[tf.Tensor]:
        accumulator = ops.add(values[1], ops.square(gradient))
        root = ops.sqrt(ops.add(accumulator, config["epsilon"]))
        change = ops.divide(ops.multiply(rate, gradient), root)
        return [ops.subtract(values[0], change), accumulator]

    return RowOptimizer((("accumulator", config["initial_accumulator_value"]),), step)


def _adam(config: dict[str, Any]) -> RowOptimizer:
    beta_1, beta_2, amsgrad = config["beta_1"], config["beta_2"], config["amsgrad"]

    def step(
        values: Sequence[tf.Tensor], gradient: tf.Tensor, rate: tf.Tensor, number: tf.Tensor
    ) -> list[tf.Tensor]:
        dtype = values[0].dtype
        power_1 = ops.power(ops.cast(beta_1, dtype), number)
        power_2 = ops.power(ops.cast(beta_2, dtype), number)
        alpha = rate * ops.sqrt(1 - power_2) / (1 - power_1)
        row, moment, velocity = values[:3]
        moment = ops.add(moment, ops.multiply(ops.subtract(gradient, moment), 1 - beta_1))
        difference = ops.subtract(ops.square(gradient), velocity)
        velocity = ops.add(velocity, ops.multiply(difference, 1 - beta_2))
        highest = ops.maximum(values[3], velocity) if amsgrad else velocity
        root = ops.add(ops.sqrt(highest), config["epsilon"])
        row = ops.subtract(row, ops.divide(ops.multiply(moment, alpha), root))
        return [row, moment, velocity, highest] if amsgrad else [row, moment, velocity]

    names = ("momentum", "velocity", "velocity_hat")[: 3 if amsgrad else 2]
    return RowOptimizer(tuple((name, 0.0) for name in names), step)


_MAKERS: dict[str, Callable[[dict[str, Any]], RowOptimizer]] = {
    "SGD": _sgd,
    "Adagrad": _adagrad,
    "Adam": _adam,
}

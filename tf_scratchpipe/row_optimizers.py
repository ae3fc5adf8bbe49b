"""Optimizers that touch the rows of one batch only.

Each is Keras' formula, in the order in which Keras computes it, on gathered rows whose gradients
have been added up: every distinct row takes one step, however often the batch looks it up. What
becomes of the other rows differs from the dense optimizer, except where it says "the same":

- SGD without momentum, Adagrad, RowwiseAdagrad: the same. A gradient of zero moves nothing.
- SGD with momentum, RMSprop, Adam, AdamW: *lazy*. A row that is not looked up keeps its values and
  moments, while the dense optimizer would go on moving it and decaying them. The number of the
  step, by which Adam corrects its bias, is that of all steps, not of the row's.
- Ftrl: *lazy*. The dense optimizer works every row out anew from its accumulators, so its first
  step makes rows zero that nobody has looked up; here they keep what they began with.
- `weight_decay` decays the rows that the batch looks up, and no others.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import keras
import tensorflow as tf
from keras import ops

from tf_scratchpipe.rowwise_adagrad import RowwiseAdagrad, rowwise_step

Step: TypeAlias = Callable[[Sequence[tf.Tensor], tf.Tensor, tf.Tensor, tf.Tensor], list[tf.Tensor]]
"""From the rows and their slots, summed gradients, learning rate and number of the step (from 1)
to new rows and slots."""


class RowSlot(NamedTuple):
    """What an optimizer keeps beside a row."""

    name: str
    initial: float
    """What all of its values are to begin with."""
    width: int | None = None
    """Values for each row. None: as many as the row has."""

    def width_for(self, dim: int) -> int:
        """Values for each row of `dim` values."""
        return self.width or dim


@dataclasses.dataclass(frozen=True, slots=True)
class RowOptimizer:
    """One optimizer's formula.

    Args:
        slots: What goes with a row.
        step: The formula.
    """

    slots: tuple[RowSlot, ...]
    step: Step


def get(identifier: Any) -> keras.optimizers.Optimizer:
    """A Keras optimizer from an instance, a name or a config."""
    scope = {"RowwiseAdagrad": RowwiseAdagrad, "rowwise_adagrad": RowwiseAdagrad}
    with keras.saving.custom_object_scope(scope):
        return keras.optimizers.get(identifier)


def row_optimizer(optimizer: keras.optimizers.Optimizer) -> RowOptimizer:
    """The formula of a Keras optimizer.

    Raises:
        ValueError: There is none for its class, or it has settings that cannot be kept row by row.
    """
    maker = _MAKERS.get(type(optimizer).__name__)
    if maker is None or not type(optimizer).__module__.startswith(("keras.", "tf_scratchpipe.")):
        known = ", ".join(f"'{name}'" for name in _MAKERS)
        raise ValueError(
            "The rows of a ScratchPipeEmbedding can be trained by "
            f"{known}. Received: optimizer={type(optimizer).__name__}. Pass one of these as "
            "`optimizer` of the layer; the other variables keep the model's optimizer."
        )
    refuse_settings(optimizer)
    return maker(_config(optimizer))


def refuse_settings(
    optimizer: keras.optimizers.Optimizer, settings: Sequence[str] | None = None
) -> None:
    """Raise `ValueError` if the optimizer has settings that would not reach the rows.

    Args:
        optimizer: The optimizer.
        settings: Which ones to look at. None: all that are refused.
    """
    config = _config(optimizer)
    for setting, (reason, remedy) in _REFUSED.items():
        if config.get(setting) and (settings is None or setting in settings):
            raise ValueError(
                f"A ScratchPipeEmbedding cannot keep {setting}={config[setting]} of optimizer "
                f"'{type(optimizer).__name__}': {reason}. {remedy}."
            )


_REFUSED = {
    "global_clipnorm": (
        "rows move apart from the other variables, and no norm of all gradients together is known "
        "when they do",
        "Use `clipnorm`, which takes the norm of each variable's gradient, the table's as well, or "
        "`clipvalue`",
    ),
    "use_ema": (
        "the average of a table would be another table, all rows of which change in each step",
        "Leave it out, or average the other weights in a callback of yours",
    ),
}
"""Why a setting is refused, and what to do."""


def refuse_own_loss_scale(optimizer: keras.optimizers.Optimizer) -> None:
    """Raise `ValueError` if an optimizer of rows alone asks for a scaled loss."""
    if optimizer.loss_scale_factor is not None:
        raise ValueError(
            f"The row optimizer '{type(optimizer).__name__}' of a ScratchPipeEmbedding cannot have "
            f"a loss scale of its own. Received: loss_scale_factor={optimizer.loss_scale_factor}. "
            "The optimizer that the model is compiled with scales the loss: set it there, and the "
            "gradients of rows are divided by it as well."
        )


def clipped(optimizer: keras.optimizers.Optimizer, gradients: tf.Tensor) -> tf.Tensor:
    """Gradients of a table, each row's once, clipped as Keras clips those of a variable."""
    if optimizer.clipnorm and optimizer.clipnorm > 0:
        # Rows that are not here have no gradient and add nothing to the norm.
        return tf.clip_by_norm(gradients, optimizer.clipnorm)
    if optimizer.clipvalue and optimizer.clipvalue > 0:
        return ops.clip(gradients, -optimizer.clipvalue, optimizer.clipvalue)
    return gradients


def decayed(optimizer: keras.optimizers.Optimizer, rows: tf.Tensor, rate: tf.Tensor) -> tf.Tensor:
    """Rows after Keras' decoupled weight decay, which comes before the step itself."""
    if optimizer.weight_decay is None:
        return rows
    return rows - rows * tf.cast(optimizer.weight_decay, rows.dtype) * rate


def _config(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    with tf.init_scope():  # The config holds the learning rate's value.
        return dict(optimizer.get_config())


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

    return RowOptimizer((RowSlot("momentum", 0.0),) if momentum else (), step)


def _adagrad(config: dict[str, Any]) -> RowOptimizer:
    def step(
        values: Sequence[tf.Tensor], gradient: tf.Tensor, rate: tf.Tensor, _: tf.Tensor
    ) -> list[tf.Tensor]:
        accumulator = ops.add(values[1], ops.square(gradient))
        root = ops.sqrt(ops.add(accumulator, config["epsilon"]))
        change = ops.divide(ops.multiply(rate, gradient), root)
        return [ops.subtract(values[0], change), accumulator]

    return RowOptimizer((RowSlot("accumulator", config["initial_accumulator_value"]),), step)


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
    return RowOptimizer(tuple(RowSlot(name, 0.0) for name in names), step)


def _rmsprop(config: dict[str, Any]) -> RowOptimizer:
    rho, momentum, centered = config["rho"], config["momentum"], config["centered"]

    def step(
        values: Sequence[tf.Tensor], gradient: tf.Tensor, rate: tf.Tensor, _: tf.Tensor
    ) -> list[tf.Tensor]:
        row, velocity, *others = values
        velocity = ops.add(ops.multiply(rho, velocity), ops.multiply(1 - rho, ops.square(gradient)))
        new = [velocity]
        denominator = ops.add(velocity, config["epsilon"])
        if centered:
            average = ops.add(ops.multiply(rho, others[-1]), ops.multiply(1 - rho, gradient))
            denominator = velocity - ops.square(average) + config["epsilon"]
        increment = ops.divide(ops.multiply(rate, gradient), ops.sqrt(denominator))
        if momentum > 0:
            increment = ops.add(ops.multiply(momentum, others[0]), increment)
            new.append(increment)
        return [ops.subtract(row, increment), *new, *([average] if centered else [])]

    names = ["velocity", *(["momentum"] if momentum > 0 else [])]
    names += ["average_gradient"] if centered else []
    return RowOptimizer(tuple(RowSlot(name, 0.0) for name in names), step)


def _ftrl(config: dict[str, Any]) -> RowOptimizer:
    power, l1 = config["learning_rate_power"], config["l1_regularization_strength"]
    shrinkage = config["l2_shrinkage_regularization_strength"]

    def step(
        values: Sequence[tf.Tensor], gradient: tf.Tensor, rate: tf.Tensor, _: tf.Tensor
    ) -> list[tf.Tensor]:
        row, accumulator, linear = values
        l2 = config["l2_regularization_strength"] + config["beta"] / (2.0 * rate)
        shrunk = ops.add(gradient, ops.multiply(2 * shrinkage, row))
        total = ops.add(accumulator, ops.square(gradient))
        risen = ops.subtract(ops.power(total, -power), ops.power(accumulator, -power))
        change = ops.subtract(shrunk, ops.multiply(ops.divide(risen, rate), row))
        linear = ops.add(linear, change)
        quadratic = ops.add(ops.divide(ops.power(total, -power), rate), 2 * l2)
        row = ops.divide(ops.subtract(ops.clip(linear, -l1, l1), linear), quadratic)
        return [row, total, linear]

    accumulator = RowSlot("accumulator", config["initial_accumulator_value"])
    return RowOptimizer((accumulator, RowSlot("linear", 0.0)), step)


def _rowwise_adagrad(config: dict[str, Any]) -> RowOptimizer:
    def step(
        values: Sequence[tf.Tensor], gradient: tf.Tensor, rate: tf.Tensor, _: tf.Tensor
    ) -> list[tf.Tensor]:
        change, accumulator = rowwise_step(values[1], gradient, rate, config["epsilon"])
        return [ops.subtract(values[0], change), accumulator]

    slot = RowSlot("row_accumulator", config["initial_accumulator_value"], width=1)
    return RowOptimizer((slot,), step)


_MAKERS: dict[str, Callable[[dict[str, Any]], RowOptimizer]] = {
    "SGD": _sgd,
    "Adagrad": _adagrad,
    "RowwiseAdagrad": _rowwise_adagrad,
    "Adam": _adam,
    "AdamW": _adam,
    "RMSprop": _rmsprop,
    "Ftrl": _ftrl,
}

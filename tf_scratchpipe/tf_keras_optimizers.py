"""Optimizers of tf_keras, as row optimizers.

Rows move by the formulas of `row_optimizers`, which are those of Keras 3. For SGD, Adagrad and Adam
tf_keras has the same ones, to the place of epsilon: Adagrad divides by `sqrt(accumulator +
epsilon)`, Adam by `sqrt(velocity) + epsilon`. What differs is which rows move. tf_keras decays the
momentum of SGD and the moments of Adam in all rows at every step, and goes on moving them; here a
row that a batch does not look up rests (the *lazy* variant). With SGD without momentum and with
Adagrad both are the same.

RMSprop of tf_keras multiplies by `rsqrt(x)`, that of Keras 3 divides by `sqrt(x)`: there is a
difference in the last bit.

The `legacy` optimizers of tf_keras have other formulas (Adagrad divides by `sqrt(accumulator) +
epsilon`) in fused ops of their own, and are refused.
"""

from typing import Any

import keras
import tensorflow as tf
import tf_keras

from tf_scratchpipe import tf_keras_internals
from tf_scratchpipe.row_optimizers import refuse_settings, row_optimizer

_UNKNOWN = ("jit_compile", "is_legacy_optimizer")
"""Settings that Keras 3 does not have, or means otherwise."""
_CARRIED_OUT = ("clipnorm", "clipvalue", "global_clipnorm")
"""Settings of a model's optimizer that it has carried out when a gradient reaches a weight."""


class LiveRate(keras.optimizers.schedules.LearningRateSchedule):
    """The learning rate of a tf_keras optimizer, whatever it is at a step.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def __call__(self, step: Any) -> Any:
        """The rate."""
        return tf_keras_internals.learning_rate_at(self.optimizer, step)

    def get_config(self) -> dict[str, Any]:
        """Nothing: it is saved with the optimizer."""
        return {}


def twin(optimizer: Any, of_model: bool) -> keras.optimizers.Optimizer:
    """The Keras 3 optimizer with the class, settings and live learning rate of a tf_keras one.

    Args:
        optimizer: The optimizer.
        of_model: Whether it is the model's, which counts the steps and has clipped the gradients.

    Raises:
        ValueError: Rows cannot be trained by it.
    """
    kind: Any = getattr(keras.optimizers, type(optimizer).__name__, None)
    ours = type(optimizer).__module__.startswith("tf_keras.")
    if kind is None or not ours or isinstance(optimizer, tf_keras.optimizers.legacy.Optimizer):
        row_optimizer(optimizer)  # Says which ones there are.
    if getattr(optimizer, "adaptive_epsilon", False):
        raise ValueError(
            "A ScratchPipeEmbedding cannot keep adaptive_epsilon=True of optimizer "
            f"'{type(optimizer).__name__}'. Leave this setting out."
        )
    left_out = (*_UNKNOWN, *_CARRIED_OUT) if of_model else _UNKNOWN
    with tf.init_scope():  # The config holds the learning rate's value.
        config = {k: v for k, v in optimizer.get_config().items() if k not in left_out}
        made = kind(**{**config, "learning_rate": LiveRate(optimizer)})
    if of_model:
        tf_keras_internals.count_steps_with(made, optimizer)
    return made


def original(optimizer: Any) -> Any:
    """The tf_keras optimizer that a twin was made of; any other optimizer itself."""
    rate = tf_keras_internals.rate_of(optimizer)
    return rate.optimizer if isinstance(rate, LiveRate) else optimizer


def refuse(layer: str, optimizers: list[Any]) -> None:
    """Raise `ValueError` if these optimizers, the innermost first, may not train a layer's rows."""
    for optimizer in optimizers:
        if isinstance(optimizer, tf_keras.mixed_precision.LossScaleOptimizer):
            raise ValueError(
                f"Layer '{layer}' cannot be trained under a LossScaleOptimizer. Use dtype policy "
                "'mixed_bfloat16' or 'float32', without loss scaling."
            )
    applying = optimizers[0]
    if isinstance(applying, tf_keras.optimizers.legacy.Optimizer):
        name = type(applying).__name__
        raise ValueError(
            f"Layer '{layer}' cannot be trained by the legacy optimizer '{name}': it would move "
            f"the rows in an op of its own. Use `tf_keras.optimizers.{name}`, not "
            f"`tf_keras.optimizers.legacy.{name}`."
        )
    refuse_settings(applying, ("use_ema",))

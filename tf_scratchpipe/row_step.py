"""What the optimizers around a step say about the rows' part in it."""

import dataclasses
from typing import Any

import tensorflow as tf
from keras import ops


@dataclasses.dataclass(frozen=True, slots=True)
class RowStep:
    """How gradients of rows become a step."""

    scales: tuple[Any, ...] = ()
    """What the loss was multiplied by, the outermost optimizer's first: scalars or tensors."""
    period: int = 1
    """The gradients of so many steps are averaged and applied in the last."""
    done: tf.Tensor | None = None
    """Number of steps done, by which the optimizer finds the last. None: the table's own count."""
    decays: bool = True
    """Whether the row optimizer's weight decay is for the table."""

    def unscaled(self, gradients: tf.Tensor) -> tf.Tensor:
        """Gradients of the loss as it was before it was scaled."""
        result = gradients
        for scale in self.scales:
            result = tf.cast(ops.divide(result, scale), gradients.dtype)
        return result


PLAIN = RowStep()
"""Nothing is said."""

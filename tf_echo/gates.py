"""Let tensors of the forward pass be read late.

A copy of an op is merged back into the original by Grappler and by XLA unless its *data* depends on
something that is there late: a gradient.
"""

import math
from collections.abc import Sequence

import tensorflow as tf


class Gate:
    """Hands on tensors unchanged, bit by bit, but not before a gradient is there.

    Args:
        gradient: any tensor of numbers, whatever it holds, and however many of them.
        waits: operations that must have run besides.
    """

    def __init__(self, gradient: tf.Tensor, waits: Sequence[tf.Operation] = ()):
        self._gradient, self._waits = gradient, waits
        self._late: dict[tf.DType, tf.Tensor] = {}

    def tie(self, source: tf.Tensor) -> tf.Tensor:
        """The tensor, late."""
        late = self._zero(source.dtype)
        if source.dtype == tf.bool:
            return tf.raw_ops.LogicalOr(x=source, y=late)
        return tf.raw_ops.AddV2(x=source, y=late)

    def _zero(self, dtype: tf.DType) -> tf.Tensor:
        """False, 0 or -0.0 (x + -0.0 is x, also for x = -0.0), computed from the gradient."""
        if tf.bool not in self._late:
            self._late[tf.bool] = self._never()
        if dtype not in self._late:
            zero = -0.0 if dtype.is_floating else 0
            one = tf.constant(1, dtype)
            self._late[dtype] = tf.raw_ops.SelectV2(
                condition=self._late[tf.bool], t=one, e=tf.constant(zero, dtype)
            )
        return self._late[dtype]

    def _never(self) -> tf.Tensor:
        """False, whatever one element of the gradient is."""
        with tf.control_dependencies(list(self._waits)):
            highest = tf.reduce_max(tf.reshape(self._gradient, [-1])[:1])
        return tf.raw_ops.Greater(x=highest, y=tf.constant(math.inf, self._gradient.dtype))

"""The mask of ids where 0 is a padding, plain or planned."""

from typing import Any

import keras
import tensorflow as tf

from tf_scratchpipe.codes import HIGHEST, LOWEST


@keras.saving.register_keras_serializable("tf_scratchpipe")
class Unmasked(keras.Operation):
    """From ids, plain or planned, to a mask: not 0.

    Args:
        slot_bits: Bits of a code that hold the slot.
    """

    def __init__(self, slot_bits: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.slot_bits = slot_bits

    def call(self, ids: Any) -> tf.Tensor:
        """The mask."""
        return unmasked(tf.convert_to_tensor(ids), self.slot_bits)

    def compute_output_spec(self, ids: Any) -> keras.KerasTensor:
        """Its shape."""
        return keras.KerasTensor(ids.shape, dtype="bool")


def unmasked(ids: tf.Tensor, slot_bits: int) -> tf.Tensor:
    """Mask over ids, plain or planned: not 0."""
    if ids.dtype not in (tf.int32, tf.int64):
        return tf.not_equal(ids, tf.cast(0, ids.dtype))
    zero_bit = tf.bitwise.right_shift(tf.cast(ids, tf.int64) - LOWEST, slot_bits) & 1
    return tf.where(ids < HIGHEST, zero_bit == 0, ids != 0)

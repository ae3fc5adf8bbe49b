"""The Storage: cached rows on the device (ScratchPipe, section IV-D).

One variable for the rows and one for each optimizer slot, as wide as a row or narrower. They are
only ever gathered from and scattered to: anything that reads a variable as a whole makes the next
scatter copy it. Their first dimension may grow, which does copy, and needs no new trace.
"""

from collections.abc import Sequence

import tensorflow as tf

from tf_scratchpipe.plan import Ints, Rows


class Storage:
    """Slots on one device.

    Args:
        dim: Values in a row.
        dtype: Their dtype.
        device: Name of the device.
        name: Name of the variables.
    """

    def __init__(self, dim: int, dtype: str, device: str, name: str) -> None:
        self.device = device
        self.slots = 0
        self._widths = [dim]
        self._dtype = dtype
        self._name = name
        self.variables = [self._variable(0, dim)]

    def set_widths(self, widths: Sequence[int]) -> None:
        """Have variables of these widths: for the rows, and for the optimizer slots, then zero."""
        if list(widths) != self._widths:
            self._widths = list(widths)
            slots = [self._variable(i, width) for i, width in enumerate(widths) if i]
            self.variables = self.variables[:1] + slots
        with tf.device(self.device):
            for variable, width in zip(self.variables[1:], self._widths[1:], strict=True):
                variable.assign(tf.zeros((self.slots, width), self._dtype))

    def clear(self) -> None:
        """Drop all slots."""
        self.slots = 0

    def grow(self, slots: int) -> None:
        """Add slots, up to `slots` in all. Nothing else may use the storage meanwhile."""
        with tf.device(self.device):
            for variable, width in zip(self.variables, self._widths, strict=True):
                added = tf.zeros((slots - self.slots, width), self._dtype)
                # Without old slots there is nothing to copy. An earlier attempt may have failed
                # halfway.
                old = variable[: self.slots] if self.slots else None
                variable.assign(added if old is None else tf.concat([old, added], axis=0))
        self.slots = slots

    def gather(self, slots: Ints | tf.Tensor) -> list[tf.Tensor]:
        """The rows in `slots`, from each variable."""
        with tf.device(self.device):
            return [gathered(variable, slots) for variable in self.variables]

    def scatter(
        self, slots: Ints | tf.Tensor, rows: Sequence[tf.Tensor | Rows]
    ) -> list[tf.Operation]:
        """Overwrite the rows in `slots`, each named once, in each variable."""
        with tf.device(self.device):
            return [
                scattered(variable, slots, values)
                for variable, values in zip(self.variables, rows, strict=True)
            ]

    def to_device(self, rows: Sequence[Rows]) -> list[tf.Tensor]:
        """Copies of host rows on the storage's device."""
        with tf.device(self.device):
            return [tf.constant(values) for values in rows]

    def _variable(self, number: int, width: int) -> tf.Variable:
        with tf.device(self.device):
            return tf.Variable(
                tf.zeros((0, width), self._dtype),
                shape=tf.TensorShape([None, width]),
                trainable=False,
                name=f"{self._name}_storage_{number}" if number else f"{self._name}_storage",
            )


def gathered(variable: tf.Variable, slots: Ints | tf.Tensor) -> tf.Tensor:
    """Rows of a variable. `tf.gather` does the same with several times the work in Python."""
    rows = tf.raw_ops.ResourceGather(
        resource=variable.handle, indices=slots, dtype=variable.dtype, validate_indices=True
    )
    rows.set_shape([None, *variable.shape[1:]])
    return rows


def scattered(
    variable: tf.Variable, slots: Ints | tf.Tensor, rows: tf.Tensor | Rows
) -> tf.Operation:
    """Overwrite rows of a variable, each named once."""
    return tf.raw_ops.ResourceScatterUpdate(resource=variable.handle, indices=slots, updates=rows)


def default_device() -> str:
    """The first GPU if there is one, otherwise the CPU."""
    gpus = tf.config.list_logical_devices("GPU")
    return str(gpus[0].name) if gpus else HOST_DEVICE


HOST_DEVICE = "/device:CPU:0"
"""Where host tables, ids and counters are."""

"""The one weight that Keras sees of a table.

Keras asks a model's weights for gradients, hands these to the optimizer, counts, saves and restores
weights. The table itself is spread over host memory and the device, so this variable stands for it:
it has the table's shape, its `numpy()` is the table, assigning to it sets the table. Its own value,
to which the tape attaches the gradient, is a scalar that nobody uses.

The optimizer overwrites a variable that asks for it with its gradient at the moment when the step
is really applied, after the variable has been taken out of clipping, weight decay and the like.
This one then passes the gradient (row gradients with their slots) on to the layer, which moves the
rows.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_scratchpipe import keras_internals
from tf_scratchpipe.plan import Rows


class TableVariable(keras.Variable):
    """A weight that stands for a table.

    Args:
        shape: Rows and values in a row.
        dtype: Their dtype.
        name: Name of the weight.
        trainable: Whether the table is trained.
        read: Gives the whole table.
        write: Sets the whole table.
        update: Moves the rows by their gradients.
        skip: Told of gradients whose step is not applied.
        touched: Called when Keras takes the variable up, to say whether it may.
        to_tensors: Gives what tf.train.Checkpoint saves.
        from_tensors: Takes it over.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: str,
        name: str,
        trainable: bool,
        *,
        read: Callable[[], Rows],
        write: Callable[[Rows], None],
        update: Callable[[tf.IndexedSlices], None],
        skip: Callable[[tf.IndexedSlices], None],
        touched: Callable[[], object],
        to_tensors: Callable[[], dict[str, tf.Tensor]],
        from_tensors: Callable[[dict[str, tf.Tensor]], None],
    ) -> None:
        super().__init__("zeros", shape=shape, dtype=dtype, trainable=trainable, name=name)
        self.overwrite_with_gradient = True
        self._read = read
        self._write = write
        self._update = update
        self._skip = skip
        self._touched = touched
        self._to_tensors = to_tensors
        self._from_tensors = from_tensors

    stands_for_table = True

    @property
    def trap(self) -> tf.Variable:
        """The scalar to which a tape attaches the gradient."""
        return self._value

    @property
    def value(self) -> tf.Variable:
        """The same, for Keras."""
        if hasattr(self, "_touched"):  # It is not being made.
            self._touched()
        return self._value

    def assign(self, value: Any) -> None:
        """Set the table, or move its rows if this is the gradient."""
        if isinstance(value, tf.IndexedSlices):
            self._update(value)
            return
        if tf.is_tensor(value) and not tf.executing_eagerly():
            raise ValueError(
                f"Weight '{self.path}' stands for a table that is not a tensor. Received: a "
                "symbolic value, as a loop, a constraint or an average of weights would assign. "
                "Use the layer in the step itself, once or several times, or set the table from "
                "outside a graph by `layer.set_table(values)`."
            )
        self._write(np.asarray(value))

    def skip(self, gradients: tf.IndexedSlices) -> None:
        """Note that the optimizer throws these gradients away."""
        self._skip(gradients)

    def assign_add(self, value: Any) -> None:
        """Refused: the rows are trained by their own optimizer."""
        raise ValueError(self._refusal("added to"))

    def assign_sub(self, value: Any) -> None:
        """Refused: the rows are trained by their own optimizer."""
        raise ValueError(self._refusal("subtracted from"))

    def numpy(self) -> Rows:
        """The whole table, as it is trained."""
        return self._read()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Rows:
        return np.asarray(self._read(), dtype)

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        raise ValueError(self._refusal("read as a tensor in"))

    def __getitem__(self, index: Any) -> Any:
        return self._read()[index]

    def __repr__(self) -> str:
        return f"<TableVariable path={self.path}, shape={self.shape}, dtype={self.dtype}>"

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        if keras_internals.export_archive() is not None:
            # The exported graph reads a copy of the table; of this nothing but the scalar goes in.
            scalar: dict[str, tf.Tensor] = self._value._serialize_to_tensors()
            return scalar
        return self._to_tensors()

    def _restore_from_tensors(self, restored_tensors: dict[str, tf.Tensor]) -> dict[str, Any]:
        self._from_tensors(restored_tensors)
        return {}

    def _copy_trackable_to_cpu(self, object_map: Any) -> None:
        # TensorFlow would skip what says that it is not implemented.
        raise ValueError(
            f"Weight '{self.path}' stands for a table that cannot be saved while it is trained. "
            "Use tf.train.Checkpoint without asynchronous saving."
        )

    def _initialize_with_initializer(self, initializer: Any) -> None:
        # Not the table: a scalar for the tape to hold on to.
        # Always watched, so that a layer may be frozen and thawed.
        self._value = tf.Variable(0.0, trainable=True, dtype=self._dtype, name=self.name)

    def _refusal(self, action: str) -> str:
        return (
            f"Weight '{self.path}' stands for a table that is not a tensor; it cannot be {action} "
            "a computation. Call the layer to look rows up; `layer.get_table()` and "
            "`layer.set_table(values)` copy the whole table."
        )


def _refused(name: str) -> Callable[..., Any]:
    def operator(self: TableVariable, *_: Any) -> Any:
        raise ValueError(self._refusal("read as a tensor in"))

    operator.__name__ = name
    operator.__doc__ = "Refused: the table is not a tensor."
    return operator


# Keras computes with a variable's value, which stands for nothing here.
for _name in """
    add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow matmul rmatmul
    neg pos abs lt le gt ge
""".split():
    setattr(TableVariable, f"__{_name}__", _refused(_name))

"""Adagrad with one accumulator for each row, as embedding tables are often trained.

The accumulator is that of FBGEMM's and DLRM's row-wise Adagrad: the mean over the row of the
squared gradient, added up over the steps. It takes 4 bytes a row in the place of 4 for each value.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import ops


def rowwise_step(accumulator: Any, gradient: Any, rate: Any, epsilon: float) -> tuple[Any, Any]:
    """What to take off the rows, and their new accumulators of width 1."""
    mean = ops.mean(ops.square(gradient), axis=-1, keepdims=True)
    accumulator = ops.add(accumulator, mean)
    root = ops.add(ops.sqrt(accumulator), epsilon)
    return ops.divide(ops.multiply(rate, gradient), root), accumulator


@keras.saving.register_keras_serializable("tf_scratchpipe")
class RowwiseAdagrad(keras.optimizers.Optimizer):
    """Adagrad that adapts the learning rate to each row, not to each value of it.

    With `g` the gradient of a row and `a` the row's accumulator:

    ```
    a   += mean(g ** 2)
    row -= learning_rate * g / (sqrt(a) + epsilon)
    ```

    An embedding's optimizer state is then a single number for each row. Rows whose gradient is zero
    stay as they are, so that an embedding that trains only the rows it looks up is trained exactly
    as if the whole table was. Of other weights a "row" is what lies along the last axis: of a dense
    layer's kernel the weights of one input, of a bias all of it.

    ```python
    items = tf_scratchpipe.ScratchPipeEmbedding(
        10_000_000, 64, optimizer=tf_scratchpipe.RowwiseAdagrad(0.05), name="items"
    )
    model.compile(tf_scratchpipe.RowwiseAdagrad(0.05), "mse")  # or for the whole model
    ```

    Args:
        learning_rate: A float, a `keras.optimizers.schedules.LearningRateSchedule`, or a callable
            that takes no arguments.
        initial_accumulator_value: What accumulators are to begin with, zero or positive.
        epsilon: Added to the root of the accumulator.
        name: Name of the optimizer.
        **kwargs: Other arguments of `keras.optimizers.Optimizer`.

    Raises:
        ValueError: `initial_accumulator_value` is negative.
    """

    def __init__(
        self,
        learning_rate: Any = 0.01,
        initial_accumulator_value: float = 0.0,
        epsilon: float = 1e-8,
        name: str = "rowwise_adagrad",
        **kwargs: Any,
    ) -> None:
        if initial_accumulator_value < 0:
            raise ValueError(
                "`initial_accumulator_value` must be zero or positive. Received: "
                f"initial_accumulator_value={initial_accumulator_value}"
            )
        super().__init__(learning_rate=learning_rate, name=name, **kwargs)
        self.initial_accumulator_value = initial_accumulator_value
        self.epsilon = epsilon

    def build(self, var_list: Sequence[Any]) -> None:
        """Create the accumulators."""
        if self.built:
            return
        super().build(var_list)
        self._accumulators = [self._accumulator(variable) for variable in var_list]

    def _accumulator(self, variable: Any) -> keras.Variable | None:
        if getattr(variable, "overwrite_with_gradient", False):
            return None  # Not this optimizer's to move.
        path = getattr(variable, "path", variable.name).replace("/", "_").replace(":", "_")
        return self.add_variable(
            shape=(*variable.shape[:-1], 1) if len(variable.shape) else (),
            initializer=keras.initializers.Constant(self.initial_accumulator_value),
            dtype=variable.dtype,
            name=f"{path}_row_accumulator",
        )

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update one variable."""
        rate = ops.cast(learning_rate, variable.dtype)
        # Slices are added up row by row: each row takes one step.
        gradient = ops.cast(tf.convert_to_tensor(gradient), variable.dtype)
        accumulator = self._accumulators[self._get_variable_index(variable)]
        if not len(variable.shape):  # A row of one value.
            gradient = ops.reshape(gradient, (1,))
        change, new = rowwise_step(accumulator, gradient, rate, self.epsilon)
        self.assign(accumulator, ops.reshape(new, accumulator.shape))
        self.assign_sub(variable, ops.reshape(change, variable.shape))

    def get_config(self) -> dict[str, Any]:
        """The arguments."""
        config = dict(super().get_config())
        config.update(
            initial_accumulator_value=self.initial_accumulator_value, epsilon=self.epsilon
        )
        return config

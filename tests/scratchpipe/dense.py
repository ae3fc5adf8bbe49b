"""The same model with the whole table as a weight, trained by Keras' own dense optimizer.

Its gradient is dense, each row's once, as a product with one-hot ids would give it: Keras itself
never adds the gradients of equal ids up.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_scratchpipe import ScratchPipeEmbedding, lookahead

ROWS, DIM, LOOKUPS, BATCH = 300, 4, 3, 16
Make = Callable[[], keras.optimizers.Optimizer]


def start() -> keras.Initializer:
    return keras.initializers.RandomUniform(seed=3)


def data(batches: int, rows: int = ROWS, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Ids with duplicates in every batch, and targets."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, rows, (batches * BATCH, LOOKUPS)).astype("int32")
    ids[:, 0] = ids[:, 1]
    return ids, rng.random((batches * BATCH, 1)).astype("float32")


def every_row(batches: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Batches that look all rows up, in their order."""
    ids, targets = data(batches, rows)
    ids = ids.reshape(batches, -1)
    ids[:, :rows] = np.arange(rows)
    return ids.reshape(-1, LOOKUPS), targets


def dataset(*arrays: Any) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(arrays).batch(BATCH)


@tf.custom_gradient
def _gathered(table: tf.Tensor, ids: tf.Tensor) -> Any:
    def gradient(upstream: tf.Tensor) -> tuple[tf.Tensor, None]:
        flat = tf.reshape(upstream, [-1, table.shape[1]])
        return tf.math.unsorted_segment_sum(flat, tf.reshape(ids, [-1]), table.shape[0]), None

    return tf.gather(table, ids), gradient


class DenseTable(keras.layers.Layer):
    """Looks rows of a weight up, and sums them unless `combiner` is None."""

    def __init__(self, rows: int = ROWS, combiner: str | None = "sum", **settings: Any) -> None:
        super().__init__(name="table", autocast=False, **settings)
        self.rows = rows
        self.combiner = combiner

    def build(self, _: Any) -> None:
        self.embeddings = self.add_weight(
            name="embeddings", shape=(self.rows, DIM), initializer=start()
        )
        # In a call Keras would cast the whole table, and gradients would be summed in float16.
        self.variable = self.embeddings.value

    def call(self, ids: tf.Tensor) -> tf.Tensor:
        rows = _gathered(tf.convert_to_tensor(self.variable), ids)
        rows = tf.cast(rows, self.compute_dtype)
        return rows if self.combiner is None else tf.reduce_sum(rows, axis=-2)


def around(layer: keras.Layer, optimizer: keras.optimizers.Optimizer, **compiling: Any) -> Any:
    """A model around one of the layers."""
    inputs = keras.Input((LOOKUPS,), dtype="int32", name="ids")
    kernel = keras.initializers.GlorotUniform(seed=1)
    output = keras.layers.Dense(1, kernel_initializer=kernel, dtype=layer.dtype_policy)
    rows = layer(inputs)
    pooled = keras.ops.sum(rows, axis=1) if layer.combiner is None else rows
    model = keras.Model(inputs, output(pooled))
    model.compile(optimizer, "mse", **compiling)
    return model


def cached(rows: int = ROWS, **settings: Any) -> ScratchPipeEmbedding:
    settings = {"combiner": "sum", "embeddings_initializer": start(), **settings}
    return ScratchPipeEmbedding(rows, DIM, name="table", **settings)


def train_dense(make: Make, train: tf.data.Dataset, **fitting: Any) -> list[np.ndarray]:
    """Table, kernel, bias after training with the whole table."""
    compiling = {"run_eagerly": fitting.pop("run_eagerly", False)}
    settings = {key: fitting.pop(key) for key in ("rows", "dtype", "combiner") if key in fitting}
    model = around(DenseTable(**settings), make(), **compiling)
    model.fit(train, verbose=0, **fitting)
    return model.get_weights()


def train_cached(
    make: Make, train: tf.data.Dataset, layer: ScratchPipeEmbedding, **fitting: Any
) -> tuple[list[np.ndarray], keras.Model]:
    """The same after training with the layer under test, and its model."""
    model = around(layer, make(), run_eagerly=fitting.pop("run_eagerly", False))
    debug = layer.mode == "pipelined"
    model.fit(train.apply(lookahead(model, debug=debug)), verbose=0, **fitting)
    return [layer.get_table(), *model.get_weights()[1:]], model


def assert_equal(mine: list[np.ndarray], theirs: list[np.ndarray]) -> None:
    """Bit by bit, and not all zero."""
    for one, other in zip(mine, theirs, strict=True):
        np.testing.assert_array_equal(one, other)
        assert np.any(one)

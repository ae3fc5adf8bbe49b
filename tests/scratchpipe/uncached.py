"""What training without a cache gives: by the same row formulas, and by numpy alone."""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_scratchpipe import RowwiseAdagrad, ScratchPipeEmbedding
from tf_scratchpipe.row_optimizers import RowOptimizer, row_optimizer

ROWS, DIM, LOOKUPS, BATCH = 5000, 4, 4, 32

OPTIMIZERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "sgd": lambda: keras.optimizers.SGD(0.5),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "nesterov": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "adam": lambda: keras.optimizers.Adam(0.01, epsilon=1e-4),
    "amsgrad": lambda: keras.optimizers.Adam(0.01, epsilon=1e-4, amsgrad=True),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, epsilon=1e-4),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01, epsilon=1e-4),
    "centered": lambda: keras.optimizers.RMSprop(
        0.01, rho=0.8, momentum=0.7, epsilon=1e-3, centered=True
    ),
    "ftrl": lambda: keras.optimizers.Ftrl(
        0.1,
        l1_regularization_strength=1e-4,
        l2_regularization_strength=1e-3,
        l2_shrinkage_regularization_strength=1e-3,
        beta=0.1,
    ),
    "rowwise": lambda: RowwiseAdagrad(0.05, initial_accumulator_value=0.1),
    "schedule": lambda: keras.optimizers.Adagrad(
        keras.optimizers.schedules.ExponentialDecay(0.1, 50, 0.5)
    ),
}


def data(batches: int = 150, seed: int = 0, rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    """Ids with duplicates in every batch, and targets; the last batch is not full."""
    rng = np.random.default_rng(seed)
    count = batches * BATCH - BATCH // 3
    ids = (rng.zipf(1.1, (count, LOOKUPS)) - 1) % rows
    ids[:, 0] = ids[:, 1]
    return ids.astype("int32"), rng.random((count, 1)).astype("float32")


def dataset(ids: np.ndarray, targets: np.ndarray) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((ids, targets)).batch(BATCH)


def initializer() -> keras.Initializer:
    return keras.initializers.RandomUniform(seed=3)


def cached_model(
    optimizer: str, compiling: dict[str, Any] | None = None, **settings: Any
) -> tuple[keras.Model, ScratchPipeEmbedding]:
    """A small model with the layer under test."""
    settings = {"combiner": "sum", "embeddings_initializer": initializer(), **settings}
    layer = ScratchPipeEmbedding(ROWS, DIM, name="table", **settings)
    model = _around(layer, keras.Model)
    model.compile(OPTIMIZERS[optimizer](), "mse", **(compiling or {}))
    return model, layer


def _around(layer: Callable[[Any], Any], kind: type[keras.Model]) -> keras.Model:
    inputs = keras.Input((LOOKUPS,), dtype="int32", name="ids")
    kernel = keras.initializers.GlorotUniform(seed=1)
    return kind(inputs, keras.layers.Dense(1, kernel_initializer=kernel)(layer(inputs)))


def train_step(model: keras.Model) -> Callable[..., None]:
    """A step of a custom loop, as a function to be traced."""

    @tf.function
    def step(ids: tf.Tensor, targets: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(ids, training=True) - targets))
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply(gradients, model.trainable_variables)

    return step


def storages(layer: ScratchPipeEmbedding) -> list[Any]:
    """All that holds rows of a layer's table for a step, on the device and on the host."""
    rows = layer.engine.rows
    return [rows.storage] if hasattr(rows, "storage") else [rows._hot, rows._cold]


class WholeTable(keras.layers.Layer):
    """The whole table as one variable, from which rows are gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.table = self.add_weight(shape=(ROWS, DIM), initializer=initializer())

    def call(self, ids: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.gather(self.table.value, ids), axis=-2)


class Uncached(keras.Model):
    """Adds the gradients of equal ids up and moves each row once, by the row formulas."""

    formula: RowOptimizer
    slots: list[tf.Variable]

    def train_step(self, batch: Any) -> dict[str, Any]:
        ids, targets = batch
        table, *dense = self.trainable_variables
        with tf.GradientTape() as tape:
            outputs = self(ids, training=True)
            loss = self.compute_loss(ids, targets, outputs)
            self._loss_tracker.update_state(loss, sample_weight=tf.shape(ids)[0])
        sparse, *gradients = tape.gradient(loss, [table, *dense])
        rows, place = tf.unique(tf.reshape(sparse.indices, [-1]))
        summed = tf.math.unsorted_segment_sum(
            tf.reshape(sparse.values, [-1, DIM]), place, tf.size(rows)
        )
        variables = [table.value, *self.slots]
        rate = keras.ops.cast(self.optimizer.learning_rate, "float32")
        number = keras.ops.cast(self.optimizer.iterations + 1, "float32")
        values = [tf.gather(v, rows) for v in variables]
        if self.optimizer.weight_decay:
            values[0] = values[0] - values[0] * self.optimizer.weight_decay * rate
        new = self.formula.step(values, summed, rate, number)
        for variable, values in zip(variables, new, strict=True):
            variable.scatter_update(tf.IndexedSlices(values, rows))
        self.optimizer.apply(gradients, dense)
        return self.compute_metrics(ids, targets, outputs)


@dataclasses.dataclass(frozen=True)
class Trained:
    """What training left behind."""

    tables: list[np.ndarray]
    """The table and its optimizer slots."""
    dense: list[np.ndarray]
    history: dict[str, list[float]]


def uncached_model(
    optimizer: str, compiling: dict[str, Any] | None = None
) -> tuple[Uncached, WholeTable]:
    """The same model with the whole table as a variable."""
    layer = WholeTable()
    model = _around(layer, Uncached)
    instance = OPTIMIZERS[optimizer]()
    model.compile(instance, "mse", **(compiling or {}))
    model.formula = row_optimizer(instance)
    model.slots = [
        tf.Variable(tf.fill((ROWS, slot.width_for(DIM)), slot.initial))
        for slot in model.formula.slots
    ]
    instance.build(model.trainable_variables[1:])
    return model, layer


def uncached_outcome(model: Uncached, layer: WholeTable, history: dict[str, Any]) -> Trained:
    """What training it left behind."""
    tables = [layer.table.numpy(), *(slot.numpy() for slot in model.slots)]
    return Trained(tables, model.get_weights()[1:], history)


def train_uncached(optimizer: str, compiling: dict[str, Any], **fitting: Any) -> Trained:
    """Train the same model with the whole table as a variable."""
    model, layer = uncached_model(optimizer, compiling)
    history = model.fit(**fitting).history
    return uncached_outcome(model, layer, history)


def outcome(model: keras.Model, layer: ScratchPipeEmbedding, history: dict[str, Any]) -> Trained:
    """What training with the layer left behind."""
    engine = layer.engine
    tables = [engine.get(number) for number in range(len(engine.rows.slot_names) + 1)]
    return Trained(tables, model.get_weights()[1:], history)


def assert_same(one: Trained, other: Trained) -> None:
    """Bit by bit."""
    assert one.history == other.history
    for mine, theirs in zip(one.dense + one.tables, other.dense + other.tables, strict=True):
        np.testing.assert_array_equal(mine, theirs)


# ---- without TensorFlow -----------------------------------------------------------------------


def numpy_step(optimizer: str) -> Callable[..., list[np.ndarray]]:
    """One step on rows in float64: values, gradient and number of the step to new values."""

    def sgd(values: list[np.ndarray], gradient: np.ndarray, _: int) -> list[np.ndarray]:
        return [values[0] - 0.5 * gradient]

    def momentum(values: list[np.ndarray], gradient: np.ndarray, _: int) -> list[np.ndarray]:
        moment = 0.9 * values[1] - 0.05 * gradient
        return [values[0] + moment, moment]

    def nesterov(values: list[np.ndarray], gradient: np.ndarray, _: int) -> list[np.ndarray]:
        moment = 0.9 * values[1] - 0.05 * gradient
        return [values[0] + 0.9 * moment - 0.05 * gradient, moment]

    def adagrad(values: list[np.ndarray], gradient: np.ndarray, _: int) -> list[np.ndarray]:
        total = values[1] + gradient**2
        return [values[0] - 0.1 * gradient / np.sqrt(total + 1e-7), total]

    def schedule(values: list[np.ndarray], gradient: np.ndarray, n: int) -> list[np.ndarray]:
        total = values[1] + gradient**2
        rate = 0.1 * 0.5 ** ((n - 1) / 50)
        return [values[0] - rate * gradient / np.sqrt(total + 1e-7), total]

    def adam(values: list[np.ndarray], gradient: np.ndarray, n: int) -> list[np.ndarray]:
        first = 0.9 * values[1] + 0.1 * gradient
        second = 0.999 * values[2] + 0.001 * gradient**2
        rate = 0.01 * np.sqrt(1 - 0.999**n) / (1 - 0.9**n)
        highest = np.maximum(values[3], second) if len(values) > 3 else second
        row = values[0] - rate * first / (np.sqrt(highest) + 1e-4)
        return [row, first, second, highest][: len(values)]

    def adamw(values: list[np.ndarray], gradient: np.ndarray, n: int) -> list[np.ndarray]:
        return adam([values[0] - values[0] * 0.1 * 0.01, *values[1:]], gradient, n)

    def rmsprop(values: list[np.ndarray], gradient: np.ndarray, _: int) -> list[np.ndarray]:
        second = 0.9 * values[1] + 0.1 * gradient**2
        return [values[0] - 0.01 * gradient / np.sqrt(second + 1e-4), second]

    def centered(values: list[np.ndarray], gradient: np.ndarray, _: int) -> list[np.ndarray]:
        row, second, moment, first = values
        second = 0.8 * second + 0.2 * gradient**2
        first = 0.8 * first + 0.2 * gradient
        moment = 0.7 * moment + 0.01 * gradient / np.sqrt(second - first**2 + 1e-3)
        return [row - moment, second, moment, first]

    def ftrl(values: list[np.ndarray], gradient: np.ndarray, _: int) -> list[np.ndarray]:
        row, total, linear = values
        risen = np.sqrt(total + gradient**2) - np.sqrt(total)
        linear = linear + gradient + 2e-3 * row - risen / 0.1 * row
        total = total + gradient**2
        quadratic = np.sqrt(total) / 0.1 + 2 * (1e-3 + 0.1 / 0.2)
        return [(np.clip(linear, -1e-4, 1e-4) - linear) / quadratic, total, linear]

    def rowwise(values: list[np.ndarray], gradient: np.ndarray, _: int) -> list[np.ndarray]:
        total = values[1] + np.mean(gradient**2, axis=-1, keepdims=True)
        return [values[0] - 0.05 * gradient / (np.sqrt(total) + 1e-8), total]

    return locals()["adam" if optimizer == "amsgrad" else optimizer]


FIRST_SLOTS = {
    "sgd": [],
    "momentum": [0.0],
    "nesterov": [0.0],
    "adagrad": [0.1],
    "schedule": [0.1],
    "adam": [0.0, 0.0],
    "amsgrad": [0.0, 0.0, 0.0],
    "adamw": [0.0, 0.0],
    "rmsprop": [0.0],
    "centered": [0.0, 0.0, 0.0],
    "ftrl": [0.1, 0.0],
    "rowwise": [0.1],
}


def _slot_shape(optimizer: str, value: np.ndarray) -> tuple[int, ...]:
    return (*value.shape[:-1], 1) if optimizer == "rowwise" else value.shape


def train_numpy(
    optimizer: str, ids: np.ndarray, targets: np.ndarray, epochs: int, start: list[np.ndarray]
) -> list[np.ndarray]:
    """Train the same model in float64. Returns the table and its slots, kernel, bias."""
    step = numpy_step(optimizer)
    table, kernel, bias = (
        [value.astype(np.float64)]
        + [np.full(_slot_shape(optimizer, value), s) for s in FIRST_SLOTS[optimizer]]
        for value in start
    )
    for number, begin in enumerate(list(range(0, len(ids), BATCH)) * epochs, start=1):
        batch, wanted = ids[begin : begin + BATCH], targets[begin : begin + BATCH]
        pooled = table[0][batch].sum(axis=1)
        error = 2 * (pooled @ kernel[0] + bias[0] - wanted) / len(batch)
        into_rows = np.repeat(error @ kernel[0].T, LOOKUPS, axis=0)
        rows, place = np.unique(batch.ravel(), return_inverse=True)
        summed = np.zeros((rows.size, DIM))
        np.add.at(summed, place, into_rows)
        new = step([part[rows] for part in table], summed, number)
        kernel = step(kernel, pooled.T @ error, number)
        bias = step(bias, error.sum(axis=0), number)
        for part, values in zip(table, new, strict=True):
            part[rows] = values
    return [*table, kernel[0], bias[0]]

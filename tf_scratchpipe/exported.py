"""A trained table outside of training: in a SavedModel, and as a `keras.layers.Embedding`.

A SavedModel is served by processes that have TensorFlow and nothing else. In its graph the table is
a plain variable, and a lookup a gather from it, after a check of the ids that every device obeys.
"""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_scratchpipe.engine import Engine
from tf_scratchpipe.lookup import IdCheck
from tf_scratchpipe.plan import Rows
from tf_scratchpipe.storage import HOST_DEVICE, scattered
from tf_scratchpipe.table_files import chunks
from tf_scratchpipe.trained_state import TrainedState


class ExportedTable:
    """A copy of a table in one variable, and its lookups.

    Args:
        engine: The table.
        check: The check of its ids.
    """

    def __init__(self, engine: Engine, check: IdCheck) -> None:
        state = TrainedState(engine)
        column = state.columns()["table"]
        self._check = check
        with tf.init_scope(), tf.device(HOST_DEVICE):
            self.variable = tf.Variable(
                tf.zeros(column.shape, column.dtype), trainable=False, name=engine.rows.name
            )
            for start, stop in chunks({"table": column}):
                rows = state.read(start, stop)["table"]
                scattered(self.variable, np.arange(start, stop), rows)

    def gather(self, ids: tf.Tensor) -> tf.Tensor:
        """The rows of ids. Wrong ids are `oov_id`, or fail."""
        fine = self._check.fine(ids)
        known = tf.cast(tf.where(fine, ids, tf.zeros_like(ids)), tf.int64)
        if self._check.oov_id is not None:
            known = tf.where(fine, known, tf.constant(self._check.oov_id, tf.int64))
            return tf.gather(self.variable, known)
        message = (  # Without quotes, which TensorFlow would escape.
            f"Layer {self._check.table} got an id that it has no row for. Expected: whole "
            f"numbers from 0 to {self._check.rows - 1}. Received, among others:"
        )
        wrong = tf.boolean_mask(ids, ~fine)
        with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(fine), [message, wrong])]):
            return tf.gather(self.variable, tf.identity(known))


# ---- keras.layers.Embedding -------------------------------------------------------------------


def embedding(table: Rows, config: dict[str, Any], trainable: bool) -> keras.layers.Embedding:
    """A Keras layer with a table.

    Args:
        table: The rows.
        config: The config of a layer of ours.
        trainable: Whether it is trained.

    Raises:
        ValueError: A Keras layer does not do what this config says.
    """
    without = "Leave it out, or make the layer by hand and `set_weights([layer.get_table()])`."
    if config["combiner"] is not None:
        raise ValueError(
            "keras.layers.Embedding does not pool. Received: "
            f"combiner='{config['combiner']}'. To serve the model use `model.export(...)`. To pool "
            "by hand, make a keras.layers.Embedding, `set_weights([layer.get_table()])`, and "
            "reduce its outputs."
        )
    if config["oov_id"] is not None:
        raise ValueError(
            "keras.layers.Embedding has no row for ids that are out of range. Received: "
            f"oov_id={config['oov_id']}. {without}"
        )
    layer = keras.layers.Embedding(
        config["input_dim"],
        config["output_dim"],
        embeddings_initializer=config["embeddings_initializer"],
        mask_zero=config["mask_zero"],
        name=config["name"],
        dtype=config["dtype"],
        trainable=trainable,
    )
    layer.build()
    layer.embeddings.assign(table)
    return layer


def arguments(layer: keras.layers.Embedding) -> dict[str, Any]:
    """The arguments of a layer of ours that does what a Keras layer does.

    Raises:
        ValueError: There is none.
    """
    if not isinstance(layer, keras.layers.Embedding):
        raise TypeError(f"`layer` must be a keras.layers.Embedding. Received: {layer!r}")
    for name in ("embeddings_regularizer", "embeddings_constraint", "lora_rank"):
        if (value := getattr(layer, name, None)) is not None:
            raise ValueError(
                f"ScratchPipeEmbedding does not support `{name}`. Received: {name}={value}. Make "
                "the layer by hand and `set_table(layer.get_weights()[0])`."
            )
    return {
        "input_dim": layer.input_dim,
        "output_dim": layer.output_dim,
        "embeddings_initializer": layer.embeddings_initializer,
        "mask_zero": layer.mask_zero,
        "name": layer.name,
        "dtype": layer.dtype_policy,
        "trainable": layer.trainable,
    }

"""A table's state as tensors, for `tf.train.Checkpoint`.

TensorFlow restores exactly the names that an object would save, so these are always the same,
whether an optimizer is known or not. All columns are in memory at once.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tf_scratchpipe.engine import SLOT_KEY
from tf_scratchpipe.plan import Rows
from tf_scratchpipe.storage import HOST_DEVICE
from tf_scratchpipe.table_files import Column
from tf_scratchpipe.trained_state import TrainedState

MOST_SLOTS = 8
"""Optimizer slots that there are names for."""


def to_tensors(state: TrainedState, counters: Mapping[str, Any]) -> dict[str, tf.Tensor]:
    """The state as tensors. Copies it."""
    columns = state.columns()
    slots = [name for name in columns if name.startswith(SLOT_KEY)]
    if len(slots) > MOST_SLOTS:
        raise ValueError(
            f"tf.train.Checkpoint can save {MOST_SLOTS} optimizer slots of a table. Received: "
            f"{slots}. Save the model by `model.save_weights(...)`."
        )
    with tf.init_scope(), tf.device(HOST_DEVICE):
        nothing = tf.zeros((0,), columns["table"].dtype)
        tensors = {f"slot_{number}": nothing for number in range(MOST_SLOTS)}
        tensors["table"] = tf.constant(state.column("table"))
        for number, name in enumerate(slots):
            tensors[f"slot_{number}"] = tf.constant(state.column(name))
        tensors["slot_names"] = tf.constant(slots, tf.string, (len(slots),))
        # Of either kind there is one at most: the rows whose gradients wait, and the gradients.
        arrays = {name: np.asarray(value) for name, value in counters.items() if np.ndim(value)}
        counters = {name: value for name, value in counters.items() if name not in arrays}
        kinds = {array.dtype.kind in "iu": name for name, array in arrays.items()}
        for key, whole, empty in (
            ("whole_numbers", True, tf.zeros((0,), tf.int64)),
            ("numbers", False, nothing),
        ):
            found = kinds.get(whole)
            tensors[key] = empty if found is None else tf.constant(arrays[found])
            tensors[f"{key}_name"] = tf.constant(found or "")
        tensors["counter_names"] = tf.constant(list(counters), tf.string, (len(counters),))
        values = [int(value) for value in counters.values()]
        tensors["counters"] = tf.constant(values, tf.int64, (len(counters),))
        return tensors


def load_tensors(state: TrainedState, tensors: Mapping[str, tf.Tensor]) -> None:
    """Take over what `to_tensors` gave.

    Raises:
        ValueError: It does not fit. Nothing has changed.
    """
    arrays = {name: np.asarray(tensor) for name, tensor in tensors.items()}
    slots = [name.decode() for name in arrays["slot_names"]]
    values = {name: arrays[f"slot_{number}"] for number, name in enumerate(slots)}
    values["table"] = arrays["table"]
    names = [name.decode() for name in arrays["counter_names"]]
    counters = dict(zip(names, arrays["counters"], strict=True))
    for key in ("whole_numbers", "numbers"):
        if name := arrays[f"{key}_name"].item().decode():
            counters[name] = arrays[key]

    def read(start: int, stop: int) -> dict[str, Rows]:
        return {name: value[start:stop] for name, value in values.items()}

    columns = {name: Column(value.shape, str(value.dtype)) for name, value in values.items()}
    state.overwrite(columns, read, counters)

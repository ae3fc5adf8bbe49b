"""How a layer's table goes into Keras' files.

In a `.weights.h5` file each column of the table is a variable. In a `.keras` archive large tables
are files of their own beside the variables, as `table_files` writes them: Keras would make the
whole file of variables in memory. In their place the variables say `sidecar`.
"""

import pathlib
import shutil
import tempfile
from typing import Any

import numpy as np

from tf_scratchpipe import keras_internals, table_files
from tf_scratchpipe.table_files import chunks
from tf_scratchpipe.trained_state import TrainedState

SIDECAR_BYTES = 2**26
"""Tables with optimizer slots of this size or more are files of their own."""
SIDECAR = "sidecar"


def goes_beside(state: TrainedState) -> bool:
    """Whether the table is saved as files of its own, in what Keras is writing now."""
    size = sum(column.shape[0] * column.row_bytes for column in state.columns().values())
    return size >= SIDECAR_BYTES and keras_internals.assets_archive() is not None


def save_variables(state: TrainedState, counters: dict[str, Any], store: Any) -> None:
    """Save what goes among the variables."""
    if goes_beside(state):
        store[SIDECAR] = np.asarray(table_files.FORMAT)
        return
    columns = state.columns()
    group = keras_internals.h5_group(store)
    if group is None or any(column.dtype == "bfloat16" for column in columns.values()):
        for name in columns:
            store[name] = state.column(name)
    else:
        sets = {n: group.create_dataset(n, c.shape, c.dtype) for n, c in columns.items()}
        for start, stop in chunks(columns):
            for name, rows in state.read(start, stop).items():
                sets[name][start:stop] = rows
    for name, value in counters.items():
        store[name] = value


def load_from_archive(state: TrainedState, store: Any, layer: str) -> None:
    """Load a table that is beside the variables, when Keras loads these alone."""
    found = keras_internals.archived_assets(store)
    if found is None:
        raise ValueError(
            f"The table of layer '{layer}' is not among the saved variables but in files beside "
            "them. Received: the variables alone. Load the whole archive by "
            "`keras.models.load_model('....keras')` or `model.load_weights('....keras')`."
        )
    archive, path = found
    with tempfile.TemporaryDirectory() as directory:
        for member in archive.namelist():
            if member.startswith(path) and "/" not in (name := member.removeprefix(path)):
                with archive.open(member) as source, open(f"{directory}/{name}", "wb") as target:
                    shutil.copyfileobj(source, target, table_files.CHUNK_BYTES)
        state.load(pathlib.Path(directory))

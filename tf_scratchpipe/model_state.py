"""All that training changes of a model, in a directory.

Besides weights and the optimizer these are the tables, metrics in mid-epoch, and the states of
random generators. Keras' own files leave the last out, so that dropout starts anew.
"""

import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_scratchpipe import keras_internals
from tf_scratchpipe.embedding import ScratchPipeEmbedding
from tf_scratchpipe.plan import Rows
from tf_scratchpipe.table_files import TableFiles, checksum, damaged, flush
from tf_scratchpipe.table_variable import TableVariable
from tf_scratchpipe.trained_state import TrainedState

VARIABLES = "variables.bin"
TABLES = "tables"


class ModelState:
    """The state of a compiled model.

    Args:
        model: The model.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model

    def save(self, directory: pathlib.Path) -> dict[str, Any]:
        """Write everything, and return what has to be known to read it."""
        for number, layer in enumerate(self.layers()):
            target = directory / TABLES / str(number)
            target.mkdir(parents=True)
            TrainedState(layer.engine).save(target, sync=True)
        described = []
        path = directory / VARIABLES
        with path.open("wb") as file:
            for variable in self.variables():
                value = np.ascontiguousarray(variable.numpy())
                described.append(_described(variable))
                file.write(value.reshape(-1).view(np.uint8).data)
            flush(file, sync=True)
        return {
            "variables": described,
            "crc32": checksum(path),
            "tables": [layer.name for layer in self.layers()],
        }

    def load(self, directory: pathlib.Path, known: dict[str, Any], spec: Any) -> "DenseState":
        """Take over what `save` wrote.

        Args:
            directory: Where it is.
            known: What `save` returned.
            spec: Of the data, to build what Keras builds with the first batch.

        Returns:
            The part that is not tables, for it to be taken over again.

        Raises:
            ValueError: It is damaged or another model's. Nothing has changed.
        """
        self._build(spec, len(known["variables"]))
        variables = list(self.variables())
        self._check([_described(v) for v in variables], known["variables"])
        layers = self.layers()
        if len(layers) != len(known["tables"]):
            raise _another_model(f"tables {known['tables']}", [layer.name for layer in layers])
        states = [TrainedState(layer.engine) for layer in layers]
        files = [TableFiles(directory / TABLES / str(n)) for n in range(len(states))]
        dense = DenseState(variables, _read(directory / VARIABLES, known))
        for state, saved in zip(states, files, strict=True):
            state.check(saved.columns, exactly=True)
            saved.verify()
        for state, saved in zip(states, files, strict=True):
            state.overwrite(saved.columns, saved.read, saved.counters)
        dense.assign()
        return dense

    def layers(self) -> list[ScratchPipeEmbedding]:
        """The layers with tables, each once."""
        found = keras_internals.sublayers(self._model)
        tables = {id(layer): layer for layer in found if isinstance(layer, ScratchPipeEmbedding)}
        return list(tables.values())

    def variables(self) -> Iterator[Any]:
        """All variables but the tables, each once."""
        own = [layer.row_optimizer() for layer in self.layers()]
        optimizers = [self._model.optimizer, *own]
        everything = [
            *self._model.variables,
            *self._model.metrics_variables,
            *(v for optimizer in optimizers if optimizer is not None for v in optimizer.variables),
        ]
        for variable in {id(variable): variable for variable in everything}.values():
            if not isinstance(variable, TableVariable):
                yield variable

    def _build(self, spec: Any, count: int) -> None:
        """Make the variables that Keras makes when it sees the first batch, if any are missing."""
        if len(list(self.variables())) == count:
            return
        x, y, weights = keras.utils.unpack_x_y_sample_weight(spec)

        def step(x: Any, y: Any, weights: Any) -> Any:
            outputs = self._model(x, training=False)
            self._model.compute_loss(x, y, outputs, weights, training=False)
            return self._model.compute_metrics(x, y, outputs, weights)

        tf.function(step).get_concrete_function(x, y, weights)
        if not self._model.optimizer.built:
            self._model.optimizer.build(self._model.trainable_variables)

    def _check(self, own: Sequence[dict[str, Any]], saved: Sequence[dict[str, Any]]) -> None:
        if len(own) != len(saved):
            raise _another_model(f"{len(saved)} variables", f"{len(own)} variables")
        for mine, theirs in zip(own, saved, strict=True):
            # Names may be numbered in another way.
            if (mine["shape"], mine["dtype"]) != (theirs["shape"], theirs["dtype"]):
                raise _another_model(theirs, mine)


class DenseState:
    """Values of variables.

    Args:
        variables: The variables.
        values: Their values.
    """

    def __init__(self, variables: Sequence[Any], values: Sequence[Rows]) -> None:
        self._variables = variables
        self._values = values

    def assign(self) -> None:
        """Set the variables."""
        for variable, value in zip(self._variables, self._values, strict=True):
            variable.assign(value)


def _described(variable: Any) -> dict[str, Any]:
    dtype = keras.backend.standardize_dtype(variable.dtype)
    return {"path": variable.path, "shape": list(variable.shape), "dtype": dtype}


def _read(path: pathlib.Path, known: dict[str, Any]) -> list[Rows]:
    """The values of the variables, once they were found to be what was written."""
    if not path.exists():
        raise damaged(path, "no such file", "the file")
    found = checksum(path)
    if found != known["crc32"]:
        raise damaged(path, f"checksum {found:08x}", f"checksum {known['crc32']:08x}")
    values = []
    with path.open("rb") as file:
        for entry in known["variables"]:
            size = int(np.prod(entry["shape"], dtype=np.int64)) * np.dtype(entry["dtype"]).itemsize
            values.append(np.frombuffer(file.read(size), entry["dtype"]).reshape(entry["shape"]))
    return values


def _another_model(received: Any, expected: Any) -> ValueError:
    return ValueError(
        f"The checkpoint is another model's. Received: {received}. Expected: {expected}. Make and "
        "compile the model as it was, or use another directory."
    )

"""Private Keras, and what public call is missing for each use."""

import sys
import types
import zipfile
from collections.abc import Iterator
from typing import Any

import keras


def applying_optimizers() -> list[keras.optimizers.Optimizer]:
    """The optimizers whose `apply` is on the call stack, the innermost first.

    Missing: a variable that is overwritten with its gradient is not told by which optimizer.
    """
    found: list[keras.optimizers.Optimizer] = []
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, keras.optimizers.Optimizer) and owner not in found:
            found.append(owner)
        frame = frame.f_back
    return found


def learning_rate_at(optimizer: keras.optimizers.Optimizer, step: Any) -> Any:
    """The optimizer's learning rate at a step that it does not count itself.

    Missing: the schedule of an optimizer; `optimizer.learning_rate` is its value at `iterations`.
    """
    rate = optimizer._learning_rate
    if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        return rate(step)
    return optimizer.learning_rate


def inbound_nodes(operation: Any) -> list[Any]:
    """The calls of a layer or op on symbolic tensors. Missing: any walk over a functional model."""
    return list(operation._inbound_nodes)


def outbound_nodes(operation: Any) -> list[Any]:
    """The calls that read what the calls of this layer or op return. Missing: as above."""
    return list(operation._outbound_nodes)


def producer(tensor: Any) -> tuple[Any, int]:
    """The layer or op that made a symbolic tensor, and the number of its call.

    Missing: as above.
    """
    history = tensor._keras_history
    return history.operation, history.node_index


def model_nodes(model: keras.Model) -> set[int]:
    """Identities of the calls that belong to a functional model. Missing: as above."""
    depths = functional(model)._nodes_by_depth
    return {id(node) for nodes in depths.values() for node in nodes}


def functional(model: keras.Model) -> Any:
    """The functional model itself, also of a built `Sequential`; None if it is neither.

    Missing: the symbolic inputs of a `Sequential` model by structure.
    """
    if isinstance(model, keras.Sequential):
        return model._functional
    return model if hasattr(model, "_inputs_struct") else None


def sublayers(layer: keras.Layer) -> Iterator[keras.Layer]:
    """The layer and all layers inside it. Missing: `model.layers` shows the first level only."""
    yield from layer._flatten_layers()


def assets_archive() -> zipfile.ZipFile | None:
    """The archive that takes or gives the assets of the model that is saved or loaded now.

    None: its weights alone are. Missing: a layer that saves its variables is not told whether it
    will be asked for assets, too, and those of an unzipped model are lost.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in ("_save_state", "_load_state"):
            archive = getattr(frame.f_locals.get("assets_store"), "archive", None)
            return archive if isinstance(archive, zipfile.ZipFile) else None
        frame = frame.f_back
    return None


def archived_assets(store: Any) -> tuple[zipfile.ZipFile, str] | None:
    """The archive that variables are read from, and where the same layer's assets are in it.

    Missing: `model.load_weights("model.keras")` reads variables only.
    """
    archive = getattr(store, "archive", None)
    if not isinstance(archive, zipfile.ZipFile):
        return None
    return archive, f"assets/{store._h5_entry_path}/"


def h5_group(store: Any) -> Any:
    """The h5py group behind a store of variables that is written; None if there is none.

    Missing: a way to write a variable piece by piece. The store copies what it is given, twice.
    """
    if type(store).__name__ != "H5IOStore":
        return None
    if not store._h5_entry_initialized:
        store._create_h5_group(store._h5_entry_path)
    return store._h5_entry_group


def export_archive() -> Any:
    """The archive for which a model is being traced, on its way to a SavedModel; otherwise None.

    Missing: a layer is not told that its call is traced to be exported.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if hasattr(owner, "track_and_add_endpoint"):
            return owner
        frame = frame.f_back
    return None


def start_at_epoch(model: keras.Model, epoch: int | None) -> None:
    """Have `fit`, which has begun, start at this epoch; None: at its `initial_epoch`.

    Missing: a callback cannot say so. `keras.callbacks.BackupAndRestore` does the same.
    """
    model._initial_epoch = epoch

"""Private Keras, and what public call is missing for each use."""

import sys
import types
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

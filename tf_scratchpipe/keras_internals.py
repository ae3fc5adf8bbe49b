"""Private Keras, and what public call is missing for each use."""

import sys
import types
import zipfile
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf


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


def innermost(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """The optimizer that others wrap as their `inner_optimizer`. Missing: a common name for it."""
    while isinstance(
        inner := getattr(optimizer, "inner_optimizer", None), keras.optimizers.Optimizer
    ):
        optimizer = inner
    return optimizer


def learning_rate_at(optimizer: keras.optimizers.Optimizer, step: Any) -> Any:
    """The optimizer's learning rate at a step that it does not count itself.

    Missing: the schedule of an optimizer; `optimizer.learning_rate` is its value at `iterations`.
    """
    rate = optimizer._learning_rate
    if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        return rate(step)
    return optimizer.learning_rate


def period(optimizer: Any) -> int:
    """The gradients of so many steps are applied together. Missing: 1 in the place of None."""
    return int(getattr(optimizer, "gradient_accumulation_steps", None) or 1)


def steps_done(optimizer: keras.optimizers.Optimizer) -> Any:
    """How often an optimizer was applied.

    Missing: with gradient accumulation `optimizer.iterations` counts whole periods only.
    """
    return optimizer._iterations.value if period(optimizer) > 1 else optimizer.iterations


def decays(optimizer: keras.optimizers.Optimizer, variable: tf.Variable) -> bool:
    """Whether an optimizer's weight decay is for a variable.

    Missing: what `exclude_from_weight_decay` has excluded.
    """
    return bool(optimizer._use_weight_decay(variable))


def loss_scales(optimizers: Sequence[keras.optimizers.Optimizer]) -> tuple[Any, ...]:
    """What the loss was multiplied by, for the optimizers that are being applied.

    Optimizers may pass on the attributes of those that they wrap, whose scale counts once.

    Args:
        optimizers: The innermost first.
    """
    if not optimizers:
        return ()
    scaling = [o for o in optimizers if isinstance(o, keras.optimizers.LossScaleOptimizer)]
    if scaling:  # The inner optimizer has no scale of its own then.
        return (scaling[0].dynamic_scale.value,)
    factor = optimizers[0].loss_scale_factor
    return () if factor is None else (factor,)


def set_tables_apart(optimizer: keras.optimizers.Optimizer) -> None:
    """Have an optimizer leave weights alone that stand for tables, but hand them their gradients.

    Missing: a word in what becomes of a variable that is overwritten with its gradient. With
    gradient accumulation Keras allocates an accumulator of the variable's shape and overwrites with
    the greatest gradient of the steps; a `LossScaleOptimizer` looks for infinities in a dense copy,
    and does not tell anybody that it skips a step.

    Methods of the instance are replaced. Nothing changes for other variables.
    """
    if getattr(optimizer, _APART, False):
        return
    setattr(optimizer, _APART, True)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer._common_apply = types.MethodType(_apply_if_finite, optimizer)
    elif period(optimizer) > 1:
        optimizer.add_variable_from_reference = types.MethodType(_add_variable, optimizer)
        optimizer._overwrite_variables_directly_with_gradients = types.MethodType(
            _hand_over, optimizer
        )


_APART = "_scratchpipe_tables_apart"


def _is_table(variable: Any) -> bool:
    return getattr(variable, "stands_for_table", False)


def _add_variable(
    self: Any, reference_variable: Any, name: str | None = None, initializer: Any = "zeros"
) -> keras.Variable:
    """`add_variable_from_reference`: of a table's accumulator a scalar remains, never used."""
    if not _is_table(reference_variable):
        original = type(self).add_variable_from_reference
        return original(self, reference_variable, name=name, initializer=initializer)
    path = f"{reference_variable.path.replace('/', '_')}_{name}"
    return self.add_variable((), initializer, reference_variable.dtype, name=path)


def _hand_over(self: Any, grads: Sequence[Any], variables: Sequence[Any]) -> Any:
    """`_overwrite_variables_directly_with_gradients`: tables get each step's gradients."""
    pairs = list(zip(grads, variables, strict=True))
    for gradient, variable in pairs:
        if _is_table(variable):
            variable.assign(gradient)
    others = [pair for pair in pairs if not _is_table(pair[1])]
    original = type(self)._overwrite_variables_directly_with_gradients
    return original(self, [g for g, _ in others], [v for _, v in others])


def _apply_if_finite(self: Any, grads: Any, trainable_variables: Any = None) -> None:
    """`_common_apply`: rows are looked at where they are, and tables are told of skipped steps."""
    variables = trainable_variables or self._trainable_variables
    pairs = [(g, v) for g, v in zip(grads, variables, strict=True) if g is not None]
    tables = [(g, v) for g, v in pairs if _is_table(v) and isinstance(g, tf.IndexedSlices)]

    def skip() -> None:
        self._stateful_handle_non_finite_grads()
        for gradient, variable in tables:
            variable.skip(gradient)

    values = [g.values if isinstance(g, tf.IndexedSlices) and _is_table(v) else g for g, v in pairs]
    keras.ops.cond(
        self.check_finite(values),
        lambda: self._stateful_handle_finite_grads(grads, trainable_variables),
        skip,
    )


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

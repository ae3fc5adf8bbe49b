"""Private tf_keras and TensorFlow, and what public call is missing for each use."""

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import tf_keras
from tensorflow.python.ops import resource_variable_ops

from tf_scratchpipe.plan import Rows

OPTIMIZERS = (tf_keras.optimizers.Optimizer, tf_keras.optimizers.legacy.Optimizer)


class StandIn(resource_variable_ops.ResourceVariable):
    """A weight that stands for a table. Its own value is a scalar for the tape to hold on to.

    Missing: any variable of one's own making that a tape and tf_keras accept. What tf_keras does to
    a weight with numpy (count, get, set, save) it does to the table.

    Args:
        shape: Rows and values in a row.
        dtype: Their dtype.
        name: Name of the weight.
        read: Gives the whole table.
        write: Sets the whole table.
        move: Moves the rows by their gradients, for an optimizer.
        check: Raises if these optimizers, the innermost first, may not train the table.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: str,
        name: str,
        *,
        read: Callable[[], Rows],
        write: Callable[[Rows], None],
        move: Callable[[Any, Any], None],
        check: Callable[[list[Any]], None],
    ) -> None:
        # Always watched, so that a layer may be frozen and thawed.
        super().__init__(initial_value=0.0, trainable=True, dtype=dtype, name=name)
        self._table_shape = tf.TensorShape(shape)
        self._read, self._write, self._move, self._check = read, write, move, check

    def scalar(self) -> tf.Tensor:
        """The value that a tape attaches the gradient to."""
        return super().value()

    def move(self, optimizer: Any, gradient: Any) -> None:
        """Move the rows."""
        self._check(applying_optimizers())
        self._move(optimizer, gradient)

    @property
    def shape(self) -> tf.TensorShape:
        """The table's. An optimizer makes slots in a weight's shape: those it never needs."""
        caller = sys._getframe(1).f_globals.get("__name__", "")
        made = hasattr(self, "_table_shape")
        return self._table_shape if made and not _is_optimizer_code(caller) else self._shape

    @property
    def handle(self) -> tf.Tensor:
        """The scalar's. An optimizer that takes it would move the scalar in an op of its own."""
        if _is_optimizer_code(sys._getframe(1).f_globals.get("__name__", "")):
            self._check(applying_optimizers())
        return self._handle

    @property
    def _unique_id(self) -> Any:
        """Its key. Every optimizer that builds itself for a weight asks for it."""
        optimizers = applying_optimizers()
        if optimizers:
            self._check(optimizers)
            _split_updates(optimizers[0])
        return self._key

    @_unique_id.setter
    def _unique_id(self, key: Any) -> None:
        self._key = key

    def numpy(self) -> Rows:
        """The whole table, as it is trained."""
        return self._read()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Rows:
        return np.asarray(self._read(), dtype)

    def __repr__(self) -> str:
        return f"<StandIn '{self.name}' shape={self.shape} dtype={self.dtype.name}>"

    def assign(self, value: Any, *_: Any, **__: Any) -> None:
        """Set the table."""
        if tf.is_tensor(value) and not tf.executing_eagerly():
            raise self._refusal("assigned to in a graph")
        self._write(np.asarray(value))

    def _restore_from_tensors(self, restored_tensors: Any) -> Any:
        return tf.no_op()  # The layer's own state has the table.

    def _refusal(self, action: str) -> ValueError:
        return ValueError(
            f"Weight '{self.name}' stands for a table that is not a tensor; it cannot be {action}. "
            "Call the layer to look rows up; `layer.get_table()` and `layer.set_table(values)` "
            "copy the whole table."
        )

    def _dense_var_to_tensor(self, *_: Any, **__: Any) -> Any:
        raise self._refusal("read as a tensor in a computation")


def _refused(name: str) -> Callable[..., Any]:
    def method(self: StandIn, *_: Any, **__: Any) -> Any:
        raise self._refusal(f"used by `{name}`")

    method.__name__ = name
    method.__doc__ = "Refused: the table is not a tensor."
    return method


for _name in """
    value read_value sparse_read gather_nd assign_add assign_sub scatter_add scatter_sub scatter_max
    scatter_min scatter_mul scatter_div scatter_update batch_scatter_update scatter_nd_add
    scatter_nd_sub scatter_nd_update scatter_nd_max scatter_nd_min __getitem__ __deepcopy__
""".split():
    setattr(StandIn, _name, _refused(_name))


# ---- optimizers -------------------------------------------------------------------------------


def applying_optimizers() -> list[Any]:
    """The optimizers on the call stack, the innermost first.

    Missing: a weight is not told by which optimizer it is moved.
    """
    return [owner for owner in _owners() if isinstance(owner, OPTIMIZERS)]


def training_models() -> list[Any]:
    """The models on the call stack, the innermost first. Missing: a layer is not told its model."""
    return [owner for owner in _owners() if isinstance(owner, tf_keras.Model)]


def learning_rate_at(optimizer: Any, step: Any) -> tf.Tensor:
    """The optimizer's learning rate at a step.

    Missing: the schedule of an optimizer; `learning_rate` is its value at the last step.
    """
    rate = optimizer._learning_rate
    if isinstance(rate, tf_keras.optimizers.schedules.LearningRateSchedule):
        rate = rate(step)
    return tf.convert_to_tensor(rate)


def decays(optimizer: Any, variable: Any) -> bool:
    """Whether an optimizer's weight decay is for a variable.

    Missing: what `exclude_from_weight_decay` has excluded.
    """
    return bool(optimizer._use_weight_decay(variable))


def count_steps_with(twin: keras.optimizers.Optimizer, optimizer: Any) -> None:
    """Have an optimizer of Keras 3 show the steps that one of tf_keras counts.

    Missing: `iterations` of Keras 3 cannot be set.
    """
    twin._iterations = optimizer.iterations


def rate_of(optimizer: Any) -> Any:
    """What gives an optimizer's learning rate. Missing: `learning_rate` is its value."""
    return getattr(optimizer, "_learning_rate", None)


class _Split:
    """An optimizer's own way to move weights, with stand-ins taken out.

    Copies with the optimizer.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._apply = optimizer._internal_apply_gradients

    def __call__(self, grads_and_vars: Any) -> Any:
        pairs = list(grads_and_vars)
        for gradient, variable in pairs:
            if isinstance(variable, StandIn):
                variable.move(self._optimizer, gradient)
        others = [pair for pair in pairs if not isinstance(pair[1], StandIn)]
        return self._apply(others) if others else self._optimizer.iterations.assign_add(1)


class _Undecayed:
    """An optimizer's weight decay, without stand-ins: rows decay as their own optimizer says."""

    def __init__(self, optimizer: Any) -> None:
        self._decay = optimizer._apply_weight_decay

    def __call__(self, variables: Any) -> Any:
        return self._decay([v for v in variables if not isinstance(v, StandIn)])


def _split_updates(optimizer: Any) -> None:
    """Have an optimizer leave stand-ins to their layers, from here on.

    Missing: a weight that says how it is moved. `update_step` could be overridden in public, but
    XLA compiles it on a GPU, which a row's update cannot be.
    """
    if not isinstance(optimizer._internal_apply_gradients, _Split):
        optimizer._internal_apply_gradients = _Split(optimizer)
        optimizer._apply_weight_decay = _Undecayed(optimizer)


def _owners() -> Iterator[Any]:
    """The objects whose methods are on the call stack, the innermost first, each once."""
    seen: set[int] = set()
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if owner is not None and id(owner) not in seen:
            seen.add(id(owner))
            yield owner
        frame = frame.f_back


def _is_optimizer_code(module: str) -> bool:
    return module.startswith("tf_keras.src.optimizers")


# ---- functional models ------------------------------------------------------------------------


def nodes(model: Any) -> set[int] | None:
    """Identities of the calls that belong to a functional model; None if it is none.

    Missing: any walk over a functional model.
    """
    if not getattr(model, "_is_graph_network", False):
        return None
    return {id(node) for depth in model._nodes_by_depth.values() for node in depth}


def inputs_of(layer: Any) -> list[Any]:
    """The symbolic tensors that a layer was first called on, over all calls. Missing: as above."""
    return [node.keras_inputs[0] for node in layer._inbound_nodes if node.keras_inputs]


def readers_of(tensor: Any) -> list[Any]:
    """The calls that read a symbolic tensor. Missing: as above."""
    producer = tensor._keras_history.layer
    return [
        node
        for node in producer._outbound_nodes
        if any(read is tensor for read in node.keras_inputs)
    ]


def input_name(tensor: Any) -> str | None:
    """The name of the input that a symbolic tensor is; None if it is none. Missing: as above."""
    layer = tensor._keras_history.layer
    return str(layer.name) if isinstance(layer, tf_keras.layers.InputLayer) else None


# ---- saving -----------------------------------------------------------------------------------


class NotInSavedModel(tf_keras.layers.Layer):
    """A layer that cannot be saved in a SavedModel. Missing: a layer is not asked."""

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> Any:
        if save_type == "savedmodel":
            raise ValueError(
                f"Layer '{self.name}' cannot be saved in a SavedModel: its rows are found by "
                "Python code. Save the model as '.keras', or its weights; to serve it, call it "
                "with `layer.to_embedding()` in the place of the layer."
            )
        return super()._trackable_children(save_type, **kwargs)

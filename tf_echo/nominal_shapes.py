"""Sizes for every tensor of a graph whose batch size is left open.

`Dataset.batch` leaves the batch size open, so that a third of the tensors of a train step have no
size. Here every input of the step is given a nominal batch size, and TensorFlow's own shape
functions say what follows. Each kind of call (op type, attributes, input shapes, values that
determine a shape) is inferred once, so that the time grows with the number of different calls
rather than with the number of ops: an unrolled network repeats a few hundred.
"""

import functools
from collections.abc import Hashable, Sequence

import numpy as np
import tensorflow as tf

from tf_echo import op_traits, tf_internals
from tf_echo.op_traits import Kind

Shape = tuple[int, ...]

NOMINAL_LENGTH = 64
"""Taken for dimensions of the step's inputs, other than the batch, that are left open (sequence
lengths, image sides)."""

_MAX_VALUES = 64
_INTEGERS = frozenset((tf.int32, tf.int64, tf.bool))


def static_shape(tensor: tf.Tensor) -> Shape | None:
    """The shape that the graph itself knows, or None where any part of it is open."""
    shape = tensor.shape
    return tuple(shape.as_list()) if shape.is_fully_defined() else None


class NominalShapes:
    """Shapes under a nominal batch size, worked out one operation after the other by `add`.

    Args:
        batch_size: taken for the first dimension of an input wherever it is open.
    """

    def __init__(self, batch_size: int):
        self.batch_size = batch_size
        self._shapes: dict[int, Shape | None] = {}
        self._values: dict[int, np.ndarray | None] = {}
        self._inferred: dict[Hashable, list[Shape | None]] = {}
        self._folded: dict[Hashable, list[np.ndarray | None]] = {}
        self._scratch = tf.Graph()

    def add(self, operation: tf.Operation, static: Sequence[Shape | None]) -> list[Shape | None]:
        """Works out the shapes of an operation's outputs; its inputs must have been added before.

        Args:
            operation: the operation.
            static: for each output `static_shape`.
        """
        shapes = list(static)
        if None in shapes:
            inferred = self._infer(operation)
            shapes = [s if s is not None else i for s, i in zip(shapes, inferred, strict=True)]
        for output, shape in zip(operation.outputs, shapes, strict=True):
            self._shapes[id(output)] = shape
        return shapes

    def _infer(self, operation: tf.Operation) -> list[Shape | None]:
        inputs = list(operation.inputs)
        input_shapes = [self._shapes.get(id(t)) for t in inputs]
        if not inputs or any(t.dtype == tf.resource for t in inputs):
            return [self._nominal_input(output) for output in operation.outputs]
        if None in input_shapes:
            return [None] * len(operation.outputs)
        values = [self._value(t, s) for t, s in zip(inputs, input_shapes, strict=True)]
        key = _key(operation, input_shapes, values)
        if key not in self._inferred:
            self._inferred[key] = self._ask_tensorflow(operation, input_shapes, values)
        return self._inferred[key]

    def _nominal(self, output: tf.Tensor) -> Shape | None:
        """The batch size where nothing but the first dimension is open."""
        shape = output.shape
        if shape.rank is None or not shape[1:].is_fully_defined():
            return None
        return (self.batch_size, *shape.as_list()[1:]) if shape.rank else ()

    def _nominal_input(self, output: tf.Tensor) -> Shape | None:
        if output.shape.rank is None:
            return None
        sides = output.shape.as_list()
        first = [self.batch_size if side is None else side for side in sides[:1]]
        return tuple(first + [NOMINAL_LENGTH if side is None else side for side in sides[1:]])

    def _ask_tensorflow(
        self,
        operation: tf.Operation,
        shapes: Sequence[Shape | None],
        values: Sequence[np.ndarray | None],
    ) -> list[Shape | None]:
        with self._scratch.as_default():
            try:
                stand_ins = [
                    tf.compat.v1.placeholder(t.dtype, s) if v is None else tf.constant(v, t.dtype)
                    for t, s, v in zip(operation.inputs, shapes, values, strict=True)
                ]
                copies = tf_internals.copy_operation(self._scratch, operation, stand_ins, "shape")
            except (ValueError, tf.errors.OpError):
                return [self._nominal(output) for output in operation.outputs]
        return [static_shape(c) or self._nominal(c) for c in copies]

    def _value(self, tensor: tf.Tensor, shape: Shape | None) -> np.ndarray | None:
        """What a small integer tensor holds, if that follows from shapes and constants."""
        if tensor.dtype not in _INTEGERS or shape is None or int(np.prod(shape)) > _MAX_VALUES:
            return None
        if id(tensor) not in self._values:
            results = self._fold(tensor.op)
            for output, result in zip(tensor.op.outputs, results, strict=True):
                self._values[id(output)] = result
        return self._values[id(tensor)]

    def _fold(self, operation: tf.Operation) -> list[np.ndarray | None]:
        unknown: list[np.ndarray | None] = [None] * len(operation.outputs)
        inputs = list(operation.inputs)
        if operation.type == "Const":
            return [tf.make_ndarray(operation.get_attr("value"))]
        shapes = [self._shapes.get(id(t)) for t in inputs]
        if operation.type in ("Shape", "ShapeN") and None not in shapes:
            return [
                np.array(s, o.dtype.as_numpy_dtype)
                for s, o in zip(shapes, operation.outputs, strict=True)
            ]
        kind = op_traits.traits_of(operation.type).kind
        if operation.op_def.is_stateful or kind is Kind.CONTROL_FLOW or not inputs:
            return unknown
        values = [self._value(t, s) for t, s in zip(inputs, shapes, strict=True)]
        if operation.type in ("Size", "Rank") and shapes[0] is not None:
            number = int(np.prod(shapes[0])) if operation.type == "Size" else len(shapes[0])
            return [np.array(number, operation.outputs[0].dtype.as_numpy_dtype)]
        if any(value is None for value in values):
            return unknown
        key = _key(operation, shapes, values)
        if key not in self._folded:
            self._folded[key] = _evaluate(operation, values)
        return self._folded[key]


def _key(
    operation: tf.Operation,
    shapes: Sequence[Shape | None],
    values: Sequence[np.ndarray | None],
) -> Hashable:
    attributes = operation.node_def.attr
    return (
        operation.type,
        tuple((name, attributes[name].SerializeToString()) for name in sorted(attributes)),
        tuple(shapes),
        tuple(None if value is None else value.tobytes() for value in values),
    )


def _evaluate(
    operation: tf.Operation, values: Sequence[np.ndarray | None]
) -> list[np.ndarray | None]:
    with tf.init_scope(), tf.device("CPU:0"):
        inputs = [
            tf.constant(value, tensor.dtype)
            for value, tensor in zip(values, operation.inputs, strict=True)
        ]
        try:
            return [result.numpy() for result in tf_internals.run_eagerly(operation, inputs)]
        except (TypeError, ValueError, tf.errors.OpError):
            return [None] * len(operation.outputs)


@functools.cache
def dtype_name(dtype: tf.DType) -> str:
    """The name of a dtype, quickly."""
    return str(dtype.name)

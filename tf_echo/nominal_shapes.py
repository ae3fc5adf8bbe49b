"""Sizes for every tensor of a graph whose batch size is left open.

`Dataset.batch` leaves the batch size open, so that a third of the tensors of a train step have no
size. Here every input of the step is given a nominal batch size, and TensorFlow's own shape
functions say what follows. Each kind of call (op type, attributes, input shapes, values that
determine a shape) is inferred once, so that the time grows with the number of different calls
rather than with the number of ops: an unrolled network repeats a few hundred.

The body of a loop is gone through once, with the shapes that enter the loop; lists of tensors are
followed through it.
"""

import functools
import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tf_echo import loop_internals, op_traits, tf_internals
from tf_echo.op_traits import Kind

Shape = tuple[int, ...]

NOMINAL_LENGTH = 64
"""Taken for dimensions of the step's inputs, other than the batch, that are left open (sequence
lengths, image sides)."""

NOMINAL_TRIPS = NOMINAL_LENGTH
"""Taken for the number of iterations of a loop that does not tell."""

_MAX_VALUES = 64
_INTEGERS = frozenset((tf.int32, tf.int64, tf.bool))

_SAME_LIST = ("Identity", "ZerosLike", "AddN")
"""Ops that make of a list of tensors one that is as large."""


def static_shape(tensor: tf.Tensor) -> Shape | None:
    """The shape that the graph itself knows, or None where any part of it is open."""
    shape = tensor.shape
    return tuple(shape.as_list()) if shape.is_fully_defined() else None


class TensorList(NamedTuple):
    """What is known of a list of tensors of one shape."""

    length: int | None
    shape: Shape | None = None
    dtype: tf.DType = tf.float32
    scales: bool = False
    """Whether the shape grows with the batch."""
    pushed: bool = False
    """Whether it holds what a loop keeps for its gradient; that is accounted for with the loop."""

    @property
    def nbytes(self) -> int:
        """Bytes of all of it; 0 where anything is unknown, as for a list of lists."""
        if self.pushed or self.length is None or self.shape is None or self.dtype == tf.variant:
            return 0
        return self.length * int(self.dtype.size) * math.prod(self.shape)


class Trips(NamedTuple):
    """How often the body of a loop runs."""

    number: int
    known: bool
    """Whether that is certain."""
    scale: bool
    """Whether it grows with the batch."""


class NominalShapes:
    """Shapes under a nominal batch size, worked out one operation after the other by `add`.

    Args:
        batch_size: taken for the first dimension of an input wherever it is open.
        outer: for the body of a loop the shapes around the loop.
    """

    def __init__(self, batch_size: int, outer: "NominalShapes | None" = None):
        self.batch_size = batch_size
        self.bodies: dict[tf.Operation, NominalShapes] = {}
        """The shapes in the bodies of the loops added so far."""
        self.trips: dict[tf.Operation, Trips] = {}
        """For each loop how often its body runs."""
        self._shapes: dict[int, Shape | None] = {}
        self._values: dict[int, np.ndarray | None] = {}
        self._lists: dict[int, TensorList] = {}
        self._inferred: dict[Hashable, list[Shape | None]] = outer._inferred if outer else {}
        self._folded: dict[Hashable, list[np.ndarray | None]] = outer._folded if outer else {}
        self._scratch: tf.Graph = outer._scratch if outer else tf.Graph()

    def add(self, operation: tf.Operation, static: Sequence[Shape | None]) -> list[Shape | None]:
        """Works out the shapes of an operation's outputs; its inputs must have been added before.

        Args:
            operation: the operation.
            static: for each output `static_shape`.
        """
        shapes = list(static)
        if operation.type in loop_internals.LOOPS:
            shapes = self._add_loop(operation, shapes)
        elif "TensorList" in operation.type:
            shapes = self._add_list(operation, shapes)
        elif operation.type in _SAME_LIST and id(operation.inputs[0]) in self._lists:
            self._lists[id(operation.outputs[0])] = self._lists[id(operation.inputs[0])]
        elif operation.outputs and id(operation.outputs[0]) in self._shapes:
            return [self._shapes[id(output)] for output in operation.outputs]
        if None in shapes:
            inferred = self._infer(operation)
            shapes = [s if s is not None else i for s, i in zip(shapes, inferred, strict=True)]
        for output, shape in zip(operation.outputs, shapes, strict=True):
            self._shapes[id(output)] = shape
        return shapes

    def add_alike(self, operation: tf.Operation, other: tf.Operation) -> None:
        """Notes that an operation makes what one makes that was added."""
        for output, same in zip(operation.outputs, other.outputs, strict=True):
            self._shapes[id(output)] = self._shapes.get(id(same))

    def list_of(self, tensor: tf.Tensor) -> TensorList | None:
        """What is known of a list; None where nothing is."""
        return self._lists.get(id(tensor))

    def _add_list(
        self, operation: tf.Operation, shapes: Sequence[Shape | None]
    ) -> list[Shape | None]:
        """Follows one op on a list of tensors."""
        inputs, outputs, kind = operation.inputs, operation.outputs, operation.type
        old = self._lists.get(id(inputs[0]), TensorList(None))
        if kind == "TensorListReserve":
            length = self._value(inputs[1], ())
            self._lists[id(outputs[0])] = TensorList(None if length is None else int(length))
        elif kind == "TensorListFromTensor":
            whole = self._shapes.get(id(inputs[0]))
            if whole:
                items = self._list_of(whole[0], whole[1:], inputs[0])
                self._lists[id(outputs[0])] = items
        elif kind in ("TensorListSetItem", "TensorListPushBack"):
            item = inputs[2] if kind == "TensorListSetItem" else inputs[1]
            shape = self._shapes.get(id(item))
            items = self._list_of(old.length, shape, item)
            self._lists[id(outputs[0])] = items._replace(pushed=kind == "TensorListPushBack")
        elif outputs[0].dtype == tf.variant:
            self._lists[id(outputs[0])] = old
        if kind == "TensorListGetItem":
            return [_first(shapes[0], old.shape)]
        if kind == "TensorListPopBack":
            return [shapes[0], _first(shapes[1], old.shape)]
        if kind == "TensorListStack" and old.length is not None and old.shape is not None:
            return [_first(shapes[0], (old.length, *old.shape))]
        return list(shapes)

    def _list_of(self, length: int | None, shape: Shape | None, like: tf.Tensor) -> TensorList:
        return TensorList(length, shape, like.dtype, static_shape(like) is None)

    def _add_loop(
        self, operation: tf.Operation, shapes: Sequence[Shape | None]
    ) -> list[Shape | None]:
        """Goes through the body of a loop once."""
        body = loop_internals.body_graph(operation)
        if body is None:
            return [
                _first(s, self._nominal(o)) for s, o in zip(shapes, operation.outputs, strict=True)
            ]
        inside = self.bodies[operation] = NominalShapes(self.batch_size, self)
        pairs = list(zip(operation.inputs, body.inputs, body.outputs, strict=True))
        for outside, placeholder, output in pairs:
            inside._enter(placeholder, outside, self, placeholder is output)
        for inner in body.get_operations():
            inside.add(inner, [static_shape(o) for o in inner.outputs])
        trips = self.trips[operation] = self._count_trips(operation)
        found = []
        for shape, made, output in zip(shapes, body.outputs, operation.outputs, strict=True):
            found.append(_first(shape, inside._shapes.get(id(made))))
            if id(made) in inside._lists:
                items = inside._lists[id(made)]
                self._lists[id(output)] = items._replace(
                    length=trips.number if items.length is None else items.length
                )
        self._values[id(operation.outputs[0])] = np.array(trips.number, np.int32)
        return found

    def _enter(
        self, placeholder: tf.Tensor, outside: tf.Tensor, outer: "NominalShapes", same: bool
    ) -> None:
        """Takes over what is known of a tensor that enters a loop."""
        shape = outer._shapes.get(id(outside))
        self._shapes[id(placeholder)] = _first(static_shape(placeholder), shape)
        if id(outside) in outer._lists:
            self._lists[id(placeholder)] = outer._lists[id(outside)]
        self._values[id(placeholder)] = outer._value(outside, shape) if same else None

    def _count_trips(self, operation: tf.Operation) -> Trips:
        """How often a loop runs, as far as its condition tells: counters below limits, joined by
        "and". Where it also depends on something else the number is an upper bound. One that is not
        certain and equals the nominal batch size is taken to follow it.
        """
        counts: list[int] = []
        certain = True
        cond = loop_internals.cond_graph(operation)
        waiting = [cond.outputs[0]] if cond is not None else []
        while waiting:
            condition = waiting.pop().op
            if condition.type in ("Identity", "LogicalAnd", "Squeeze"):
                waiting += condition.inputs
                continue
            found = self._count_from(operation, condition)
            certain = certain and found is not None and found[1]
            if found is not None:
                counts.append(found[0])
        count, known = min(counts, default=NOMINAL_TRIPS), certain and bool(counts)
        return Trips(count, known, bool(counts) and not known and count == self.batch_size)

    def _count_from(
        self, operation: tf.Operation, condition: tf.Operation
    ) -> tuple[int, bool] | None:
        """How often a condition `counter < limit` holds, and whether that is certain."""
        cond = loop_internals.cond_graph(operation)
        places = {id(t): place for place, t in enumerate(cond.inputs)}
        if condition.type != "Less" or id(condition.inputs[0]) not in places:
            return None
        place = places[id(condition.inputs[0])]
        limit = condition.inputs[1]
        limit = operation.inputs[places[id(limit)]] if id(limit) in places else limit
        start = operation.inputs[place]
        if not _counts_by_one(loop_internals.body_graph(operation), place):
            return None
        values = [_constant(t, self._value(t, self._shapes.get(id(t)))) for t in (start, limit)]
        if values[0] is None or values[1] is None:
            return None
        known: dict[int, bool] = {}
        certain = _is_certain(start, known) and _is_certain(limit, known)
        return max(values[1] - values[0], 0), certain

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
        return [_first(static_shape(c), self._nominal(c)) for c in copies]

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


def _counts_by_one(body: tf.Graph, place: int) -> bool:
    """Whether a loop variable is an integer that grows by one in each iteration."""
    made = body.outputs[place].op
    while made.type == "Identity":
        made = made.inputs[0].op
    if made.type not in ("AddV2", "Add") or not made.outputs[0].dtype.is_integer:
        return False
    others = [t for t in made.inputs if t is not body.inputs[place]]
    return len(others) == 1 and others[0].op.type == "Const" and _constant(others[0], None) == 1


def _constant(tensor: tf.Tensor, value: np.ndarray | None) -> int | None:
    """The number in a tensor of one integer, given or constant."""
    if value is None and tensor.op.type == "Const":
        value = tf.make_ndarray(tensor.op.get_attr("value"))
    return int(value) if value is not None and value.size == 1 else None


def _first(shape: Shape | None, other: Shape | None) -> Shape | None:
    """The first of two that is known."""
    return other if shape is None else shape


def _is_certain(tensor: tf.Tensor, known: dict[int, bool]) -> bool:
    """Whether a small tensor follows from constants and from shapes that the graph knows.

    Args:
        tensor: the tensor.
        known: what is known of tensors, by their ids; it grows.
    """
    if id(tensor) not in known:
        operation = tensor.op
        if operation.type in ("Shape", "Size", "Rank"):
            known[id(tensor)] = static_shape(operation.inputs[0]) is not None
        else:
            inputs = list(operation.inputs)
            follows = bool(inputs) and all(_is_certain(t, known) for t in inputs)
            known[id(tensor)] = follows or operation.type == "Const"
    return known[id(tensor)]


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

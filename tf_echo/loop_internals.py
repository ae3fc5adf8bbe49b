"""The private parts of TensorFlow's while loops that tf_echo needs.

TensorFlow makes the gradient of a `While` op another one. What the gradient's body reads of the
forward body is pushed on a list in each iteration, and popped from it in the backward loop. Here
both loops are changed after they exist, with the functions by which TensorFlow itself extends a
forward loop when its gradient is taken. Missing in public: any access to the graphs of a loop, and
any change of a loop that was built. Written for TensorFlow 2.21.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.framework import auto_control_deps_utils, ops
from tensorflow.python.ops import control_flow_util, control_flow_util_v2, while_v2

LOOPS = ("While", "StatelessWhile")
_ANY_SHAPE = -1


def body_graph(operation: tf.Operation) -> Any:
    """The graph of a loop's body; None where the loop was not built in this process."""
    return getattr(operation, "_body_graph", None)


def cond_graph(operation: tf.Operation) -> Any:
    """The graph of a loop's condition; None where the loop was not built in this process."""
    return getattr(operation, "_cond_graph", None)


def constants(operation: tf.Operation) -> list[int]:
    """The places of a loop's inputs that no iteration changes: they come out as they went in."""
    body = body_graph(operation)
    if operation.type not in LOOPS or body is None:
        return []
    pairs = zip(body.inputs, body.outputs, strict=True)
    return [place for place, (inside, output) in enumerate(pairs) if inside is output]


def is_compiled(graph: tf.Graph) -> bool:
    """Whether XLA compiles the graph."""
    return bool(control_flow_util.GraphOrParentsInXlaContext(graph))


def gradient_loops(operations: Iterable[tf.Operation]) -> dict[tf.Operation, list[tf.Operation]]:
    """For each loop the loops that are gradients of it."""
    found: dict[tf.Operation, list[tf.Operation]] = {}
    by_body: dict[int, tf.Operation] = {}
    for operation in operations:
        if operation.type in LOOPS and body_graph(operation) is not None:
            by_body[id(body_graph(operation))] = operation
            forward = by_body.get(id(getattr(body_graph(operation), "_forward_graph", None)))
            if forward is not None:
                found.setdefault(forward, []).append(operation)
    return found


def only_reads(operation: tf.Operation, handle: tf.Tensor) -> bool:
    """Whether an operation leaves the variable behind a handle as it is."""
    if operation.type in ("ReadVariableOp", "VariableShape", "ResourceGather", "ResourceGatherNd"):
        return True
    try:
        reads = operation.get_attr(auto_control_deps_utils.READ_ONLY_RESOURCE_INPUTS_ATTR)
    except ValueError:
        return False
    places = [p for p, t in enumerate(operation.inputs) if t is handle]
    return all(place in reads for place in places)


def run_in_order(loop: tf.Operation) -> None:
    """Lets a loop begin an iteration only when the one before is over."""
    loop._set_attr("parallel_iterations", attr_value_pb2.AttrValue(i=1))


class LoopEditor:
    """Changes a loop and its gradient: what the backward loop may read, and what is kept for it.

    Args:
        forward: the loop.
        backward: its gradient, in the same graph or, for a loop inside a loop, in the graph of the
            outer gradient's body.
        lists: where the backward loop reads what the forward loop keeps: for the place among its
            inputs the place among the forward loop's outputs.
    """

    def __init__(self, forward: tf.Operation, backward: tf.Operation, lists: Mapping[int, int]):
        self.forward, self.backward, self._lists = forward, backward, lists
        self.forward_body, self.backward_body = body_graph(forward), body_graph(backward)
        self._extra = len(self.backward_body.extra_inputs)
        for operation in self.backward_body.get_operations():
            _wait_for_nothing(operation)

    def keep(self, tensor: tf.Tensor) -> tf.Tensor:
        """The tensor of the backward body that has the value of a tensor of the forward body.

        Invariants and resources are handed to the backward loop, constants are copied, all else is
        kept from each iteration, unless it is already.
        """
        with self.backward_body.as_default(), tf.control_dependencies(None):
            kept = self.backward_body.capture(tensor)
        _wait_for_nothing(kept.op)
        return kept

    def drop_unread(self) -> None:
        """Keeps no longer what the backward body does not read."""
        for operation in self.backward_body.get_operations():
            if operation.type == "TensorListPopBack" and not operation.outputs[1].consumers():
                self._drop(operation)

    def _drop(self, pop: tf.Operation) -> None:
        backward, forward = self.backward_body, self.forward_body
        place = _place(backward.inputs, pop.inputs[0])
        if place is None or backward.outputs[place] is not pop.outputs[0]:
            return
        kept = self._lists.get(place)
        if kept is None or len(self.backward.inputs[place].consumers()) > 1:
            return
        start, push = self.forward.inputs[kept].op, forward.outputs[kept].op
        if start.type != "EmptyTensorList" or push.type != "TensorListPushBack":
            return
        forward.outputs[kept] = forward.inputs[kept]
        backward.outputs[place] = backward.inputs[place]
        _make_small(start)
        # The ops themselves stay, and XLA compiles them: on lists of their own.
        dtype = pop.get_attr("element_dtype")
        push._update_input(0, _empty_list(forward, dtype, _ANY_SHAPE))
        pop._update_input(0, _empty_list(backward, dtype, []))

    def finish(self) -> None:
        """Gives both loops the bodies as they are now."""
        self._finish_forward()
        self._finish_backward()

    def _finish_forward(self) -> None:
        body, cond = self.forward_body, cond_graph(self.forward)
        added = body.outputs[len(self.forward.outputs) :]
        _set_functions(self.forward, cond, body)
        self.forward._add_while_inputs(self.backward_body.extra_inputs[self._extra :])
        _add_outputs(self.forward, added)

    def _finish_backward(self) -> None:
        body, cond = self.backward_body, cond_graph(self.backward)
        start = len(self.backward.inputs)
        outside: list[tf.Tensor] = []
        for placeholder in body.inputs[start:]:
            external = next(e for e, i in body.captures if i is placeholder)
            body.outputs.append(body.internal_capture_to_output[ops.tensor_id(placeholder)])
            outside.append(self._passed_on(self._resolve(external)))
        with cond.as_default():
            while_v2._duplicate_body_captures_in_cond(cond, outside)
        added = body.outputs[start:]
        _set_functions(self.backward, cond, body)
        self.backward._add_while_inputs(outside)
        _add_outputs(self.backward, added)

    def _resolve(self, tensor: tf.Tensor) -> tf.Tensor:
        """What the backward loop is to be given for a tensor that its body captured."""
        if tensor.graph is self.forward_body:
            tensor = self.forward.outputs[_place(self.forward_body.outputs, tensor)]
        graph = self.backward.graph
        if tensor.graph is graph:
            return tensor
        with graph.as_default(), tf.control_dependencies(None):
            return graph.capture(tensor)

    def _passed_on(self, tensor: tf.Tensor) -> tf.Tensor:
        """The tensor from an operation of its own: inputs that were added to a loop cannot be
        replaced.
        """
        if tensor.dtype in (tf.resource, tf.variant):
            return tensor
        with tensor.graph.as_default(), tf.control_dependencies(None):
            return tf.identity(tensor)


def _make_small(start: tf.Operation) -> None:
    """Makes an empty list one for a single number: XLA makes room also for what is never pushed."""
    with start.graph.as_default(), tf.control_dependencies(None):
        shape = start.inputs[0]
        if shape.shape.rank == 1:
            start._update_input(0, tf.ones(shape.shape, shape.dtype))
        start._update_input(1, tf.constant(1))


def _empty_list(graph: tf.Graph, dtype: tf.DType, shape: Any) -> tf.Tensor:
    with graph.as_default(), tf.control_dependencies(None):
        return tf.raw_ops.EmptyTensorList(
            element_shape=tf.constant(shape, tf.int32),
            max_num_elements=tf.constant(1),
            element_dtype=dtype,
        )


def _wait_for_nothing(operation: tf.Operation) -> None:
    """Lets constants and what is popped be there from the start.

    TensorFlow lets some wait for the gradient that first read them; what is added reads them
    before.
    """
    if operation.type in ("Const", "TensorListPopBack"):
        for made in (operation, *(t.op for t in operation.inputs if t.op.type == "Const")):
            made._remove_all_control_inputs()


def _place(tensors: Sequence[tf.Tensor], wanted: tf.Tensor) -> int | None:
    return next((place for place, tensor in enumerate(tensors) if tensor is wanted), None)


def _set_functions(loop: tf.Operation, cond: Any, body: Any) -> None:
    for attribute, graph in (("cond", cond), ("body", body)):
        graph.name += "_echo"
        loop._set_func_attr(attribute, control_flow_util_v2.create_new_tf_function(graph))
    loop._set_type_list_attr("T", body.output_types)
    loop._set_shape_list_attr("output_shapes", body.output_shapes)


def _add_outputs(loop: tf.Operation, added: Sequence[tf.Tensor]) -> None:
    first = len(loop.outputs)
    loop._add_outputs([t.dtype for t in added], [t.shape for t in added])
    while_v2._copy_handle_data(added, loop.outputs[first:])
    while_v2._set_read_only_resource_inputs_attr(loop, [cond_graph(loop), body_graph(loop)])

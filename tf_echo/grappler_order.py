"""In which order Grappler leaves the step that is being traced.

The executor runs what becomes ready together in the order of the graph that it is given, and that
order decides what the step holds at once. Grappler sorts the graph several times and fuses nodes
in between, so the order is asked of Grappler itself. It needs the graph as it will be: the step is
a function that Keras calls with what an iterator gives, and calls are inlined.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tf_echo import tf_internals

_Waits = Mapping[tf.Operation, Sequence[tf.Operation]]


def question(
    graph: tf.Graph, wanted: Sequence[tf.Operation], waits: _Waits
) -> Callable[[], list[str]]:
    """Gets ready to ask for the order of a step's operations.

    Args:
        graph: the graph of the step, which is a function.
        wanted: the operations whose effects or results are asked for.
        waits: what operations will have to wait for when the function is complete.

    Returns:
        What asks Grappler, in any thread and whatever the graph has become since, and gives the
        names in the order in which they will run: with those of operations that Grappler adds and
        without those that it removes; none if it does not take the graph. Takes about as long as
        Grappler takes when the step runs first.
    """
    try:
        called = _called(graph, wanted, waits)
    except ValueError:  # larger than a protobuf may be
        return list
    # Nobody waits for what has no effects.
    results = [op.name for op in wanted if not has_effects(op)]

    def ask() -> list[str]:
        optimized = tf_internals.optimize(called, ["call/done", *results])
        return [] if optimized is None else [node.name for node in optimized.node]

    return ask


def has_effects(operation: tf.Operation) -> bool:
    """Whether an operation runs even if nobody reads what it makes."""
    return not operation.outputs or operation.op_def.is_stateful


def _called(
    graph: tf.Graph, wanted: Sequence[tf.Operation], waits: _Waits
) -> tf.compat.v1.GraphDef:
    """The step, called and inlined; its last node waits for all effects."""
    step = graph.as_graph_def()
    device = tf_internals.device_name(tf_internals.devices()[-1])

    def node(name: str, op: str, inputs: Iterable[str] = ()) -> tf.compat.v1.NodeDef:
        return tf.compat.v1.NodeDef(name=f"call/{name}", op=op, input=inputs, device=device)

    arguments, passed, body = [node("iterator", "_Arg")], [], []
    arguments[0].attr["T"].type = tf.resource.as_datatype_enum
    following = node("next", "IteratorGetNext", [arguments[0].name])
    for found in step.node:
        # Only what is placed is fused.
        found.device = found.device or device
        operation = graph.get_operation_by_name(found.name)
        found.input.extend(dict.fromkeys(f"^{op.name}" for op in waits.get(operation, ())))
        if found.op == "Placeholder":
            tensor = operation.outputs[0]
            if tensor.dtype == tf.resource:
                arguments.append(node(found.name, "_Arg"))
                _describe_variable(arguments[-1], tensor)
                source = arguments[-1].name
            else:
                source = f"{following.name}:{len(following.attr['output_types'].list.type)}"
                _add_output(following, tensor)
            passed.append(_identity(found.name, source, tensor.dtype, device))
        else:
            body.append(found)
    end = node("end", "NoOp", sorted(f"^{op.name}" for op in wanted if has_effects(op)))
    done = node("done", "NoOp", [f"^{end.name}", f"^{following.name}"])
    return tf.compat.v1.GraphDef(
        node=[*arguments, following, done, *passed, *body, end],
        library=step.library,
        versions=step.versions,
    )


def _identity(name: str, source: str, dtype: tf.DType, device: str) -> tf.compat.v1.NodeDef:
    node = tf.compat.v1.NodeDef(name=name, op="Identity", input=[source], device=device)
    node.attr["T"].type = dtype.as_datatype_enum
    return node


def _describe_variable(argument: Any, handle: tf.Tensor) -> None:
    """Tells the shape of a variable, as a call does."""
    argument.attr["T"].type = handle.dtype.as_datatype_enum
    for item in tf_internals.behind_handle(handle):
        argument.attr["_handle_dtypes"].list.type.append(item.dtype)
        argument.attr["_handle_shapes"].list.shape.append(item.shape)


def _add_output(following: Any, tensor: tf.Tensor) -> None:
    following.attr["output_types"].list.type.append(tensor.dtype.as_datatype_enum)
    following.attr["output_shapes"].list.shape.append(tensor.shape.as_proto())

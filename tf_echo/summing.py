"""Replace sums of many gradients by running sums."""

from collections.abc import Mapping, Sequence

import tensorflow as tf

from tf_echo import scheduling, tf_internals
from tf_echo.graph_view import Node
from tf_echo.tracer import Trace


def replace_sums(trace: Trace, names: Sequence[str]) -> dict[int, tf.Tensor]:
    """Lets the readers of AddN ops read running sums, which it returns by the AddN's node."""
    totals: dict[int, tf.Tensor] = {}
    for name in names:
        node = trace.view.node(name)
        totals[node.id] = _sum_up(trace, node, totals)
        read_instead(trace.tensor(node.outputs[0]), totals[node.id])
    return totals


def _sum_up(trace: Trace, node: Node, totals: Mapping[int, tf.Tensor]) -> tf.Tensor:
    """Adds an AddN's terms one after the other; the maker of each term waits for those before.

    A term may be one of the sums that were replaced before.
    """
    total = scheduling.running_sum(trace.view, node.id)
    makers = [trace.view.tensors[t].node for t in node.inputs]
    values = [
        totals[maker] if maker in totals else trace.tensor(t)
        for maker, t in zip(makers, node.inputs, strict=True)
    ]
    device = trace.operations[node.id].device or None
    with trace.graph.as_default(), tf.control_dependencies(None), tf.device(device):
        for addition in total.additions:
            left, right = values[addition.left], values[addition.right]
            values.append(tf.raw_ops.AddV2(x=left, y=right, name=f"{node.name}/sum"))
    for number, maker in total.waits:
        tf_internals.wait_for(trace.operations[maker], values[len(node.inputs) + number].op)
    return values[-1]


def read_instead(tensor: tf.Tensor, other: tf.Tensor) -> None:
    """Lets whoever reads a tensor read another one."""
    for reader in tensor.consumers():
        for place, read in enumerate(reader.inputs):
            if read is tensor:
                tf_internals.replace_input(reader, place, other)

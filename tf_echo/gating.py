"""What recomputed ops wait for, and how they are tied to it.

A copy of a pure op is merged back into the original by Grappler and by XLA unless its *data*
depends on something late. So each copy that reads only tensors of the forward pass gets one input
that depends on a gate: an upstream gradient of the region, or the loss where there is none. The
cheapest input will do: a scalar, a bias, a seed. Only an op with one large input pays for a copy.
"""

from collections.abc import Mapping, Sequence

from tf_echo import op_traits
from tf_echo.graph_view import GraphView, Node, per_view
from tf_echo.memory_model import Timeline
from tf_echo.op_traits import Kind

_GATEABLE = frozenset(
    [
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "bool",
    ]
)
GRADIENTS = frozenset(("float16", "bfloat16", "float32", "float64"))
"""Dtypes of gradients."""


def guarded_tensors(view: GraphView, nodes: Sequence[Node]) -> frozenset[int]:
    """Which tensors a region's copies read tied to the gate, so that every copy depends on it.

    Args:
        view: the view.
        nodes: the nodes that are copied.
    """
    replayed = {t for node in nodes for t in node.outputs}
    sources = [node for node in nodes if replayed.isdisjoint(node.inputs)]
    cheapest = [min(_by_size(view, node)) for node in sources if gate_places(view, node)]
    guarded: set[int] = set()
    # Where a large tensor must be tied anyway, whoever else reads it reads it tied.
    for node, _ in sorted(
        zip(sources, cheapest, strict=True), key=lambda pair: (-pair[1][0], pair[0].id)
    ):
        choices = _by_size(view, node)
        if not any(tensor in guarded for _, tensor in choices):
            guarded.add(min(choices)[1])
    return frozenset(guarded)


def _by_size(view: GraphView, node: Node) -> list[tuple[int, int]]:
    tensors = [node.inputs[place] for place in gate_places(view, node)]
    return [(view.tensors[t].nbytes, t) for t in tensors]


def gate_places(view: GraphView, node: Node) -> list[int]:
    """The inputs of a node that may be tied to a gate."""
    allowed = op_traits.traits_of(node.op).gate_inputs
    places = range(len(node.inputs)) if allowed is None else allowed
    return [
        p
        for p in places
        if p < len(node.inputs) and view.tensors[node.inputs[p]].dtype in _GATEABLE
    ]


def may_replay(view: GraphView, node: Node) -> bool:
    """Whether running the node again gives the same result, nothing else, can be tied to a gate,
    and leaves the original alone.
    """
    if not op_traits.is_replayable(node.op) or _would_be_moved(view, node):
        return False
    return len(gate_places(view, node)) > 0


def _would_be_moved(view: GraphView, node: Node) -> bool:
    """Whether Grappler would swap the node and the Max or Min that is all that reads it in the
    forward pass.

    It does once the backward pass reads a copy instead, and then takes the result for as large as
    it was before: a broadcast or a sum of it fails.
    """
    if view.kinds[node.id] is not Kind.ELEMENTWISE or len(node.inputs) != 1:
        return False
    readers = [view.nodes[c] for c in view.consumers[node.outputs[0]]]
    return {reader.op for reader in readers if not reader.backward} in ({"Max"}, {"Min"})


def reads_values(view: GraphView, node: Node) -> bool:
    """Whether a node reads more than the shapes of its inputs."""
    return view.kinds[node.id] is not Kind.METADATA


def backward_readers(view: GraphView, tensor: int) -> list[int]:
    """The backward nodes that read a tensor's values (shapes are read early and hold nothing)."""
    return [
        reader
        for reader in view.consumers[tensor]
        if view.nodes[reader].backward and reads_values(view, view.nodes[reader])
    ]


def find_gates(
    view: GraphView, readers: Mapping[int, Sequence[int]], steps: Sequence[int]
) -> dict[int, int]:
    """For each region the latest gradient, in order, that exists before the first reader and does
    not run early.

    Args:
        view: the view.
        readers: for each region the backward nodes that read what it recomputes.
        steps: for each node the step in which it runs without a plan; see `steps_of`.

    Returns:
        Tensor ids. A gate comes before every reader in the view's order, so that waiting for it
        makes no cycle.
    """
    late = _running_late(view, steps)
    return {region: _find_gate(view, late, found) for region, found in readers.items()}


@per_view
def early_nodes(view: GraphView) -> list[bool]:
    """Which backward nodes need forward values, but not the gradient of the loss."""
    return [a and not b for a, b in zip(need_forward_values(view), late_nodes(view), strict=True)]


@per_view
def late_nodes(view: GraphView) -> list[bool]:
    """Which backward nodes follow from the gradient of the loss, and from values of the forward
    pass.

    Where the view does not tell the gradient of the loss, only the latter is asked.
    """
    needs_forward = need_forward_values(view)
    if view.seed is None:
        return needs_forward
    return [a and b for a, b in zip(needs_forward, follows_gradient(view), strict=True)]


def _running_late(view: GraphView, steps: Sequence[int]) -> list[bool]:
    """Which backward nodes run after the forward pass: they need its values, and run when the last
    of all that backward nodes need is there. The loss itself may come later still.
    """
    needed = {view.tensors[t].node for t in view.residuals}
    ends = [steps[n] for n in needed if holds_values(view, view.nodes[n])]
    needs_forward = need_forward_values(view)
    end = max(ends, default=0)
    return [needs_forward[node.id] and steps[node.id] > end for node in view.nodes]


@per_view
def follows_gradient(view: GraphView) -> list[bool]:
    """Which nodes follow from the gradient of the loss."""
    found = [False] * len(view.nodes)
    seed = None if view.seed is None else view.tensors[view.seed].node
    for node in view.nodes:
        if node.backward and reads_values(view, node):
            sources = (view.tensors[t].node for t in node.inputs)
            found[node.id] = node.id == seed or any(found[s] for s in sources)
    return found


@per_view
def need_forward_values(view: GraphView) -> list[bool]:
    """Which backward nodes are made of values of the forward pass."""
    found = [False] * len(view.nodes)
    for node in view.nodes:
        if node.backward and reads_values(view, node):
            sources = (view.tensors[t].node for t in node.inputs)
            found[node.id] = any(found[s] or holds_values(view, view.nodes[s]) for s in sources)
    return found


def holds_values(view: GraphView, node: Node) -> bool:
    """Whether a node is one of the forward pass that computes something."""
    kind = view.kinds[node.id]
    return not node.backward and kind not in (Kind.SOURCE, Kind.METADATA)


def _find_gate(view: GraphView, late: Sequence[bool], readers: Sequence[int]) -> int:
    first = min(readers)
    gates = [
        tensor
        for reader in readers
        for tensor in view.nodes[reader].inputs
        if view.tensors[tensor].node < first
        and late[view.tensors[tensor].node]
        and view.tensors[tensor].dtype in GRADIENTS
    ]
    return max(gates, key=lambda t: (view.tensors[t].node, t), default=view.loss)


def steps_of(timeline: Timeline) -> list[int]:
    """For each node the step in which it runs."""
    steps = [0] * len(timeline.order)
    for step, node in enumerate(timeline.order):
        steps[node] = step
    return steps

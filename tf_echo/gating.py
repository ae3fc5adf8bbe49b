"""What recomputed ops wait for, and how they are tied to it.

A copy of a pure op is merged back into the original by Grappler and by XLA unless its *data*
depends on something late. So each copy that reads only tensors of the forward pass gets one input
that depends on a gate: an upstream gradient of the region, or the loss where there is none. The
cheapest input will do: a scalar, a bias, a seed. Only an op with one large input pays for a copy.
"""

from collections.abc import Collection, Mapping, Sequence

from tf_echo import op_traits
from tf_echo.graph_view import GraphView, Node
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
_GRADIENTS = frozenset(("float16", "bfloat16", "float32", "float64"))


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
    """Whether running the node again gives the same result, nothing else, and can be tied to a
    gate.
    """
    return op_traits.is_replayable(node.op) and len(gate_places(view, node)) > 0


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
    late = _late_nodes(view, steps)
    return {region: _find_gate(view, late, found) for region, found in readers.items()}


def _late_nodes(view: GraphView, steps: Sequence[int]) -> list[bool]:
    """Which backward nodes cannot run before the loss is there: they need forward values, and run
    after it.
    """
    loss_step = steps[view.tensors[view.loss].node]
    needs_forward = _need_forward_values(view)
    return [needs_forward[node.id] and steps[node.id] > loss_step for node in view.nodes]


def _need_forward_values(view: GraphView) -> list[bool]:
    """Which backward nodes are made of values of the forward pass."""
    found = [False] * len(view.nodes)
    for node in view.nodes:
        if node.backward and reads_values(view, node):
            sources = (view.tensors[t].node for t in node.inputs)
            found[node.id] = any(found[s] or _holds_values(view, view.nodes[s]) for s in sources)
    return found


def _holds_values(view: GraphView, node: Node) -> bool:
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
        and view.tensors[tensor].dtype in _GRADIENTS
    ]
    return max(gates, default=view.loss)


def ties(view: GraphView) -> list[int]:
    """The backward nodes that hold several tensors until the last of them is there, and change
    none.
    """
    return [n.id for n in view.nodes if n.backward and n.op == "IdentityN" and len(n.inputs) > 1]


def past_ties(view: GraphView, tied: Collection[int]) -> dict[int, int]:
    """For each output of a tie the tensor that it passes on."""
    passed: dict[int, int] = {}
    for number in sorted(tied):
        node = view.nodes[number]
        passed.update((o, passed.get(i, i)) for i, o in zip(node.inputs, node.outputs, strict=True))
    return passed


def waits(view: GraphView, firsts: Sequence[int]) -> dict[int, list[int]]:
    """What regions wait for besides their gates.

    Args:
        view: the view.
        firsts: for each region that is recomputed its first backward reader, ascending, each once.

    Returns:
        For each of `firsts` the nodes to wait for. All come before it in the view's order.
    """
    found, start = {}, 0
    needs_forward = _need_forward_values(view)
    for first in firsts:
        ends = side_ends(view, start, first)
        found[first] = [node for node in ends if needs_forward[node]]
        start = first
    return found


def side_ends(view: GraphView, start: int, end: int) -> list[int]:
    """The backward nodes from `start` to before `end` that no backward node before `end` needs:
    weight gradients, mostly.

    What is recomputed at `end` waits for them, so that they are not put off while the tensors that
    they read pile up.
    """
    ends = []
    for node in view.nodes[start:end]:
        if node.backward and view.kinds[node.id] is not Kind.SOURCE:
            users = [c for t in node.outputs for c in view.consumers[t]]
            if not any(user < end for user in users):
                ends.append(node.id)
    return ends


def early_sources(view: GraphView) -> list[int]:
    """Constants and reads of variables of the backward pass that may run before it: learning rates,
    optimizer state.

    TensorFlow's executor may leave them to the end, and all updates with them, while gradients pile
    up. Reads of variables that something before them writes are left alone.
    """
    touched: set[int] = set()
    found = []
    for node in view.nodes:
        handles = [t for t in node.inputs if view.tensors[t].dtype == "resource"]
        if node.backward and node.op == "ReadVariableOp" and not node.control_inputs:
            if (
                view.nodes[view.tensors[handles[0]].node].op == "Placeholder"
                and handles[0] not in touched
            ):
                found.append(node.id)
        elif node.op != "ReadVariableOp":
            touched.update(handles)
    return found


def put_offs(view: GraphView, passed: Mapping[int, int]) -> list[tuple[int, int]]:
    """Pairs (a node, another that is to wait for it) that let activations and copies die early.

    A weight gradient (it reads an activation) runs before the input gradient that reads the same
    upstream gradient; were it the other way round, the activation would be held meanwhile. The
    weight's update waits for that input gradient in turn, which still reads the weight: else the
    weight would be copied. And the first weight gradient waits for what updates need, see
    `early_sources`.

    Args:
        view: the view, in which a weight gradient comes before the input gradient.
        passed: see `past_ties`.
    """
    ties_of: dict[int, list[int]] = {}
    for output, source in passed.items():
        ties_of.setdefault(source, []).append(output)
    weight_gradients = [node for node in view.nodes if _is_weight_gradient(view, node)]
    pairs = [(early, node.id) for node in weight_gradients[:1] for early in early_sources(view)]
    for node in weight_gradients:
        others = _input_gradients(view, node)
        outputs = [t for made in node.outputs for t in (made, *ties_of.get(made, ()))]
        users = sorted({c for t in outputs for c in view.consumers[t]})
        for other in others:
            pairs.append((node.id, other))
            pairs += [
                (other, user)
                for user in users
                if user > other and view.nodes[user].op != "IdentityN"
            ]
    return pairs


def _is_weight_gradient(view: GraphView, node: Node) -> bool:
    return (
        node.backward
        and view.kinds[node.id] is Kind.HEAVY
        and any(_holds_values(view, view.nodes[view.tensors[t].node]) for t in node.inputs)
    )


def _input_gradients(view: GraphView, node: Node) -> list[int]:
    """Later heavy nodes that read the same upstream gradient, and no activation."""
    gradients = [t for t in node.inputs if view.nodes[view.tensors[t].node].backward]
    users = {view.nodes[user] for t in gradients for user in view.consumers[t]}
    return sorted(
        user.id
        for user in users
        if user.id > node.id
        and view.kinds[user.id] is Kind.HEAVY
        and not _is_weight_gradient(view, user)
    )


def steps_of(timeline: Timeline) -> list[int]:
    """For each node the step in which it runs."""
    steps = [0] * len(timeline.order)
    for step, node in enumerate(timeline.order):
        steps[node] = step
    return steps

"""Order is memory: which nodes should wait for which, so that tensors die early.

TensorFlow's executor puts off whatever nobody waits for, and tensors pile up meanwhile. Nothing
here changes a value: weight gradients run before what follows them, gradients reach their updates
one by one, and a sum of many gradients is built up term by term, in the order in which the op
itself adds.
"""

import dataclasses
import itertools
from collections.abc import Sequence

from tf_echo import op_traits
from tf_echo.gating import early_nodes, follows_gradient, holds_values, need_forward_values
from tf_echo.graph_view import GraphView, Node, per_view
from tf_echo.op_traits import Kind

_MIN_SUMMED_BYTES = 1 << 16
"""An AddN of fewer bytes in all is left alone."""
_SUMMED = frozenset(("float16", "bfloat16", "float32", "float64"))
_BLOCK = 8
_MIN_STATE_BYTES = 1 << 10
"""Smaller tensors that updates make are left alone."""
_MAX_UPDATE_NODES = 64
"""How many nodes of one update are looked through."""


@dataclasses.dataclass(frozen=True, slots=True)
class Addition:
    """One addition of a running sum. Values are numbered: first the terms, then the results."""

    left: int
    right: int
    after: int
    """The node that makes the last term in it; the addition comes right after."""


@dataclasses.dataclass(frozen=True, slots=True)
class RunningSum:
    """How an AddN of many gradients is replaced by additions."""

    node: int
    additions: tuple[Addition, ...]
    waits: tuple[tuple[int, int], ...]
    """Pairs (number of an addition, node that makes a later term and waits for it)."""


def running_sums(view: GraphView) -> list[int]:
    """The backward AddN nodes whose terms come one after the other, so that they need not all be
    held.

    TensorFlow adds up many gradients in groups: the sum of some is the first term of the next sum.
    """
    found: list[int] = []
    for node in view.nodes:
        if node.backward and node.op == "AddN" and _in_sequence(view, node, found):
            found.append(node.id)
    return found


def _in_sequence(view: GraphView, node: Node, sums: Sequence[int]) -> bool:
    makers = [view.tensors[t].node for t in node.inputs]
    terms = makers[1:] if makers[0] in sums else makers
    output = view.tensors[node.outputs[0]]
    return (
        len(makers) > 2
        and output.dtype in _SUMMED
        and output.nbytes * len(makers) >= _MIN_SUMMED_BYTES
        and all(view.nodes[m].backward for m in makers)
        and not any(view.nodes[m].op == "AddN" for m in terms)
        and all(a < b for a, b in itertools.pairwise(makers))
    )


def running_sum(view: GraphView, number: int) -> RunningSum:
    """The additions for an AddN.

    TensorFlow adds a first block of 2 to 9 terms, then blocks of 8, each block by itself; so do
    these.
    """
    inputs = view.nodes[number].inputs
    makers = [view.tensors[t].node for t in inputs]
    additions: list[Addition] = []

    def add(left: int, right: int, term: int) -> int:
        additions.append(Addition(left, right, makers[term]))
        return len(inputs) + len(additions) - 1

    first = len(inputs) % _BLOCK
    first += _BLOCK if first < 2 else 0
    total = 0
    for term in range(1, min(first, len(inputs))):
        total = add(total, term, term)
    for start in range(first, len(inputs), _BLOCK):
        block = start
        for term in range(start + 1, start + _BLOCK):
            block = add(block, term, term)
        total = add(total, block, start + _BLOCK - 1)
    return RunningSum(number, tuple(additions), tuple(_sum_waits(view, inputs, additions)))


def _sum_waits(
    view: GraphView, inputs: Sequence[int], additions: Sequence[Addition]
) -> list[tuple[int, int]]:
    """Each term's own maker (not a view of what it made) waits for the last addition before it."""
    found, place = [], -1
    for tensor in inputs:
        maker = view.tensors[view.buffers[tensor]].node
        while place + 1 < len(additions) and additions[place + 1].after < maker:
            place += 1
        if place >= 0 and view.nodes[maker].backward:
            found.append((place, maker))
    return found


def waits(view: GraphView, firsts: Sequence[int]) -> dict[int, list[int]]:
    """What regions wait for besides their gates: weight gradients, and the updates that can be
    carried out with them. The executor would put off both, and hold what they read.

    Args:
        view: the view.
        firsts: for each region that is recomputed its first backward reader, ascending, each once.

    Returns:
        For each of `firsts` the nodes to wait for. None of them needs anything that comes at
        `first` or later in the view's order, but for other updates; nor does what TensorFlow merges
        with it.
    """
    found, start = {}, 0
    needs_forward, merged = need_forward_values(view), last_merged(view)
    ends: list[int] = []
    for first in firsts:
        ends += [node for node in side_ends(view, start, first) if needs_forward[node]]
        there = [node for node in ends if merged[node] < first]
        found[first] = there + _updates(view, there, first)
        ends = [node for node in ends if merged[node] >= first]
        start = first
    return found


@per_view
def last_merged(view: GraphView) -> list[int]:
    """For each node the last of those that TensorFlow may merge with it, itself included.

    Where oneDNN is on (by default it is, on processors that it is made for), TensorFlow makes one
    node of the gradients of a bias and of a filter that read the same. What waits for the one must
    not be what the other needs: that would be a cycle.
    """
    filters: dict[int, int] = {}
    for node in view.nodes:
        if node.op == "Conv2DBackpropFilter":
            filters.update((view.buffers[t], node.id) for t in node.inputs)
    last = list(range(len(view.nodes)))
    for node in view.nodes:
        if node.op == "BiasAddGrad":
            last[node.id] = max(node.id, filters.get(view.buffers[node.inputs[0]], -1))
    return last


def _updates(view: GraphView, gradients: Sequence[int], end: int) -> list[int]:
    """The updates of variables that need of the backward pass nothing from `end` on."""
    follows, sources, successors = _order(view)
    merged = last_merged(view)
    early = early_nodes(view)

    def there(node: int) -> bool:
        """Whether it is there by then; what forward nodes made may be what is recomputed."""
        if not follows[node]:
            return not holds_values(view, view.nodes[node])
        return merged[node] < end or node in done

    done: set[int] = set()
    found = []
    waiting = list(gradients)
    while waiting:
        for node in successors[waiting.pop()]:
            # What may be there before any gradient may wait for one that comes later.
            if node < end or node in done or early[node]:
                continue
            if all(there(source) for source in sources[node]):
                done.add(node)
                waiting.append(node)
                if not view.nodes[node].outputs:
                    found.append(node)
    return sorted(found)


@per_view
def _order(view: GraphView) -> tuple[list[bool], list[list[int]], list[list[int]]]:
    """For each node whether it is of the backward pass and made of more than variables; what it
    waits for, `put_offs` included; and what reads it or waits for it.
    """
    upstream, needs_forward = follows_gradient(view), need_forward_values(view)
    follows: list[bool] = []
    sources = [list(found) for found in view.sources]
    successors: list[list[int]] = [[] for _ in view.nodes]
    for node in view.nodes:
        found = view.sources[node.id]
        follows.append(
            upstream[node.id] or needs_forward[node.id] or any(follows[s] for s in found)
        )
        for source in set(found):
            successors[source].append(node.id)
    for first, second in put_offs(view):
        sources[second].append(first)
    return follows, sources, successors


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


@per_view
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


@per_view
def put_offs(view: GraphView) -> list[tuple[int, int]]:
    """Pairs (a node, another that is to wait for it) that let activations and copies die early.

    A weight gradient (it reads an activation) runs before the input gradient that reads the same
    upstream gradient; were it the other way round, the activation would be held meanwhile. So does
    the gradient of a bias, which would hold the upstream gradient. The weight's update waits for
    that input gradient in turn, which still reads the weight: else the weight would be copied. And
    the first weight gradient waits for what updates need, see `early_sources`.

    Args:
        view: the view, in which a weight gradient comes before the input gradient.
    """
    activations = _activations(view)
    heavy = [n for n in view.nodes if n.backward and view.kinds[n.id] is Kind.HEAVY]
    weight_gradients = [n for n in heavy if not activations.isdisjoint(n.inputs)]
    pairs = [(early, node.id) for node in weight_gradients[:1] for early in early_sources(view)]
    for node in weight_gradients:
        others = _input_gradients(view, node, activations)
        users = sorted({c for t in node.outputs for c in view.consumers[t]})
        for other in others:
            pairs.append((node.id, other))
            pairs += [(other, user) for user in users if user > other]
    return pairs + _biases_first(view, activations) + _states_last(view)


def _states_last(view: GraphView) -> list[tuple[int, int]]:
    """Pairs (a gradient, what an update makes of variables alone and combines with it).

    A decayed moment, say. The executor would make those of all variables first, and hold them.
    """
    upstream, needs_forward = follows_gradient(view), need_forward_values(view)
    found = []
    for node in view.nodes:
        sizes = [view.tensors[t].nbytes for t in node.outputs]
        if (
            node.backward
            and view.kinds[node.id] is Kind.ELEMENTWISE
            and not upstream[node.id]
            and not needs_forward[node.id]
            and max(sizes) >= _MIN_STATE_BYTES
        ):
            users = [c for t in node.outputs for c in view.consumers[t] if upstream[c]]
            gradient = gradient_before(view, users, node.id, upstream)
            if gradient is not None:
                found.append((gradient, node.id))
    return found


def gradient_before(
    view: GraphView, users: Sequence[int], end: int, upstream: Sequence[bool]
) -> int | None:
    """The last of the gradients before a node that later nodes are made of."""
    waiting, seen, found = list(users), set(users), list[int]()
    while waiting and len(seen) < _MAX_UPDATE_NODES:
        sources = {view.tensors[t].node for t in view.nodes[waiting.pop()].inputs}
        for source in sources - seen:
            seen.add(source)
            if upstream[source]:
                (found if source < end else waiting).append(source)
    return max(found, default=None)


def _biases_first(view: GraphView, activations: frozenset[int]) -> list[tuple[int, int]]:
    """Pairs (the gradient of a bias, an input gradient that reads the same, perhaps reshaped)."""
    readers: dict[int, list[int]] = {}
    for node in view.nodes:
        heavy = node.backward and view.kinds[node.id] is Kind.HEAVY
        if heavy and activations.isdisjoint(node.inputs):
            for root in {view.buffers[t] for t in node.inputs}:
                readers.setdefault(root, []).append(node.id)
    return [
        (node.id, other)
        for node in view.nodes
        if node.op == "BiasAddGrad"
        for other in readers.get(view.buffers[node.inputs[0]], ())
        if other > node.id
    ]


@per_view
def _activations(view: GraphView) -> frozenset[int]:
    """Tensors of the forward pass that are made of more than variables.

    A kernel that is reshaped, cast or normalized is none.
    """
    found: set[int] = set()
    for node in view.nodes:
        if not node.backward and not _is_weight(view, node):
            starts = view.kinds[node.id] is Kind.SOURCE or op_traits.may_make_data(node.op)
            starts = starts or not node.inputs
            if starts or any(t in found for t in node.inputs):
                found.update(node.outputs)
    return frozenset(found)


def _is_weight(view: GraphView, node: Node) -> bool:
    """Whether it is a constant or a variable, or reads one, or reads but a shape."""
    holds = any(view.tensors[t].dtype == "resource" for t in node.outputs)
    return holds or op_traits.is_weight(node.op)


def _input_gradients(view: GraphView, node: Node, activations: frozenset[int]) -> list[int]:
    """Later heavy nodes that read the same upstream gradient, and no activation."""
    gradients = [t for t in node.inputs if view.nodes[view.tensors[t].node].backward]
    users = {view.nodes[user] for t in gradients for user in view.consumers[t]}
    return sorted(
        user.id
        for user in users
        if user.id > node.id
        and view.kinds[user.id] is Kind.HEAVY
        and activations.isdisjoint(user.inputs)
    )

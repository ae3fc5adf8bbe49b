"""What gradients make of forward values alone waits for the upstream gradient.

The gradients of softplus and of GELU begin like that: the derivative is there before what it is
multiplied with. TensorFlow's executor may make it in the forward pass, and it would be held until
the gradient comes. Waiting changes no value and takes no time.
"""

import collections
from collections.abc import Iterable, Sequence

from tf_echo import gating, op_traits, regions, scheduling
from tf_echo.graph_view import GraphView, per_view
from tf_echo.op_traits import Kind

_MIN_BYTES = 1 << 10
_MIN_SHARE = 0.02
"""What is smaller than that, or than this part of the largest, is left alone."""


@per_view
def upstream(view: GraphView) -> dict[int, int]:
    """The nodes that begin what gradients make of forward values alone, each with the upstream
    gradient that it may wait for.

    That is no elementwise op: Grappler would no longer multiply in the order that it likes best,
    and results would be rounded in another way. Nor is it there from the start, as what the
    gradient of a mean is made of.
    """
    early, users = _early(view), _users(view)
    merged, late = scheduling.last_merged(view), gating.late_nodes(view)
    follows = gating.follows_gradient(view)
    found = {}
    for node in view.nodes:
        begins = early[node.id] and not any(early[s] for s in view.sources[node.id])
        if begins and users[node.id] >= 0:
            gradient = scheduling.gradient_before(view, [users[node.id]], node.id, follows)
            while gradient is not None and view.kinds[gradient] is Kind.ELEMENTWISE:
                gradient = max((s for s in view.sources[gradient] if follows[s]), default=None)
            # What TensorFlow merges with the gradient must not need the node.
            if gradient is not None and late[gradient] and merged[gradient] < node.id:
                found[node.id] = gradient
    return found


def worthwhile(view: GraphView) -> list[int]:
    """The nodes of `upstream`, but for groups whose results are smaller than the forward tensors
    that would be held for them alone (a mask), and groups that are too small to matter.
    """
    found = upstream(view)
    gains = [(_bytes_held(view, group), group) for group in _groups(view)]
    least = max(_MIN_BYTES, _MIN_SHARE * max((gain for gain, _ in gains), default=0))
    worth = (node for gain, group in gains if gain >= least for node in group)
    return sorted(node for node in worth if node in found)


def pairs(view: GraphView, names: Iterable[str]) -> list[tuple[int, int]]:
    """Pairs (a gradient, the node of that name that is to wait for it)."""
    found = upstream(view)
    nodes = [view.by_name[name] for name in names]
    return [(found[node], node) for node in nodes if node in found]


@per_view
def _early(view: GraphView) -> list[bool]:
    """Which of the early nodes may wait: those that have no effects."""
    early = gating.early_nodes(view)
    return [early[node.id] and op_traits.is_replayable(node.op) for node in view.nodes]


def _users(view: GraphView) -> list[int]:
    """For each node the first that combines a gradient with it, or with what early nodes make of
    it; -1 if there is none.
    """
    early, follows = _early(view), gating.follows_gradient(view)
    users = [-1] * len(view.nodes)
    for node in reversed(view.nodes):
        user = node.id if follows[node.id] else users[node.id] if early[node.id] else -1
        for source in view.sources[node.id] if user >= 0 else ():
            users[source] = user if users[source] < 0 else min(users[source], user)
    return users


def _groups(view: GraphView) -> list[list[int]]:
    """Early nodes that make one another."""
    early = _early(view)
    nodes = [node.id for node in view.nodes if early[node.id]]
    links = [(source, n) for n in nodes for source in view.sources[n] if early[source]]
    groups = collections.defaultdict(list)
    for node, group in regions.joined(nodes, links).items():
        groups[group].append(node)
    return list(groups.values())


def _bytes_held(view: GraphView, group: Sequence[int]) -> int:
    """Bytes of what others read of a group; 0 if waiting would hold more forward tensors, which
    nothing else in the backward pass reads.
    """
    members = set(group)
    nodes = [view.nodes[number] for number in group]
    made = {t for node in nodes for t in node.outputs if view.buffers[t] == t}
    read = {view.buffers[t] for node in nodes for t in node.inputs if not view.is_source(t)}

    def size(roots: set[int], needed: bool) -> int:
        readers = _readers(view)
        return sum(view.tensors[r].nbytes for r in roots if bool(readers[r] - members) is needed)

    results = size(made, True)
    return results if results >= size(read - made, False) else 0


@per_view
def _readers(view: GraphView) -> dict[int, set[int]]:
    """For each buffer the backward nodes that read what is in it."""
    found: dict[int, set[int]] = collections.defaultdict(set)
    for tensor, root in enumerate(view.buffers):
        found[root].update(gating.backward_readers(view, tensor))
    return found

"""Partition the forward part of a step into regions that may be recomputed.

A region is a maximal connected set of replayable nodes with the same number of other nodes
(compute-heavy, unknown, stateful) on the longest path behind them. Compute-heavy nodes are never
recomputed (Echo, section IV-A), so no saving can cross one. The number keeps residual connections
from joining a whole network into one region, and it makes a region convex: no path leaves and
re-enters.
"""

import dataclasses
from collections.abc import Collection, Iterable, Sequence

from tf_echo import gating, op_traits
from tf_echo.graph_view import GraphView, Node
from tf_echo.op_traits import Kind

_SHAPE_BYTES = 256
_LARGE_SHARE = 8
"""A tensor joins two regions if it is at least this part of the largest tensor in either."""


@dataclasses.dataclass(frozen=True, slots=True)
class Region:
    """Replayable nodes that are judged together."""

    index: int
    nodes: tuple[int, ...]
    """Node ids in order."""
    layer: str
    """The name scope that its nodes share."""
    component: int = -1
    """Regions that pass large tensors on to one another have the same number."""


def partition(view: GraphView, excluded: Collection[int] = frozenset()) -> list[Region]:
    """The regions of a view, ordered by their first node. Linear in the number of nodes.

    Args:
        view: the view.
        excluded: ids of nodes that are never recomputed.
    """
    constant = _made_of_constants(view)
    replayable = [
        not node.backward
        and node.id not in excluded
        and not constant[node.id]
        and gating.may_replay(view, node)
        and all(view.tensors[t].known for t in node.outputs)
        and not is_shape_arithmetic(view, node)
        for node in view.nodes
    ]
    levels = _levels(view, replayable)
    pairs = (
        (node.id, source)
        for node in view.nodes
        if replayable[node.id]
        for source in (view.tensors[t].node for t in node.inputs)
        if replayable[source] and levels[source] == levels[node.id]
    )
    group = joined(range(len(view.nodes)), pairs)
    members: dict[int, list[int]] = {}
    for node in view.nodes:
        if replayable[node.id]:
            members.setdefault(group[node.id], []).append(node.id)
    ordered = sorted(members.values())
    components = _components(view, ordered)
    return [
        Region(i, tuple(m), common_scope(view, m), components[i]) for i, m in enumerate(ordered)
    ]


def is_shape_arithmetic(view: GraphView, node: Node) -> bool:
    """Few integers: cheap to keep, and XLA must know them when it compiles."""
    outputs = [view.tensors[t] for t in node.outputs]
    return all(t.dtype in ("int32", "int64") and t.nbytes <= _SHAPE_BYTES for t in outputs)


def _made_of_constants(view: GraphView) -> list[bool]:
    """For each node whether it makes a few numbers of constants alone.

    Several layers may share them, which makes them no neighbours.
    """
    found = [False] * len(view.nodes)
    for node in view.nodes:
        found[node.id] = node.op == "Const" or (
            bool(node.inputs)
            and op_traits.is_replayable(node.op)
            and all(found[view.tensors[t].node] for t in node.inputs)
            and all(view.tensors[t].nbytes <= _SHAPE_BYTES for t in node.outputs)
        )
    return found


def merge(view: GraphView, regions: Sequence[Region]) -> list[Region]:
    """One region for each component.

    What a chain of residual blocks passes on can then be recomputed block after block, without
    keeping any of it.
    """
    members: dict[int, list[int]] = {}
    for region in regions:
        members.setdefault(region.component, []).extend(region.nodes)
    ordered = sorted(sorted(nodes) for nodes in members.values())
    return [Region(i, tuple(m), common_scope(view, m), i) for i, m in enumerate(ordered)]


def _components(view: GraphView, members: Sequence[Sequence[int]]) -> list[int]:
    """For each region the number of its component."""
    region_of = {node: i for i, nodes in enumerate(members) for node in nodes}
    largest = [
        max(view.tensors[t].nbytes for n in nodes for t in view.nodes[n].outputs)
        for nodes in members
    ]
    pairs = []
    for node, region in region_of.items():
        for tensor in view.nodes[node].inputs:
            other = region_of.get(view.tensors[tensor].node)
            size = view.tensors[tensor].nbytes * _LARGE_SHARE
            if other is not None and size >= max(largest[region], largest[other]):
                pairs.append((region, other))
    group = joined(range(len(members)), pairs)
    return [group[region] for region in range(len(members))]


def joined(items: Iterable[int], pairs: Iterable[tuple[int, int]]) -> dict[int, int]:
    """For each item one that stands for all that pairs join with it, directly or by way of
    others.
    """
    parent = {item: item for item in items}

    def find(item: int) -> int:
        while parent[item] != item:
            parent[item] = parent[parent[item]]
            item = parent[item]
        return item

    for first, second in pairs:
        parent[find(first)] = find(second)
    return {item: find(item) for item in parent}


def _levels(view: GraphView, replayable: list[bool]) -> list[int]:
    """For each forward node the most non-replayable nodes on a path that leads to it.

    A replayable node is counted as late as its readers allow: a dropout mask, made of a seed alone,
    belongs where it is applied.
    """
    levels = [0] * len(view.nodes)
    for node in view.nodes:
        if not node.backward:
            sources = [view.tensors[t].node for t in node.inputs]
            levels[node.id] = max(
                (_level_behind(view, replayable, levels, s) for s in sources), default=0
            )
    for node in reversed(view.nodes):
        if replayable[node.id]:
            readers = [
                r for t in node.outputs for r in view.consumers[t] if not view.nodes[r].backward
            ]
            levels[node.id] = min((levels[r] for r in readers), default=levels[node.id])
    return levels


def _level_behind(view: GraphView, replayable: list[bool], levels: list[int], source: int) -> int:
    passes = replayable[source] or view.kinds[source] in (Kind.SOURCE, Kind.METADATA)
    return levels[source] + (not passes)


def common_scope(view: GraphView, nodes: Sequence[int]) -> str:
    """The longest name scope that most of the nodes share, `"(step)"` if there is none."""
    counts: dict[str, int] = {}
    for node in nodes:
        scope = view.nodes[node].name.rpartition("/")[0]
        while scope:
            counts[scope] = counts.get(scope, 0) + 1
            scope = scope.rpartition("/")[0]
    shared = [scope for scope, count in counts.items() if 2 * count > len(nodes)]
    return max(shared, key=lambda s: (s.count("/"), len(s), s), default="(step)")

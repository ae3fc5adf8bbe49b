"""In which order TensorFlow's executor runs the nodes of a graph, with one thread.

Grappler leaves the graph sorted breadth first: what leads further comes later, and of two that lead
as far the one created later comes first. Of the nodes that become ready together the last of that
order runs first, and the others are put off until nothing newer is ready; cheap nodes run at once.
"""

import collections
from collections.abc import Iterator, Sequence


def execution_order(
    sources: Sequence[Sequence[int]], created: Sequence[int], cheap: Sequence[bool]
) -> Iterator[int]:
    """Runs a graph.

    Args:
        sources: for each node the nodes that it waits for, one entry an edge; all of them have
            smaller numbers than the node.
        created: for each node its place in the order in which nodes were created.
        cheap: for each node whether the executor runs it as soon as it is ready.

    Yields:
        The nodes in the order in which they run, in a time linear in the edges but for sorting.
    """
    heights = _heights(sources)
    successors: list[list[int]] = [[] for _ in sources]
    for node in sorted(range(len(sources)), key=lambda n: (heights[n], -created[n])):
        for source in sources[node]:
            successors[source].append(node)
    pending = [len(waits) for waits in sources]
    ranks = _ranks(successors, pending.copy())
    for found in successors:
        found.sort(key=ranks.__getitem__)
    stack = [n for n, count in enumerate(pending) if not count]
    stack.sort(key=ranks.__getitem__)
    at_once: collections.deque[int] = collections.deque()
    while stack or at_once:
        current = at_once.popleft() if at_once else stack.pop()
        yield current
        for successor in successors[current]:
            pending[successor] -= 1
            if not pending[successor]:
                (at_once if cheap[successor] else stack).append(successor)


def _heights(sources: Sequence[Sequence[int]]) -> list[int]:
    """For each node how many nodes at most follow from it, one after the other."""
    heights = [1] * len(sources)
    for node in reversed(range(len(sources))):
        for source in sources[node]:
            heights[source] = max(heights[source], heights[node] + 1)
    return heights


def _ranks(successors: Sequence[Sequence[int]], pending: list[int]) -> list[int]:
    """The place of each node in the graph sorted breadth first."""
    waiting = collections.deque(node for node, count in enumerate(pending) if not count)
    ranks = [0] * len(pending)
    for rank in range(len(pending)):
        node = waiting.popleft()
        ranks[node] = rank
        for successor in successors[node]:
            pending[successor] -= 1
            if not pending[successor]:
                waiting.append(successor)
    return ranks

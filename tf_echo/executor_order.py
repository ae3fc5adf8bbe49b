"""In which order TensorFlow's executor runs the nodes of a graph, with one thread.

First runs what is cheap and waits for nothing. Of the nodes that become ready together the last in
the order of the graph runs first, and the others are put off until nothing newer is ready; cheap
nodes run at once. Grappler leaves the graph sorted breadth first: what leads further comes later,
and of two that lead as far, mostly, the one created later comes first.
"""

import collections
from collections.abc import Iterable, Iterator, Sequence


def execution_order(
    sources: Sequence[Sequence[int]], places: Sequence[float], cheap: Sequence[bool]
) -> Iterator[int]:
    """Runs a graph.

    Args:
        sources: for each node the nodes that it waits for, one entry an edge; all of them have
            smaller numbers than the node.
        places: for each node its place in the graph that the executor is given.
        cheap: for each node whether the executor runs it as soon as it is ready.

    Yields:
        The nodes in the order in which they run, in a time linear in the edges but for sorting.
    """
    successors = _successors(sources, sorted(range(len(sources)), key=places.__getitem__))
    pending = [len(waits) for waits in sources]
    roots = [n for n, count in enumerate(pending) if not count]
    roots.sort(key=places.__getitem__)
    stack = [n for n in roots if not cheap[n]]
    at_once = collections.deque(n for n in roots if cheap[n])
    while stack or at_once:
        current = at_once.popleft() if at_once else stack.pop()
        yield current
        for successor in successors[current]:
            pending[successor] -= 1
            if not pending[successor]:
                (at_once if cheap[successor] else stack).append(successor)


def breadth_first(sources: Sequence[Sequence[int]], created: Sequence[int]) -> list[int]:
    """For each node about the place that Grappler gives it.

    Args:
        sources: see `execution_order`.
        created: for each node its place in the order in which nodes were created.
    """
    heights = _heights(sources)
    by_height = sorted(range(len(sources)), key=lambda n: (heights[n], -created[n]))
    successors = _successors(sources, by_height)
    pending = [len(waits) for waits in sources]
    waiting = collections.deque(node for node, count in enumerate(pending) if not count)
    places = [0] * len(pending)
    for place in range(len(pending)):
        node = waiting.popleft()
        places[node] = place
        for successor in successors[node]:
            pending[successor] -= 1
            if not pending[successor]:
                waiting.append(successor)
    return places


def known_places(sources: Sequence[Sequence[int]], places: Sequence[int | None]) -> list[float]:
    """For each node its place in a graph that some are no longer in.

    What was merged into what reads it counts as right before its first reader, all else that is
    missing as right after the last of what it reads.

    Args:
        sources: see `execution_order`.
        places: for each node its place in the graph, None for what is no longer there.
    """
    known: list[float | None] = list(places)
    readers = _successors(sources, range(len(sources)))
    for node in reversed(range(len(sources))):
        if known[node] is None:
            after = [place for r in readers[node] if (place := known[r]) is not None]
            known[node] = min(after) - 0.5 if after else None
    found: list[float] = []
    for node, place in enumerate(known):
        before = max((found[s] for s in sources[node]), default=0.0)
        found.append(before + 0.5 if place is None else place)
    return found


def _successors(sources: Sequence[Sequence[int]], order: Iterable[int]) -> list[list[int]]:
    """For each node those that wait for it, in an order."""
    successors: list[list[int]] = [[] for _ in sources]
    for node in order:
        for source in sources[node]:
            successors[source].append(node)
    return successors


def _heights(sources: Sequence[Sequence[int]]) -> list[int]:
    """For each node how many nodes at most follow from it, one after the other."""
    heights = [1] * len(sources)
    for node in reversed(range(len(sources))):
        for source in sources[node]:
            heights[source] = max(heights[source], heights[node] + 1)
    return heights

"""Echo's Algorithm 1: which nodes of each region to recompute.

Each region starts with everything recomputed that the backward pass reads (the backward expansion
up to compute-heavy nodes, whose inputs count as read where their gradients read them: the dead tail
of figure 14d). Walking forward, a node leaves the recompute path wherever that keeps no more bytes,
alone or together with all nodes that share its inputs (figure 13). What several regions share is
split among them in a first pass, and counted once in a second, when it is known who keeps it
(figure 8).

Last, a node leaves the path where its result is small for the time that it saves: the statistics of
a normalization, say.
"""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

from tf_echo import gating, packing
from tf_echo.cost_model import CostModel
from tf_echo.graph_view import GraphView
from tf_echo.memory_model import Timeline
from tf_echo.op_traits import Kind
from tf_echo.plan import RegionDecision, format_bytes
from tf_echo.regions import Region, common_scope, joined


class Solver(Protocol):
    """Says what becomes of each region."""

    def __call__(
        self,
        view: GraphView,
        regions: Sequence[Region],
        cost_model: CostModel,
        timeline: Timeline,
        packs: bool = False,
        past_heavy: bool = True,
    ) -> list[RegionDecision]:
        """Solves.

        Args:
            view: the step, or an iteration of a loop.
            regions: its regions.
            cost_model: how long ops take.
            timeline: the step as it runs now.
            packs: whether of booleans that are kept the bits will be; see `packing`.
            past_heavy: whether what the gradient of a heavy op reads may be recomputed.
        """


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """A way to decide."""

    solve: Solver
    judged: bool = True
    """Whether decisions are dropped that do not lower the simulated peak, and the backward pass is
    tidied."""


_PASSES = 3
_TIME_FACTOR = 8.0
"""A byte that is kept to save time must save this many times what the region's recompute costs for
each byte released."""


def plan_nothing(
    view: GraphView,
    regions: Sequence[Region],
    cost_model: CostModel,
    timeline: Timeline,
    packs: bool = False,
    past_heavy: bool = True,
) -> list[RegionDecision]:
    """Keeps every region."""
    return [_keep(region, "policy") for region in regions]


def plan_echo(
    view: GraphView,
    regions: Sequence[Region],
    cost_model: CostModel,
    timeline: Timeline,
    packs: bool = False,
    past_heavy: bool = True,
) -> list[RegionDecision]:
    """Algorithm 1 of the paper; see the module's text."""
    residuals = _Residuals(view, packs)
    paths = {r.index: _Path(view, residuals, r) for r in regions}
    worth = [p for p in reversed(paths.values()) if p.wanted]
    sharers = collections.Counter(root for path in worth for root in path.outside)
    keepers = collections.Counter(root for path in worth for root in path.kept)
    for number in range(_PASSES):
        changed = False
        for path in worth:
            keepers.subtract(path.kept)
            before = path.kept
            path.solve(cost_model, keepers, sharers if number == 0 else None, past_heavy)
            keepers.update(path.kept)
            changed = changed or path.kept != before
        if not changed:
            break
    if packs:
        _keep_what_is_slow(worth, cost_model)
    return _decide_all(view, paths, cost_model, timeline)


def plan_mirror(
    view: GraphView,
    regions: Sequence[Region],
    cost_model: CostModel,
    timeline: Timeline,
    packs: bool = False,
    past_heavy: bool = True,
) -> list[RegionDecision]:
    """What Echo is compared with (section VI of the paper): "Mirror", after Chen et al. 2016.

    All that is not compute-heavy runs again, whatever that keeps instead. Heavy ops are skipped:
    what the gradient of one reads is kept, be it only an input.
    """
    residuals = _Residuals(view)
    paths = {r.index: _Path(view, residuals, r) for r in regions}
    for path in paths.values():
        path.take_all()
    return _decide_all(view, paths, cost_model, timeline)


def _keep_what_is_slow(paths: Sequence["_Path"], cost_model: CostModel) -> None:
    """Keeps regions of which each byte released costs far more time than a byte on the average.

    A mask, say, that could be drawn again, and of which only bits are kept.
    """
    released = [path.released_bytes for path in paths]
    seconds = [path.seconds(cost_model) for path in paths]
    least = sum(released) / max(sum(seconds), 1e-9) / _TIME_FACTOR
    for path, gain, added in zip(paths, released, seconds, strict=True):
        if path.path and gain < least * added:
            path.path.clear()
            path.kept, path.too_slow = path.baseline, True


POLICIES = {
    "echo": Policy(plan_echo),
    "mirror": Policy(plan_mirror, judged=False),
    "none": Policy(plan_nothing),
}


class _Residuals:
    """What the backward pass reads."""

    def __init__(self, view: GraphView, packs: bool = False):
        self.nbytes = [packing.kept_bytes(t) if packs else t.nbytes for t in view.tensors]
        """What it takes to keep a tensor to the backward pass."""
        self.readers = [gating.backward_readers(view, t.id) for t in view.tensors]
        self.free = [False] * len(view.tensors)
        """Memory that costs nothing to keep: constants, inputs, variables, and what is kept
        as a variable of the next iteration."""
        for tensor in view.tensors:
            if view.kinds[tensor.node] is Kind.SOURCE:
                self.free[view.buffers[tensor.id]] = True
        for result, variable in view.carried:
            if self.readers[variable]:
                self.free[view.buffers[result]] = True


class _Path:
    """The recompute path of one region while it is being trimmed."""

    def __init__(self, view: GraphView, residuals: _Residuals, region: Region):
        self.view, self.region, self.readers = view, region, residuals.readers
        self.free, self.nbytes = residuals.free, residuals.nbytes
        self.members = frozenset(region.nodes)
        self.made = [t for n in region.nodes for t in view.nodes[n].outputs]
        self.wanted = [t for t in self.made if self.readers[t]]
        roots, produced = view.buffers, frozenset(self.made)
        self.outside = {
            roots[t] for n in region.nodes for t in view.nodes[n].inputs if t not in produced
        }
        self.root_readers: dict[int, list[int]] = {}
        for n in region.nodes:
            for root in {roots[t] for t in view.nodes[n].inputs}:
                self.root_readers.setdefault(root, []).append(n)
        self.baseline = frozenset(roots[t] for t in self.wanted if not self.free[roots[t]])
        self.kept = self.baseline
        """Memory that the region keeps to the backward pass.

        What its path reads and what the backward pass reads of it.
        """
        self.path: set[int] = set()
        self.too_slow = False
        self.needs: collections.Counter[int] = collections.Counter()

    def solve(
        self,
        cost_model: CostModel,
        keepers: collections.Counter[int],
        sharers: collections.Counter[int] | None,
        past_heavy: bool,
    ) -> None:
        """Finds the path and what it keeps, given what other regions keep."""

        def cost(root: int) -> float:
            if self.free[root] or keepers[root] > 0 or self.read_elsewhere(root):
                return 0.0
            return self.nbytes[root] / (max(sharers[root], 1) if sharers else 1)

        if past_heavy:
            self._expand(self.wanted)
        else:
            self._expand_to_heavy()
        self._trim(cost)
        before = sum(cost(root) for root in self.baseline)
        released = before - sum(cost(root) for root in self._kept_now())
        if released > 0:
            self._save_time(cost, released, cost_model)
        else:
            self.path.clear()
        self.kept = self._kept_now()

    @property
    def released_bytes(self) -> float:
        """What the path saves, if all that it keeps is its own."""
        gone, new = self.baseline - self.kept, self.kept - self.baseline
        return sum(self.nbytes[r] for r in gone) - sum(
            self.nbytes[r] for r in new if not self.read_elsewhere(r)
        )

    def seconds(self, cost_model: CostModel) -> float:
        """Time that the path takes."""
        return sum(cost_model.seconds(self.view, self.view.nodes[n]) for n in self.path)

    def take_all(self) -> None:
        """Takes on the path all that the backward pass reads, but for what gradients of heavy nodes
        read.
        """
        self._expand_to_heavy()
        self.kept = self._kept_now()

    def _expand_to_heavy(self) -> None:
        """Everything that the backward pass reads, but for what gradients of heavy nodes read."""
        skipped = {t for t in self.wanted if self._is_read_by_heavy(t)}
        ends = {self.view.tensors[t].node for t in skipped}
        self._expand([t for t in self.wanted if t not in skipped], ends)

    def _is_read_by_heavy(self, tensor: int) -> bool:
        return any(self.view.kinds[r] is Kind.HEAVY for r in self.readers[tensor])

    def read_elsewhere(self, root: int) -> bool:
        """Whether the backward pass reads this memory as the output of a node that no region may
        recompute.
        """
        tensor = self.view.tensors[root]
        return tensor.node not in self.members and self._never_recomputed(root)

    def _never_recomputed(self, root: int) -> bool:
        kind = self.view.kinds[self.view.tensors[root].node]
        return kind in (Kind.HEAVY, Kind.UNKNOWN, Kind.CONTROL_FLOW) and bool(self.readers[root])

    def _expand(self, wanted: Sequence[int], ends: Collection[int] = ()) -> None:
        """Everything that wanted tensors are made of, up to the region's border and the ends."""
        self.path = set()
        waiting = [self.view.tensors[t].node for t in wanted]
        while waiting:
            node = waiting.pop()
            if node not in self.path and node not in ends:
                self.path.add(node)
                sources = (self.view.tensors[t].node for t in self.view.nodes[node].inputs)
                waiting.extend(s for s in sources if s in self.members)

    def _kept_now(self) -> frozenset[int]:
        """Memory that the path reads, or that the backward pass reads of the region and the path
        does not make.
        """
        nodes, tensors, roots = self.view.nodes, self.view.tensors, self.view.buffers
        read = {
            roots[t] for n in self.path for t in nodes[n].inputs if tensors[t].node not in self.path
        }
        read |= {roots[t] for t in self.wanted if tensors[t].node not in self.path}
        return frozenset(root for root in read if not self.free[root])

    def _trim(self, cost: Callable[[int], float]) -> None:
        self.needs = self._count_needs()
        tried: set[int] = set()
        for node in sorted(self.path):
            if node not in self.path:
                continue
            if self._try_without([node], cost):
                continue
            for root in self._inputs_from_outside(node):
                if root not in tried and cost(root) > 0:
                    tried.add(root)
                    group = self._path_readers(root)
                    if len(group) > 1 and self._try_without(group, cost):
                        break

    def _count_needs(self) -> collections.Counter[int]:
        """How often each kept memory is needed.

        By the path, or by the backward pass where the path does not make it.
        """
        nodes, tensors, roots = self.view.nodes, self.view.tensors, self.view.buffers
        needs: collections.Counter[int] = collections.Counter()
        for n in self.path:
            needs.update(roots[t] for t in nodes[n].inputs if tensors[t].node not in self.path)
        needs.update(roots[t] for t in self.wanted if tensors[t].node not in self.path)
        return needs

    def _inputs_from_outside(self, node: int) -> list[int]:
        tensors, roots = self.view.tensors, self.view.buffers
        inputs = self.view.nodes[node].inputs
        return [roots[t] for t in inputs if tensors[t].node not in self.path]

    def _path_readers(self, root: int) -> list[int]:
        return [
            n
            for n in self.root_readers.get(root, ())
            if n in self.path and root in self._inputs_from_outside(n)
        ]

    def _try_without(self, group: Sequence[int], cost: Callable[[int], float]) -> bool:
        """Takes a group off the path if that keeps no more bytes."""
        removed, change = self._without(group)
        delta = self._bytes_of(change, cost)
        if delta <= 0:
            self._remove(removed, change)
            return True
        return False

    def _bytes_of(self, change: collections.Counter[int], cost: Callable[[int], float]) -> float:
        delta = 0.0
        for root, count in change.items():
            before, after = self.needs[root] > 0, self.needs[root] + count > 0
            delta += cost(root) * (int(after) - int(before))
        return delta

    def _remove(self, removed: Iterable[int], change: collections.Counter[int]) -> None:
        self.path.difference_update(removed)
        self.needs.update(change)

    def _without(self, group: Sequence[int]) -> tuple[set[int], collections.Counter[int]]:
        """Which nodes leave with a group (those only it needed) and how the needs change."""
        view = self.view
        removed = set(group)
        waiting = [view.tensors[t].node for n in group for t in view.nodes[n].inputs]
        while waiting:
            node = waiting.pop()
            if node in self.path and node not in removed and self._unneeded(node, removed):
                removed.add(node)
                waiting.extend(view.tensors[t].node for t in view.nodes[node].inputs)
        change: collections.Counter[int] = collections.Counter()
        for node in removed:
            for tensor in view.nodes[node].inputs:
                if view.tensors[tensor].node not in self.path:
                    change[view.buffers[tensor]] -= 1
            for tensor in view.nodes[node].outputs:
                users = sum(n in self.path and n not in removed for n in view.consumers[tensor])
                change[view.buffers[tensor]] += users + bool(self.readers[tensor])
        return removed, change

    def _unneeded(self, node: int, removed: set[int]) -> bool:
        return not any(
            self.readers[t]
            or any(n in self.path and n not in removed for n in self.view.consumers[t])
            for t in self.view.nodes[node].outputs
        )

    def _save_time(
        self, cost: Callable[[int], float], released: float, cost_model: CostModel
    ) -> None:
        """Keeps what is small for the time that it saves, cheapest bytes first in order of the
        path.
        """
        nodes = self.view.nodes
        seconds = {n: cost_model.seconds(self.view, nodes[n]) for n in self.path}
        total = sum(seconds.values())
        for node in sorted(self.path):
            if node not in self.path or not seconds[node]:
                continue
            removed, change = self._without([node])
            saved = sum(seconds[n] for n in removed)
            delta = self._bytes_of(change, cost)
            if delta < released and saved * released >= _TIME_FACTOR * delta * total:
                self._remove(removed, change)


def _keep(region: Region, reason: str, released: int = 0, kept: int = 0) -> RegionDecision:
    return RegionDecision(
        region.index, region.layer, len(region.nodes), False, released, kept, 0.0, reason
    )


def _decide_all(
    view: GraphView, paths: Mapping[int, _Path], cost_model: CostModel, timeline: Timeline
) -> list[RegionDecision]:
    """The decisions that solved paths, in order of their regions, amount to.

    What is recomputed independently of the rest of its region is a region of its own, for it may
    wait for another gradient.
    """
    told: set[int] = set()
    number = itertools.count(max(paths, default=-1) + 1)
    parts = {
        (index if place == 0 else next(number)): (path, nodes)
        for index, path in paths.items()
        for place, nodes in enumerate(_independent(path))
    }
    readers = {
        index: [r for n in nodes for t in view.nodes[n].outputs for r in path.readers[t]]
        for index, (path, nodes) in parts.items()
        if nodes
    }
    gates = gating.find_gates(view, readers, gating.steps_of(timeline))
    return [
        _decide(path, nodes, index, cost_model, gates, told)
        for index, (path, nodes) in sorted(parts.items())
    ]


def _independent(path: _Path) -> list[list[int]]:
    """The nodes of a path, those apart that neither read what others make nor must be tied to a
    gate by the same tensor. One empty list where the path is empty.
    """
    nodes, tensors = path.view.nodes, path.view.tensors
    pairs = [
        (node, tensors[tensor].node)
        for node in path.path
        for tensor in nodes[node].inputs
        if tensors[tensor].node in path.path
    ]
    for tensor in gating.guarded_tensors(path.view, [nodes[n] for n in sorted(path.path)]):
        first, *others = [n for n in path.path if tensor in nodes[n].inputs]
        pairs += [(other, first) for other in others]
    group = joined(path.path, pairs)
    parts: dict[int, list[int]] = collections.defaultdict(list)
    for node in sorted(path.path):
        parts[group[node]].append(node)
    return list(parts.values()) or [[]]


def _decide(
    path: _Path,
    nodes: Sequence[int],
    index: int,
    cost_model: CostModel,
    gates: Mapping[int, int],
    told: set[int],
) -> RegionDecision:
    """The decision that a part of a solved path amounts to.

    `told` holds the memory that earlier decisions count as kept.
    """
    view, region = path.view, path.region
    if not path.wanted:
        return _keep(region, "the backward pass reads nothing of it")
    if path.too_slow:
        return _keep(region, "too slow to recompute for what it releases")
    if not nodes:
        return _keep(region, _why_keep(path))
    whole = index == region.index
    made = {view.buffers[t] for n in nodes for t in view.nodes[n].outputs}
    read = {view.buffers[t] for n in nodes for t in view.nodes[n].inputs}
    released = (path.baseline - path.kept) & made
    new = ((path.kept - path.baseline) & read) - told
    kept = {root for root in new if not path.read_elsewhere(root)}
    told |= kept
    return RegionDecision(
        index,
        region.layer if whole else common_scope(view, nodes),
        len(region.nodes) - len(path.path) + len(nodes) if whole else len(nodes),
        True,
        sum(path.nbytes[root] for root in released),
        sum(path.nbytes[root] for root in kept),
        sum(cost_model.seconds(view, view.nodes[n]) for n in nodes),
        "fewer bytes are kept",
        tuple(view.nodes[n].name for n in nodes),
        view.tensor_name(gates[index]),
    )


def _why_keep(path: _Path) -> str:
    released = sum(path.nbytes[root] for root in path.baseline)
    path._expand(path.wanted)
    kept = sum(path.nbytes[root] for root in path._kept_now())
    path.path.clear()
    return f"releases {format_bytes(released)}, would keep {format_bytes(kept)}"

"""Judge a plan before it is carried out: the same simulator for the step as it is and as it would
be.

`rewire` applies decisions to a view exactly as the rewriter applies them to TensorFlow's graph.
`choose` drops decisions that do not lower the simulated peak, region by region, and all of them
where the peak is not lower in the end.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

import numpy as np

from tf_echo import early, gating, packing, scheduling
from tf_echo.graph_view import GraphView, Node, ViewBuilder
from tf_echo.memory_model import Timeline, simulate
from tf_echo.plan import PackedResidual, PeakMemory, RegionDecision

GUARD_BYTES = 4096
"""Above this size a gated input is simulated as a copy of its own."""

_Key = TypeVar("_Key", int, str)

_TOLERANCE = 0.002
_TRIVIAL_SHARE = 0.005
_MIN_SHARE = 0.05
"""What is recomputed takes time; it must lower the peak by at least this part. Less may be lost if
ops run in another order than the rule's."""
_SIMULATED_NODES = 60_000
_SMALL_NODES = 10_000
_FRUITLESS_ROUNDS = 2
_SLIM_ROUNDS = 3
_ACTIVATION_SHARE = 4
"""With an open batch size plans are judged where activations are this many times the variables."""


@dataclasses.dataclass(frozen=True)
class Rewired:
    """A view with some regions recomputed."""

    view: GraphView
    originals: tuple[int, ...]
    """For each tensor of `view` the tensor of the old view that it is or copies; -1 for guards and
    for what packing adds."""
    regions: tuple[int, ...]
    """For each node of `view` the region that it recomputes; -1 for the step's own nodes."""

    def tensors_by_original(self) -> dict[int, int]:
        """For tensors of the old view those of `view` that are neither copies nor guards."""
        tensors, regions = self.view.tensors, self.regions
        return {
            original: tensor
            for tensor, original in enumerate(self.originals)
            if original >= 0 and regions[tensors[tensor].node] < 0
        }


@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
    """What a plan does besides recomputing; see `RecomputePlan`."""

    sums: tuple[str, ...] = ()
    bits: tuple[PackedResidual, ...] = ()
    waits: tuple[str, ...] = ()


def schedule_of(view: GraphView, without: Collection[str] = ()) -> Schedule:
    """What may be done to a view whatever is recomputed.

    Args:
        view: the view.
        without: parts of a schedule to leave out.
    """
    sums = () if "sums" in without else scheduling.running_sums(view)
    waits = () if "waits" in without else early.worthwhile(view)
    names = [tuple(view.nodes[n].name for n in found) for found in (sums, waits)]
    return Schedule(names[0], waits=names[1])


def rewire(
    view: GraphView,
    decisions: Sequence[RegionDecision],
    schedule: Schedule | None = None,
    in_loop: bool = False,
) -> Rewired:
    """The view as it is after the decisions and the schedule are carried out.

    Copies of a region's nodes come right before the first backward node that reads them; every
    backward node that reads the values of a recomputed tensor reads the copy.

    Args:
        view: the view.
        decisions: regions that are recomputed, among others.
        schedule: what is done besides.
        in_loop: whether the view is an iteration of a loop. There, what reads but the shape of a
            tensor that is recomputed reads the copy's: the tensor would be kept for it. And nothing
            waits but for gates.
    """
    recomputed = [d for d in decisions if d.recompute]
    schedule = schedule or Schedule()
    rewired = _Rewiring(view, recomputed, schedule, in_loop).run()
    return _with_bits(view, rewired, schedule.bits) if schedule.bits else rewired


def _with_bits(view: GraphView, rewired: Rewired, bits: Sequence[PackedResidual]) -> Rewired:
    """The same with some of what the backward pass still reads packed."""
    places = rewired.tensors_by_original()

    def place(name: str) -> int:
        return places[view.tensor_named(name)]

    candidates = [packing.Candidate(place(b.tensor), b.test, place(b.gate)) for b in bits]
    packed = packing.pack(rewired.view, candidates)
    return Rewired(
        packed.view,
        tuple(rewired.originals[t] if t >= 0 else -1 for t in packed.tensors),
        tuple(rewired.regions[n] if n >= 0 else -1 for n in packed.nodes),
    )


def find_bits(
    view: GraphView, decisions: Sequence[RegionDecision], rewired: Rewired
) -> tuple[PackedResidual, ...]:
    """What may be packed of what the backward pass still reads when regions are recomputed.

    Args:
        view: the view.
        decisions: its regions.
        rewired: the view as they leave it.
    """
    places, regions = rewired.tensors_by_original(), rewired.regions
    gates = {
        d.region: places[view.tensor_named(d.gate)] for d in decisions if d.recompute and d.gate
    }
    waiting = {n: gates[r] for n, r in enumerate(regions) if r in gates}
    found = []
    usable = frozenset(places.values())
    for tensor, test, gate in packing.find(rewired.view, waiting, usable):
        old = view.tensors[rewired.originals[tensor]]
        names = [view.tensor_name(rewired.originals[t]) for t in (tensor, gate)]
        found.append(PackedResidual(names[0], test, names[1], old.nbytes, packing.bits_bytes(old)))
    return tuple(found)


class _Rewiring:
    """The state of one `rewire`."""

    def __init__(
        self,
        view: GraphView,
        decisions: Sequence[RegionDecision],
        schedule: Schedule,
        in_loop: bool,
    ):
        self.view, self.builder, self.in_loop = view, ViewBuilder(), in_loop
        self.removed = frozenset(view.by_name[n] for n in schedule.sums)
        self.renamed: dict[int, int] = {}
        self.copies: dict[int, int] = {}
        self.places: dict[int, int] = {}
        self.originals: list[int] = []
        self.regions: list[int] = []
        self.due: dict[int, list[tuple[RegionDecision, list[Node]]]] = {}
        for decision in decisions:
            nodes = [view.node(name) for name in decision.nodes]
            readers = [r for n in nodes for t in n.outputs for r in self._readers(t)]
            if readers:
                self.due.setdefault(min(readers), []).append((decision, nodes))
        self.waits = {} if in_loop else scheduling.waits(view, sorted(self.due))
        self.after: dict[int, list[int]] = {}
        if (self.due or schedule != Schedule()) and not in_loop:
            put_offs = scheduling.put_offs(view) + early.pairs(view, schedule.waits)
            for first, second in put_offs:
                self.after.setdefault(second, []).append(first)
        self._note_sums([view.by_name[n] for n in schedule.sums])

    def _note_sums(self, numbers: Sequence[int]) -> None:
        self.sums = [scheduling.running_sum(self.view, n) for n in numbers]
        self.sum_values = [list(self.view.nodes[n].inputs) for n in numbers]
        """For each sum the tensors of its terms, then, of the new view, those of its additions."""
        self.additions: dict[int, list[tuple[int, int]]] = {}
        self.sum_waits: dict[int, list[tuple[int, int]]] = {}
        for place, total in enumerate(self.sums):
            for number, addition in enumerate(total.additions):
                self.additions.setdefault(addition.after, []).append((place, number))
            for number, node in total.waits:
                self.sum_waits.setdefault(node, []).append((place, number))

    def run(self) -> Rewired:
        for node in self.view.nodes:
            if node.id in self.places or node.id in self.removed:
                continue
            for decision, nodes in self.due.get(node.id, ()):
                waits = [self._place(n) for n in self.waits.get(node.id, ())]
                self._add_region(decision, nodes, waits)
            self._place(node.id)
        loss = self.renamed[self.view.loss]
        new = GraphView(
            tuple(self.builder.nodes),
            tuple(self.builder.tensors),
            loss,
            self.view.weight_bytes,
            self.view.batch_size,
            seed=None if self.view.seed is None else self.renamed[self.view.seed],
        )
        return Rewired(new, tuple(self.originals), tuple(self.regions))

    def _readers(self, tensor: int) -> list[int]:
        """The backward nodes that read a tensor's copy."""
        if self.in_loop:
            return [r for r in self.view.consumers[tensor] if self.view.nodes[r].backward]
        return gating.backward_readers(self.view, tensor)

    def _sum_node(self, place: int, number: int) -> int:
        terms = len(self.view.nodes[self.sums[place].node].inputs)
        return self.builder.tensors[self.sum_values[place][terms + number]].node

    def _add_addition(self, place: int, number: int) -> None:
        """Adds the `number`-th addition of a sum."""
        total, values = self.sums[place], self.sum_values[place]
        node = self.view.nodes[total.node]
        addition = total.additions[number]
        inputs = [
            self._source(node, values[v]) if v < len(node.inputs) else values[v]
            for v in (addition.left, addition.right)
        ]
        added = self._add(node, f"{node.name}/sum{number}", inputs, (), True, -1, "AddV2")
        values.append(added.outputs[0])
        if number + 1 == len(total.additions):
            self.renamed[node.outputs[0]] = added.outputs[0]
            self.places[node.id] = added.id

    def _source(self, node: Node, tensor: int) -> int:
        reads = self.in_loop or gating.reads_values(self.view, node)
        if node.backward and tensor in self.copies and reads:
            return self.copies[tensor]
        return self.renamed[tensor]

    def _add(
        self,
        node: Node,
        name: str,
        inputs: Sequence[int],
        control: Sequence[int],
        backward: bool,
        region: int,
        op: str | None = None,
    ) -> Node:
        outputs = [self.view.tensors[t] for t in node.outputs]
        sizes = [t[3:] for t in outputs]
        self.originals.extend(node.outputs)
        self.regions.append(region)
        op = op or node.op
        created = node.created if name == node.name else -1
        return self.builder.add(name, op, inputs, sizes, control, backward, node.workspace, created)

    def _place(self, number: int) -> int:
        """The new place of a node, which is added if it is not there yet: a source that is read
        early, an update that is waited for.
        """
        if number not in self.places:
            node = self.view.nodes[number]
            for tensor in node.inputs:
                if tensor not in self.renamed:
                    self._place(self.view.tensors[tensor].node)
            inputs = [self._source(node, t) for t in node.inputs]
            before = (*node.control_inputs, *self.after.get(number, ()))
            control = [self._place(c) for c in before if c not in self.removed or c in self.places]
            control += [self._sum_node(*which) for which in self.sum_waits.get(number, ())]
            added = self._add(node, node.name, inputs, control, node.backward, -1)
            self.places[number] = added.id
            self.renamed.update(zip(node.outputs, added.outputs, strict=True))
            for place, addition in self.additions.get(number, ()):
                self._add_addition(place, addition)
        return self.places[number]

    def _add_region(
        self, decision: RegionDecision, nodes: Sequence[Node], waits: Sequence[int]
    ) -> None:
        gate = self.renamed.get(self.view.tensor_named(decision.gate), -1)
        control = (self.builder.tensors[gate].node, *waits) if gate >= 0 else ()
        # Nothing merges copies in loops with their originals: control edges tie them to the gate.
        guarded = frozenset() if self.in_loop else gating.guarded_tensors(self.view, nodes)
        made = {t for node in nodes for t in node.outputs}
        own = {t: self._guard(decision, t, gate, control) for t in sorted(guarded)}
        for node in nodes:
            inputs = [own.get(t, self.renamed.get(t, -1)) for t in node.inputs]
            first = made.isdisjoint(node.inputs) if self.in_loop else guarded & set(node.inputs)
            tied = control if first else ()
            name = f"{node.name}/recompute{decision.region}"
            copy = self._add(node, name, inputs, tied, True, decision.region)
            own.update(zip(node.outputs, copy.outputs, strict=True))
            self.copies.update(zip(node.outputs, copy.outputs, strict=True))

    def _guard(
        self, decision: RegionDecision, tensor: int, gate: int, control: Sequence[int]
    ) -> int:
        source = self.view.tensors[tensor]
        if source.nbytes <= GUARD_BYTES:
            return self.renamed[tensor]
        size = (source.nbytes, source.dtype, source.scales, source.known)
        name = f"{self.view.tensor_name(tensor)}/gate{decision.region}".replace(":", "_")
        inputs = [self.renamed[tensor], gate]
        node = self.builder.add(name, "AddV2", inputs, [size], control, True)
        self.originals.append(-1)
        self.regions.append(decision.region)
        return node.outputs[0]


@dataclasses.dataclass(frozen=True)
class Choice:
    """What is worth carrying out, and the peaks without and with it."""

    decisions: tuple[RegionDecision, ...]
    schedule: Schedule
    before: PeakMemory
    after: PeakMemory
    note: str


@dataclasses.dataclass(frozen=True)
class _Trial:
    """A plan together with the step that it leads to."""

    decisions: tuple[RegionDecision, ...]
    schedule: Schedule
    rewired: Rewired
    timeline: Timeline

    @property
    def peak_bytes(self) -> int:
        return self.timeline.peak_bytes

    @property
    def takes_time(self) -> bool:
        return bool(self.schedule.bits) or any(d.recompute for d in self.decisions)


def judging_scale(view: GraphView, timeline: Timeline) -> float:
    """The multiple of the view's batch size at which activations outweigh variables and workspace.

    With an open batch size plans are judged there: whoever runs out of memory has a batch as large
    as that.
    """
    scaling = sum(
        t.nbytes
        for t in view.tensors
        if t.scales
        and timeline.born[t.id] >= 0
        and not view.nodes[t.node].backward
        and any(view.nodes[c].backward for c in view.consumers[t.id])
    )
    if not scaling:
        return 1.0
    fixed = view.weight_bytes + max(node.workspace.fixed for node in view.nodes)
    return float(max(1, -(-_ACTIVATION_SHARE * fixed // scaling)))


def choose(
    view: GraphView,
    decisions: Sequence[RegionDecision],
    schedule: Schedule,
    timeline: Timeline,
    scale: float,
    small: float | None = None,
    bits: bool = False,
) -> Choice:
    """Keeps what lowers the simulated peak.

    Args:
        view: the step as it is.
        decisions: what a solver proposes.
        schedule: what may be done besides recomputing.
        timeline: the view as simulated at its own batch size.
        scale: factor on tensors that grow with the batch, for judging.
        small: another factor at which the plan must not be above the baseline either; None where
            the batch size is fixed.
        bits: whether what is kept may be packed; see `packing`.

    Returns:
        All decisions, those that do not help turned into keeping, and both peaks.
    """
    baseline = timeline if scale == 1.0 else simulate(view, scale)
    before = peak_memory(view, baseline)
    steps = gating.steps_of(timeline)
    dropped = [drop(d, "the predicted peak would not be lower") for d in decisions]

    def lower(trial: _Trial) -> bool:
        share = 1 - _MIN_SHARE if trial.takes_time else 1.0
        if trial.peak_bytes >= baseline.peak_bytes * share:
            return False
        if small is None or small == scale:
            return True
        base = timeline if small == 1.0 else simulate(view, small)
        return simulate(trial.rewired.view, small).peak_bytes <= base.peak_bytes

    wanted = any(d.recompute for d in decisions)
    waits, summed = schedule.waits, dataclasses.replace(schedule, waits=())
    for given in (summed, Schedule()) if summed != Schedule() else (summed,):
        for tried in ([drop_trivial(decisions)] if wanted else []) + [dropped]:
            if tried is dropped and given == Schedule() and not bits and not waits:
                break
            best = _try(view, tried, given, scale)
            if tried is not dropped:
                best = _refine(view, best, scale, baseline, steps)
            waiting = _wait(view, best, waits, scale) if waits else best
            packed = _pack(view, waiting, scale) if bits else waiting
            trials = {id(trial): trial for trial in (packed, waiting, best)}
            for trial in trials.values():
                if lower(trial):
                    after = peak_memory(trial.rewired.view, trial.timeline)
                    note = _why_nothing(decisions) if tried is dropped else ""
                    return Choice(trial.decisions, trial.schedule, before, after, note)
    return Choice(tuple(dropped), Schedule(), before, before, _why_nothing(decisions))


def take(
    view: GraphView, decisions: Sequence[RegionDecision], schedule: Schedule, scale: float
) -> Choice:
    """Takes decisions as they are; see `choose`."""
    after = rewire(view, decisions, schedule).view
    peaks = [peak_memory(part, simulate(part, scale)) for part in (view, after)]
    return Choice(tuple(decisions), schedule, peaks[0], peaks[1], "")


def _why_nothing(decisions: Sequence[RegionDecision]) -> str:
    if any(d.recompute for d in decisions):
        return "Nothing is recomputed: the predicted peak would not be lower."
    return "Nothing is recomputed: no region would keep fewer bytes."


def _try(
    view: GraphView, decisions: Sequence[RegionDecision], schedule: Schedule, scale: float
) -> _Trial:
    rewired = rewire(view, decisions, schedule)
    return _Trial(tuple(decisions), schedule, rewired, simulate(rewired.view, scale))


def _wait(view: GraphView, trial: _Trial, waits: tuple[str, ...], scale: float) -> _Trial:
    """Lets derivatives wait, if that does no harm: it may help more than the rule's order shows."""
    schedule = dataclasses.replace(trial.schedule, waits=waits)
    waiting = _try(view, trial.decisions, schedule, scale)
    return waiting if waiting.peak_bytes <= trial.peak_bytes else trial


def _pack(view: GraphView, trial: _Trial, scale: float) -> _Trial:
    """Packs what may be packed, if that is worth its time."""
    bits = _without_trivial(find_bits(view, trial.decisions, trial.rewired))
    if not bits:
        return trial
    packed = _try(view, trial.decisions, dataclasses.replace(trial.schedule, bits=bits), scale)
    return packed if packed.peak_bytes < trial.peak_bytes * (1 - _TOLERANCE) else trial


def peak_memory(view: GraphView, timeline: Timeline) -> PeakMemory:
    """What the peak of a timeline is made of."""
    live = timeline.live_at(timeline.peak_step)
    residuals = sum(timeline.sizes[t] for t in live if t in view.residual_buffers)
    total = timeline.peak_bytes
    return PeakMemory(total, view.weight_bytes, residuals, total - view.weight_bytes - residuals)


def drop(decision: RegionDecision, reason: str) -> RegionDecision:
    """The decision turned into keeping."""
    if not decision.recompute:
        return decision
    return dataclasses.replace(
        decision, recompute=False, added_seconds=0.0, reason=reason, nodes=(), gate=""
    )


def _refine(
    view: GraphView, first: _Trial, scale: float, baseline: Timeline, steps: Sequence[int]
) -> _Trial:
    """Drops what makes the peak by its own recomputation, then regions that the peak does not
    need.
    """
    rounds = min(6, _SIMULATED_NODES // len(view.nodes))
    best = trial = first
    fruitless = 0
    for _ in range(rounds):
        culprit = _region_at_peak(trial)
        if culprit is None or fruitless == _FRUITLESS_ROUNDS:
            break
        trials = [
            _try(view, _replace(trial.decisions, change), first.schedule, scale)
            for change in _alternatives(view, trial, culprit, steps)
        ]
        trial = min(trials, key=lambda t: t.peak_bytes)
        fruitless += 1
        if trial.peak_bytes < best.peak_bytes:
            best, fruitless = trial, 0
    if best.peak_bytes >= baseline.peak_bytes:
        return best
    return _slim(view, best, scale)


def _alternatives(
    view: GraphView, trial: _Trial, culprit: int, steps: Sequence[int]
) -> list[RegionDecision]:
    """Other decisions for a region.

    To keep it, or to keep what its first reader reads (it waits the shortest).
    """
    decision = next(d for d in trial.decisions if d.region == culprit)
    kept = drop(decision, "its recomputation would make the peak")
    nodes = [view.node(name) for name in decision.nodes]
    first = min(r for n in nodes for t in n.outputs for r in gating.backward_readers(view, t))
    read = set(view.nodes[first].inputs)
    used = {t for n in nodes for t in n.inputs}
    ends = [n for n in nodes if read & set(n.outputs) and not used & set(n.outputs)]
    rest = _needed(view, [n for n in nodes if n not in ends])
    readers = [r for n in rest for t in n.outputs for r in gating.backward_readers(view, t)]
    if not ends or not readers:
        return [kept]
    gate = gating.find_gates(view, {culprit: readers}, steps)[culprit]
    share = decision.added_seconds / len(nodes)
    smaller = dataclasses.replace(
        decision,
        nodes=tuple(n.name for n in rest),
        gate=view.tensor_name(gate),
        released_bytes=decision.released_bytes
        - sum(view.tensors[t].nbytes for n in ends for t in n.outputs),
        added_seconds=share * len(rest),
    )
    return [smaller, kept]


def _needed(view: GraphView, nodes: Sequence[Node]) -> list[Node]:
    """Of nodes that are recomputed those that the backward pass reads, or others of them do."""
    read: set[int] = set()
    found = []
    for node in reversed(nodes):
        if any(t in read or gating.backward_readers(view, t) for t in node.outputs):
            read.update(node.inputs)
            found.append(node)
    return found[::-1]


def _slim(view: GraphView, best: _Trial, scale: float) -> _Trial:
    """The same plan without regions that the peak does not need."""
    useless = _useless(best)
    for _ in range(_SLIM_ROUNDS):
        if not useless:
            break
        decisions = [
            drop(d, "the peak does not depend on it") if d.region in useless else d
            for d in best.decisions
        ]
        slim = _try(view, decisions, best.schedule, scale)
        if slim.peak_bytes <= best.peak_bytes * (1 + _TOLERANCE):
            return slim
        useless = useless[: len(useless) // 2] if len(view.nodes) < _SMALL_NODES else []
    return best


def _without_trivial(bits: Sequence[PackedResidual]) -> tuple[PackedResidual, ...]:
    """Leaves out the smallest, as long as all of them together are too small to matter."""
    trivial = _trivial({b.tensor: b.released_bytes for b in bits})
    return tuple(b for b in bits if b.tensor not in trivial)


def drop_trivial(decisions: Sequence[RegionDecision]) -> list[RegionDecision]:
    """Drops the smallest savings, as long as all of them together are too small to matter."""
    trivial = _trivial(
        {d.region: d.released_bytes - d.kept_bytes for d in decisions if d.recompute}
    )
    return [drop(d, "too small to matter") if d.region in trivial else d for d in decisions]


def _trivial(gains: Mapping[_Key, int]) -> set[_Key]:
    """The smallest gains, as long as all of them together are too small to matter."""
    allowance = _TRIVIAL_SHARE * sum(max(gain, 0) for gain in gains.values())
    trivial: set[_Key] = set()
    for key in sorted(gains, key=lambda k: (gains[k], k)):
        allowance -= max(gains[key], 0)
        if allowance < 0:
            break
        trivial.add(key)
    return trivial


def _replace(decisions: Sequence[RegionDecision], change: RegionDecision) -> list[RegionDecision]:
    return [change if d.region == change.region else d for d in decisions]


def _region_at_peak(trial: _Trial) -> int | None:
    """The region whose copies hold the most memory at the peak."""
    rewired, timeline = trial.rewired, trial.timeline
    held: dict[int, int] = {}
    for tensor in timeline.live_at(timeline.peak_step):
        region = rewired.regions[rewired.view.tensors[tensor].node]
        if region >= 0:
            held[region] = held.get(region, 0) + timeline.sizes[tensor]
    return max(held, key=lambda r: (held[r], -r), default=None)


def _useless(trial: _Trial) -> list[int]:
    """Regions whose residuals may as well stay, the slowest to recompute for what they save first.

    Their residuals are in memory only while less than the peak is in use.
    """
    timeline = trial.timeline
    usage = np.array(timeline.usage, dtype=np.int64)
    limit = int(usage.max() + timeline.peak_bytes * _TOLERANCE / 2)
    intervals = _released_intervals(trial.rewired, timeline)
    found = []
    for decision in sorted((d for d in trial.decisions if d.recompute), key=_worth):
        added = usage.copy()
        for start, end, size in intervals.get(decision.region, ()):
            added[start:end] += size
        if added.max(initial=0) <= limit:
            usage = added
            found.append(decision.region)
    return found


def _worth(decision: RegionDecision) -> tuple[float, int]:
    """Bytes saved for each second added."""
    gain = decision.released_bytes - decision.kept_bytes
    return gain / max(decision.added_seconds, 1e-9), decision.region


def _released_intervals(
    rewired: Rewired, timeline: Timeline
) -> dict[int, list[tuple[int, int, int]]]:
    """For each region the steps between the last forward use and the recomputation of what it
    makes, and its bytes.
    """
    died: dict[int, int] = {}
    intervals: dict[int, list[tuple[int, int, int]]] = {}
    for tensor, original in enumerate(rewired.originals):
        region = rewired.regions[rewired.view.tensors[tensor].node]
        if original < 0 or rewired.view.buffers[tensor] != tensor:
            continue
        if region < 0:
            died[original] = timeline.died[tensor]
        elif _read_by_backward(rewired, tensor) and died.get(original, -1) >= 0:
            span = (died[original] + 1, timeline.born[tensor], timeline.sizes[tensor])
            intervals.setdefault(region, []).append(span)
    return intervals


def _read_by_backward(rewired: Rewired, tensor: int) -> bool:
    view, regions = rewired.view, rewired.regions
    return any(
        regions[c] < 0 or view.nodes[c].op in ("Reshape", "Identity")
        for c in view.consumers[tensor]
    )

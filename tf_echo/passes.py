"""The whole way from a traced step to a plan that is carried out.

Trace, partition, solve, judge; rewrite, and predict once more.
"""

import contextlib
import dataclasses
import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import tensorflow as tf

from tf_echo import (
    evaluation,
    exclusion,
    loop_evaluation,
    loop_planner,
    planner,
    regions,
    rewriter,
)
from tf_echo.cost_model import CostModel, RooflineCost
from tf_echo.graph_view import GraphView, Loop
from tf_echo.loop_planner import LoopChoice
from tf_echo.memory_model import Timeline, simulate
from tf_echo.op_traits import Kind
from tf_echo.plan import LoopPlan, PeakMemory, RecomputePlan, RegionDecision, Share, format_bytes
from tf_echo.tracer import Trace
from tf_echo.tracing import in_known_order, order_question, trace_step

_logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

_TOLERANCE = 0.01
"""A loop is left as it is if the peak rises by no more than this part."""

_NAMED = 5
"""How many ops that are kept whole are named."""

_MERGED_NODES = 10_000
"""Above this size the second partition is not tried: it would double the time to plan."""


TECHNIQUES = ("recompute", "heavy", "masks", "bits", "sums", "waits", "order")
"""What policy "echo" does: run ops again, also those that gradients of heavy ops read, and those
that draw random numbers; keep one bit of an element where that is enough; build up sums term by
term; let derivatives wait for gradients; run iterations one by one."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What users can say about plans; see `EchoOptimizer`."""

    policy: str = "echo"
    cost_model: CostModel = dataclasses.field(default_factory=RooflineCost)
    batch_size: int | None = None
    exclude: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    plan: RecomputePlan | None = None
    without: tuple[str, ...] = ()
    """Which of `TECHNIQUES` not to use."""


def plan_view(
    view: GraphView,
    settings: Settings | None = None,
    open_batch: bool = False,
    whole: Sequence[str] = (),
) -> RecomputePlan:
    """Makes the plan for a view.

    Args:
        view: the step.
        settings: what the user wants.
        open_batch: whether the view's batch size is only nominal.
        whole: loops that the view does not look into, with the reasons.
    """
    settings = settings or Settings()
    timeline = simulate(view)
    scale, small = 1.0, 1.0 if open_batch else None
    if open_batch and settings.batch_size is None:
        scale = evaluation.judging_scale(view, timeline)
    loops, choice = _decide(view, timeline, settings, scale, small)
    batch_size = round((view.batch_size or 1) * scale) if open_batch else None
    in_loops = any(loop.recompute for loop in loops)
    note = " ".join(filter(None, ("" if in_loops else choice.note, _kept_whole(view, whole))))
    plan = RecomputePlan(
        settings.policy,
        choice.decisions,
        choice.before,
        choice.after,
        batch_size,
        choice.schedule.sums,
        choice.schedule.bits,
        choice.schedule.waits,
        tuple(loops),
        note=note,
    )
    return dataclasses.replace(plan, shares=_shares(view, plan, scale))


def _shares(view: GraphView, plan: RecomputePlan, scale: float) -> tuple[Share, ...]:
    """What the peak would be without each part of a plan."""
    schedule = _schedule(plan)
    if schedule == evaluation.Schedule():
        return ()
    planned = loop_evaluation.planned(view, plan.loops)
    found = []
    for technique in ("bits", "sums", "waits"):
        count = len(getattr(schedule, technique))
        if count:
            without = dataclasses.replace(schedule, **{technique: ()})
            less = evaluation.rewire(planned, plan.decisions, without).view
            peak = simulate(less, scale).peak_bytes
            found.append(Share(technique, count, peak - plan.after.total_bytes))
    return tuple(found)


def _schedule(plan: RecomputePlan) -> evaluation.Schedule:
    return evaluation.Schedule(plan.sums, plan.bits, plan.waits)


def _decide(
    view: GraphView, timeline: Timeline, settings: Settings, scale: float, small: float | None
) -> tuple[list[LoopPlan], evaluation.Choice]:
    """What becomes of the view's loops, and of all else."""
    nothing = settings.policy == "none"
    policy = planner.POLICIES["none" if "recompute" in settings.without else settings.policy]
    judged = policy.judged

    def times(part: GraphView) -> Timeline:
        return timeline if part is view else simulate(part)

    def untouched(name: str, loop: Loop) -> str:
        if nothing:
            return "policy"
        return exclusion.untouched_loop(name, loop, settings.exclude, settings.include)

    tidied = judged and not nothing
    bits = tidied and "bits" not in settings.without

    def propose(part: GraphView, packs: bool = False) -> list[list[RegionDecision]]:
        excluded = exclusion.excluded_nodes(part, settings.exclude, settings.include)
        if "masks" in settings.without:
            excluded |= {n.id for n in part.nodes if part.kinds[n.id] is Kind.RANDOM}
        found = _partitions(part, settings.policy, excluded)
        cost, run, past_heavy = settings.cost_model, times(part), "heavy" not in settings.without
        return [policy.solve(part, regions, cost, run, packs, past_heavy) for regions in found]

    without = settings.without if tidied else TECHNIQUES
    schedule = evaluation.schedule_of(view, without)

    def best(part: GraphView) -> evaluation.Choice:
        run = times(part)
        choices = [
            evaluation.choose(part, decisions, schedule, run, scale, small, bits)
            if judged
            else evaluation.take(part, decisions, schedule, scale)
            for decisions in propose(part, bits)
        ]
        return min(choices, key=lambda c: c.after.total_bytes)

    loops = loop_planner.plan_loops(view, propose, untouched, judged, settings.without)
    if not judged:
        choice = best(loop_planner.apply(view, loops))
        before = evaluation.peak_memory(view, simulate(view, scale))
        return [found.plan for found in loops], dataclasses.replace(choice, before=before)
    if not any(found.plan.recompute for found in loops):
        return [found.plan for found in loops], best(view)
    loops, choice = _with_loops(view, loops, best, scale, small)
    return [found.plan for found in loops], choice


def _with_loops(
    view: GraphView,
    loops: list[LoopChoice],
    best: Callable[[GraphView], evaluation.Choice],
    scale: float,
    small: float | None,
) -> tuple[list[LoopChoice], evaluation.Choice]:
    """What to do with loops and with all else, together."""
    baseline = simulate(view, scale)
    choice = best(loop_planner.apply(view, loops))

    def rewired(part: GraphView) -> GraphView:
        return evaluation.rewire(part, choice.decisions, choice.schedule).view

    def peak(part: GraphView) -> int:
        return simulate(rewired(part), scale).peak_bytes

    chosen = loop_planner.choose(view, loops, peak, _TOLERANCE)
    after = rewired(loop_planner.apply(view, chosen))
    found = simulate(after, scale)
    worse = (
        small is not None and simulate(after, small).peak_bytes > simulate(view, small).peak_bytes
    )
    if worse or found.peak_bytes >= baseline.peak_bytes:
        reason = "the predicted peak would not be lower"
        kept = [
            loop_planner.keep(given, reason) if given.plan.recompute else given for given in loops
        ]
        return kept, best(view)
    before = evaluation.peak_memory(view, baseline)
    choice = dataclasses.replace(choice, before=before, after=evaluation.peak_memory(after, found))
    return chosen, choice


def judge(view: GraphView, plan: RecomputePlan) -> RecomputePlan:
    """A plan for the same graph, perhaps changed by hand, with its peaks predicted anew."""
    scale = _scale(view, plan)
    planned = loop_evaluation.planned(view, plan.loops)
    choice = evaluation.take(planned, plan.decisions, _schedule(plan), scale)
    before = evaluation.peak_memory(view, simulate(view, scale))
    plan = dataclasses.replace(plan, before=before, after=choice.after)
    return dataclasses.replace(plan, shares=_shares(view, plan, scale))


def plan_step(
    losses: Sequence[tf.Tensor], gradients: Sequence[tf.Tensor], settings: Settings
) -> tuple[Trace, RecomputePlan]:
    """Traces and plans a step that is being traced; see `tracing.trace_step` for the arguments.

    Returns:
        The trace and the plan, not carried out yet. Its peaks are those of the order that a rule
        gives, before as well as after: like is compared with like.

    Raises:
        exclusion.UnmatchedPatternError: a pattern in `exclude` or `include` matches nothing.
        rewriter.PlanMismatchError: the plan that was given is one for another graph.
    """
    with paused_collector():
        trace = trace_step(losses, gradients, settings.batch_size)
        trace = dataclasses.replace(trace, order=beside(order_question(trace)))
        if not trace.whole and not _opaque_ops(trace.view):
            exclusion.check(trace.view, settings.exclude)
            exclusion.check(trace.view, settings.include, "include")
        if settings.plan is None:
            plan = plan_view(trace.view, settings, trace.open_batch, trace.whole)
        else:
            plan = settings.plan
            rewriter.check(trace, plan)
            plan = judge(trace.view, plan)
    return trace, dataclasses.replace(plan, name=getattr(trace.graph, "name", ""))


def carry_out(trace: Trace, plan: RecomputePlan) -> Future[RecomputePlan]:
    """Rewrites the step that is being traced, and predicts its peaks in the order in which the
    executor will run it.

    Args:
        trace: the trace that the plan was made for.
        plan: the plan.

    Returns:
        What will be the plan with those peaks: Grappler takes its time to tell the order, and
        nothing waits for it.
    """
    with paused_collector():
        rewriter.rewrite(trace, plan)
        loops = any(loop.recompute for loop in plan.loops)
        changed = loops or rewriter.changes(plan)
        ask = order_question(trace) if changed else None
    return beside(lambda: _predict(trace, plan, ask))


def _predict(
    trace: Trace, plan: RecomputePlan, ask: Callable[[], list[str]] | None
) -> RecomputePlan:
    """The plan with its peaks predicted once more, if the order is known; with `ask` None it
    changes nothing.
    """

    def peak(view: GraphView, names: Sequence[str]) -> PeakMemory:
        view = in_known_order(view, names)
        return evaluation.peak_memory(view, simulate(view, _scale(trace.view, plan)))

    names = trace.order.result() if trace.order else []
    if names:
        before = after = peak(trace.view, names)
        if ask is not None:
            after = peak(carried_out(trace.view, plan).view, ask())
        plan = dataclasses.replace(plan, before=before, after=after)
    _logger.info(
        "Echo plan for %s: %d of %d regions recomputed, predicted peak %s -> %s (%.2fx).%s",
        plan.name,
        len(plan.recomputed),
        len(plan.decisions),
        format_bytes(plan.before.total_bytes),
        format_bytes(plan.after.total_bytes),
        plan.ratio,
        f" {plan.note}" if plan.note else "",
    )
    return plan


def carried_out(view: GraphView, plan: RecomputePlan) -> evaluation.Rewired:
    """The view of a step after its plan was carried out."""
    planned = loop_evaluation.planned(view, plan.loops)
    return evaluation.rewire(planned, plan.decisions, _schedule(plan))


def beside(function: Callable[[], _Result]) -> Future[_Result]:
    """Runs a function in a thread of its own; the interpreter waits for it when it ends."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="tf_echo")
    try:
        return pool.submit(function)
    finally:
        pool.shutdown(wait=False)


def _scale(view: GraphView, plan: RecomputePlan) -> float:
    """The multiple of the view's batch size that a plan was judged at."""
    return plan.batch_size / (view.batch_size or 1) if plan.batch_size else 1.0


@contextlib.contextmanager
def paused_collector() -> Iterator[None]:
    """Planning makes many small objects and no cycles; looking for cycles would take most of it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _partitions(
    view: GraphView, policy: str, excluded: frozenset[int]
) -> list[list[regions.Region]]:
    """The partitions to try.

    By the number of heavy ops, and with what residual connections join in one.
    """
    fine = regions.partition(view, excluded)
    merged = regions.merge(view, fine)
    if policy != "echo" or len(merged) == len(fine) or len(view.nodes) > _MERGED_NODES:
        return [fine]
    return [fine, merged]


_OPAQUE = {
    "If": "conditional",
    "StatelessIf": "conditional",
    "Case": "conditional",
    "StatelessCase": "conditional",
    "PartitionedCall": "function call",
    "StatefulPartitionedCall": "function call",
    "CudnnRNN": "one kernel of cuDNN",
    "CudnnRNNV2": "one kernel of cuDNN",
    "CudnnRNNV3": "one kernel of cuDNN",
}


def _opaque_ops(view: GraphView) -> list[str]:
    found = [
        f"{node.name} ({_OPAQUE[node.op]})"
        for node in view.nodes
        if not node.backward and node.op in _OPAQUE
    ]
    return found + [name for loop in view.loops for name in _opaque_ops(loop.body)]


def _kept_whole(view: GraphView, loops: Sequence[str]) -> str:
    """What of the forward pass nothing looks into, and why."""
    found = [*_opaque_ops(view), *loops]
    if not found:
        return ""
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return f"Kept whole: {', '.join(found[:_NAMED])}{more}."

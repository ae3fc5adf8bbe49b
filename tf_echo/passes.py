"""The whole way from a traced step to a plan.

Trace, partition, solve, judge. Carrying the plan out is `rewriter.rewrite`.
"""

import collections
import contextlib
import dataclasses
import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from tf_echo import evaluation, exclusion, loop_planner, op_traits, planner, regions
from tf_echo.cost_model import CostModel
from tf_echo.graph_view import GraphView
from tf_echo.loop_planner import LoopChoice
from tf_echo.memory_model import simulate
from tf_echo.op_traits import Kind
from tf_echo.plan import RecomputePlan, RegionDecision, format_bytes
from tf_echo.tracer import Trace
from tf_echo.tracing import trace_step

_logger = logging.getLogger(__name__)

_TOLERANCE = 0.01
"""A loop is left as it is if the peak rises by no more than this part."""

_MERGED_NODES = 10_000
"""Above this size the second partition is not tried: it would double the time to plan."""


def plan_view(
    view: GraphView,
    cost_model: CostModel,
    policy: str = "echo",
    open_batch: bool = False,
    batch_is_told: bool = False,
    exclude: Sequence[str] = (),
) -> RecomputePlan:
    """Makes the plan for a view.

    Args:
        view: the step.
        cost_model: says how long an op takes.
        policy: a key of `planner.POLICIES`.
        open_batch: whether the view's batch size is only nominal.
        batch_is_told: whether the user named that batch size, so that plans are judged at it.
        exclude: patterns of the names of layers of which nothing is recomputed.
    """
    timeline = simulate(view)
    scale = 1.0
    if open_batch and not batch_is_told:
        scale = evaluation.judging_scale(view, timeline)
    small = 1.0 if open_batch else None

    def decide(part: GraphView) -> list[list[RegionDecision]]:
        times = timeline if part is view else simulate(part)
        found = _partitions(part, policy, exclusion.excluded_nodes(part, exclude))
        return [planner.POLICIES[policy](part, regions, cost_model, times) for regions in found]

    schedule = evaluation.Schedule() if policy == "none" else evaluation.schedule_of(view)
    proposals = decide(view)

    def best(part: GraphView) -> evaluation.Choice:
        times = timeline if part is view else simulate(part)
        choices = [
            evaluation.choose(part, decisions, schedule, times, scale, small)
            for decisions in proposals
        ]
        return min(choices, key=lambda c: c.after.total_bytes)

    loops = [
        loop_planner.keep(choice, loop, "excluded", in_order=False)
        if exclusion.matches(choice.plan.loop, exclude)
        else choice
        for choice, loop in zip(loop_planner.plan_loops(view, decide), view.loops, strict=True)
    ]
    if any(loop.plan.recompute for loop in loops):
        loops, choice = _with_loops(view, loops, best, scale, small)
    else:
        choice = best(view)
    batch_size = round((view.batch_size or 1) * scale) if open_batch else None
    in_loops = any(loop.plan.recompute for loop in loops)
    note = " ".join(filter(None, ("" if in_loops else choice.note, _kept_whole(view))))
    return RecomputePlan(
        policy,
        choice.decisions,
        choice.before,
        choice.after,
        batch_size,
        choice.schedule.untied,
        choice.schedule.sums,
        tuple(loop.plan for loop in loops),
        note,
    )


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
        pairs = zip(loops, view.loops, strict=True)
        kept = [loop_planner.keep(given, loop, reason) for given, loop in pairs]
        return kept, best(view)
    before = evaluation.peak_memory(view, baseline)
    choice = dataclasses.replace(choice, before=before, after=evaluation.peak_memory(after, found))
    return chosen, choice


def plan_step(
    losses: Sequence[tf.Tensor],
    gradients: Sequence[tf.Tensor],
    policy: str,
    cost_model: CostModel,
    batch_size: int | None = None,
    exclude: Sequence[str] = (),
) -> tuple[Trace, RecomputePlan]:
    """Traces and plans a step that is being traced; see `tracing.trace_step` for the arguments.

    Returns:
        The trace and the plan, not carried out yet.

    Raises:
        exclusion.UnmatchedPatternError: a pattern in `exclude` matches nothing.
    """
    start = time.perf_counter()
    with paused_collector():
        trace = trace_step(losses, gradients, batch_size)
        exclusion.check(trace.view, exclude)
        told = batch_size is not None
        plan = plan_view(trace.view, cost_model, policy, trace.open_batch, told, exclude)
    plan = dataclasses.replace(plan, name=getattr(trace.graph, "name", ""))
    _logger.info(
        "Echo plan for %s: %d of %d regions recomputed, predicted peak %s -> %s (%.2fx), planned "
        "in %.2f s.%s",
        plan.name,
        len(plan.recomputed),
        len(plan.decisions),
        format_bytes(plan.before.total_bytes),
        format_bytes(plan.after.total_bytes),
        plan.ratio,
        time.perf_counter() - start,
        f" {plan.note}" if plan.note else "",
    )
    return trace, plan


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
    if policy == "none" or len(merged) == len(fine) or len(view.nodes) > _MERGED_NODES:
        return [fine]
    return [fine, merged]


def _kept_whole(view: GraphView) -> str:
    """Which loops, calls and conditionals of the forward pass nothing looks into."""
    planned = {loop.forward for loop in view.loops}
    kept = collections.Counter(
        node.op
        for node in view.nodes
        if not node.backward
        and node.id not in planned
        and op_traits.traits_of(node.op).kind is Kind.CONTROL_FLOW
    )
    if not kept:
        return ""
    listed = ", ".join(f"{count} {op}" for op, count in sorted(kept.items()))
    return f"Kept whole: {listed}."

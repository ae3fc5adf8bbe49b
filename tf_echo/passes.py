"""The whole way from a traced step to a plan.

Trace, partition, solve, judge. Carrying the plan out is `rewriter.rewrite`.
"""

import collections
import contextlib
import dataclasses
import gc
import logging
import time
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tf_echo import evaluation, op_traits, planner, regions
from tf_echo.cost_model import CostModel
from tf_echo.graph_view import GraphView
from tf_echo.memory_model import simulate
from tf_echo.op_traits import Kind
from tf_echo.plan import RecomputePlan, format_bytes
from tf_echo.tracing import Trace, trace_step

_logger = logging.getLogger(__name__)

_MERGED_NODES = 10_000
"""Above this size the second partition is not tried: it would double the time to plan."""


def plan_view(
    view: GraphView,
    cost_model: CostModel,
    policy: str = "echo",
    open_batch: bool = False,
    batch_is_told: bool = False,
) -> RecomputePlan:
    """Makes the plan for a view.

    Args:
        view: the step.
        cost_model: says how long an op takes.
        policy: a key of `planner.POLICIES`.
        open_batch: whether the view's batch size is only nominal.
        batch_is_told: whether the user named that batch size, so that plans are judged at it.
    """
    timeline = simulate(view)
    scale = 1.0
    if open_batch and not batch_is_told:
        scale = evaluation.judging_scale(view, timeline)
    small = 1.0 if open_batch else None
    schedule = evaluation.Schedule() if policy == "none" else evaluation.schedule_of(view)
    choices = []
    for found in _partitions(view, policy):
        decisions = planner.POLICIES[policy](view, found, cost_model, timeline)
        choices.append(evaluation.choose(view, decisions, schedule, timeline, scale, small))
    choice = min(choices, key=lambda c: c.after.total_bytes)
    batch_size = round((view.batch_size or 1) * scale) if open_batch else None
    note = " ".join(filter(None, (choice.note, _kept_whole(view))))
    return RecomputePlan(
        policy,
        choice.decisions,
        choice.before,
        choice.after,
        batch_size,
        choice.schedule.untied,
        choice.schedule.sums,
        note,
    )


def plan_step(
    losses: Sequence[tf.Tensor],
    gradients: Sequence[tf.Tensor],
    policy: str,
    cost_model: CostModel,
    batch_size: int | None = None,
) -> tuple[Trace, RecomputePlan]:
    """Traces and plans a step that is being traced; see `tracing.trace_step` for the arguments.

    Returns:
        The trace and the plan, not carried out yet.
    """
    start = time.perf_counter()
    with paused_collector():
        trace = trace_step(losses, gradients, batch_size)
        plan = plan_view(
            trace.view, cost_model, policy, trace.open_batch, batch_is_told=batch_size is not None
        )
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


def _partitions(view: GraphView, policy: str) -> list[list[regions.Region]]:
    """The partitions to try.

    By the number of heavy ops, and with what residual connections join in one.
    """
    fine = regions.partition(view)
    merged = regions.merge(view, fine)
    if policy == "none" or len(merged) == len(fine) or len(view.nodes) > _MERGED_NODES:
        return [fine]
    return [fine, merged]


def _kept_whole(view: GraphView) -> str:
    """Which loops, calls and conditionals the forward pass holds; nothing looks into them."""
    kept = collections.Counter(
        node.op
        for node in view.nodes
        if not node.backward and op_traits.traits_of(node.op).kind is Kind.CONTROL_FLOW
    )
    if not kept:
        return ""
    listed = ", ".join(f"{count} {op}" for op, count in sorted(kept.items()))
    return f"Kept whole: {listed}."

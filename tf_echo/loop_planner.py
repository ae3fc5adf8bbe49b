"""Plan the bodies of loops, with the planner that plans whole steps.

The body of a loop runs many times, and what its gradient reads is kept each time. So what a body
keeps weighs as often as it runs, and what recomputing needs for a moment weighs once. Constants of
the loop cost nothing to keep (figure 8 of the paper), what changes from one iteration to the next
is there anyway.
"""

import bisect
import dataclasses
from collections.abc import Callable, Sequence

from tf_echo import evaluation, loop_memory
from tf_echo.graph_view import GraphView, Loop
from tf_echo.loop_memory import LoopMemory
from tf_echo.plan import LoopPlan, RegionDecision, format_bytes

Decide = Callable[[GraphView], list[list[RegionDecision]]]
"""Ways to decide upon the regions of a body."""

_MIN_SHARE = 0.05
"""A loop is recomputed if that saves at least this part of what it holds."""


@dataclasses.dataclass(frozen=True)
class LoopChoice:
    """A loop's plan, and what the loop then keeps and needs."""

    plan: LoopPlan
    memory: LoopMemory
    before: LoopMemory
    """The same without the plan."""


def plan_loops(view: GraphView, decide: Decide) -> list[LoopChoice]:
    """A plan for each loop of a view, each judged by itself."""
    return [_plan_loop(view, loop, decide) for loop in view.loops]


def keep(choice: LoopChoice, reason: str, in_order: bool = True) -> LoopChoice:
    """The same loop with nothing recomputed; its iterations may still wait for one another."""
    plan = _keep(choice.plan, reason, in_order)
    return LoopChoice(plan, choice.before, choice.before)


def _keep(plan: LoopPlan, reason: str, in_order: bool) -> LoopPlan:
    return dataclasses.replace(
        plan,
        recompute=False,
        after_bytes=plan.before_bytes,
        reason=reason,
        in_order=plan.in_order and in_order,
        decisions=tuple(evaluation.drop(d, reason) for d in plan.decisions),
        reread=(),
        sums=(),
        loops=tuple(_keep(inner, reason, in_order) for inner in plan.loops),
    )


def _plan_loop(view: GraphView, loop: Loop, decide: Decide) -> LoopChoice:
    inner = plan_loops(loop.body, decide)
    memories = {place: choice.memory for place, choice in enumerate(inner)}
    body = loop_memory.resized(loop.body, memories)
    before = loop_memory.loop_memory(loop, loop.body)
    sums = () if loop.compiled else evaluation.schedule_of(body).sums
    trials = []
    for decisions in decide(body):
        chosen = evaluation.drop_trivial(decisions)
        after, rewired = _carry_out(loop, body, chosen, sums)
        trials.append((_weight(loop, after), chosen, after, rewired))
    weight, decisions, memory, rewired = min(trials, key=lambda trial: trial[0])
    choice = LoopChoice(
        LoopPlan(
            view.nodes[loop.forward].name,
            loop.trips,
            loop.trips_known,
            True,
            before.kept.total,
            memory.kept.total,
            "fewer bytes are kept",
            not loop.compiled,
            tuple(decisions),
            tuple(loop_memory.read_again(loop, rewired)),
            sums,
            tuple(choice.plan for choice in inner),
        ),
        memory,
        before,
    )
    if weight >= (1 - _MIN_SHARE) * _weight(loop, before):
        return keep(choice, _why_keep(before, memory))
    return choice


def _why_keep(before: LoopMemory, after: LoopMemory) -> str:
    if not before.kept.total:
        return "it keeps nothing"
    return (
        f"would keep {format_bytes(after.kept.total)} of {format_bytes(before.kept.total)} an "
        "iteration"
    )


def _weight(loop: Loop, memory: LoopMemory) -> int:
    """The most that the loop holds besides its inputs and results."""
    work = max(memory.forward_work.total, memory.backward_work.total)
    return loop.trips * memory.kept.total + work


def apply(view: GraphView, choices: Sequence[LoopChoice]) -> GraphView:
    """The view with what its loops keep and need as chosen."""
    return loop_memory.resized(view, {place: c.memory for place, c in enumerate(choices)})


def planned(view: GraphView, plans: Sequence[LoopPlan]) -> GraphView:
    """The view with what its loops keep and need when plans are carried out.

    Args:
        view: the step.
        plans: for each loop of the view, in order.
    """
    memories = {
        place: _memory(view.loops[place], plan)
        for place, plan in enumerate(plans)
        if plan.recompute
    }
    return loop_memory.resized(view, memories)


def _memory(loop: Loop, plan: LoopPlan) -> LoopMemory:
    return _carry_out(loop, planned(loop.body, plan.loops), plan.decisions, plan.sums)[0]


def _carry_out(
    loop: Loop, body: GraphView, decisions: Sequence[RegionDecision], sums: tuple[str, ...]
) -> tuple[LoopMemory, GraphView]:
    """What the loop keeps and needs after decisions upon its body, and the body then."""
    rewired = evaluation.rewire(body, decisions, evaluation.Schedule(sums=sums), True).view
    return loop_memory.loop_memory(loop, rewired, reread=True), rewired


def choose(
    view: GraphView,
    choices: Sequence[LoopChoice],
    peak: Callable[[GraphView], int],
    tolerance: float,
) -> list[LoopChoice]:
    """Leaves the loops as they are that the peak does not depend on.

    Args:
        view: the step.
        choices: for each loop of the view.
        peak: the peak of a view of the step, all else being decided.
        tolerance: by which part the peak may rise.
    """
    limit = peak(apply(view, choices)) * (1 + tolerance)
    places = [p for p, c in enumerate(choices) if c.plan.recompute]
    places.sort(key=lambda p: choices[p].plan.released_bytes)

    def without(count: int) -> list[LoopChoice]:
        found = list(choices)
        for p in places[:count]:
            found[p] = keep(found[p], "the peak does not depend on it")
        return found

    # The more loops keep what they kept, the higher the peak.
    spared = bisect.bisect_left(
        range(1, len(places) + 1), True, key=lambda n: peak(apply(view, without(n))) > limit
    )
    return without(spared)

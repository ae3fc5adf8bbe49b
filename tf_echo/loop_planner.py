"""Plan the bodies of loops, with the planner that plans whole steps.

The body of a loop runs many times, and what its gradient reads is kept each time. So what a body
keeps weighs as often as it runs, and what recomputing needs for a moment weighs once. Constants of
the loop cost nothing to keep (figure 8 of the paper), what changes from one iteration to the next
is there anyway.
"""

import bisect
import dataclasses
from collections.abc import Callable, Collection, Sequence

from tf_echo import evaluation, loop_evaluation, loop_memory
from tf_echo.graph_view import GraphView, Loop
from tf_echo.loop_memory import LoopMemory
from tf_echo.plan import LoopPlan, RegionDecision, format_bytes

Decide = Callable[[GraphView], list[list[RegionDecision]]]
"""Ways to decide upon the regions of a body."""

Untouched = Callable[[str, Loop], str]
"""For a loop and its name why it is to be left alone, or nothing."""

_MIN_SHARE = 0.05
"""A loop is recomputed if that saves at least this part of what it holds."""


@dataclasses.dataclass(frozen=True)
class LoopChoice:
    """A loop's plan, and what the loop then keeps and needs."""

    plan: LoopPlan
    memory: LoopMemory
    before: LoopMemory
    """The same without the plan."""


def plan_loops(
    view: GraphView,
    decide: Decide,
    untouched: Untouched = lambda name, loop: "",
    judged: bool = True,
    without: Collection[str] = (),
) -> list[LoopChoice]:
    """A plan for each loop of a view, each judged by itself.

    Args:
        view: a step, or an iteration of a loop around these.
        decide: proposes what to recompute of a body.
        untouched: which loops are to be left alone.
        judged: whether loops are left alone that would gain too little, and the others are tidied.
        without: see `passes.TECHNIQUES`.
    """
    choices = []
    for loop in view.loops:
        choice = _plan_loop(view, loop, decide, untouched, judged, without)
        reason = untouched(choice.plan.loop, loop)
        choices.append(keep(choice, reason, in_order=False) if reason else choice)
    return choices


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
        loops=tuple(
            _keep(inner, reason if inner.recompute else inner.reason, in_order)
            for inner in plan.loops
        ),
    )


def _plan_loop(
    view: GraphView,
    loop: Loop,
    decide: Decide,
    untouched: Untouched,
    judged: bool,
    without: Collection[str],
) -> LoopChoice:
    inner = plan_loops(loop.body, decide, untouched, judged, without)
    body = apply(loop.body, inner)
    before = loop_memory.loop_memory(loop, loop.body)
    tidied = judged and not loop.compiled
    # Nothing in a body waits for gradients: its iterations are short.
    sums = evaluation.schedule_of(body, {*without, "waits"}).sums if tidied else ()
    trials = []
    for decisions in decide(body):
        chosen = evaluation.drop_trivial(decisions) if judged else decisions
        after, rewired = loop_evaluation.carry_out(loop, body, chosen, sums)
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
            tidied and "order" not in without,
            tuple(decisions),
            tuple(loop_memory.read_again(loop, rewired)),
            sums,
            tuple(choice.plan for choice in inner),
        ),
        memory,
        before,
    )
    changed = any(d.recompute for d in decisions) or any(c.plan.recompute for c in inner)
    if not judged and not changed:
        return keep(choice, "nothing in it is to be recomputed")
    if judged and weight >= (1 - _MIN_SHARE) * _weight(loop, before):
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

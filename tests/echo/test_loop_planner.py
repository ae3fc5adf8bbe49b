"""What loops keep of each iteration, and which of it is made again, on bodies of a few nodes."""

import dataclasses
from collections.abc import Collection

import pytest

from tf_echo import loop_memory, loop_planner, passes, planner, regions
from tf_echo.cost_model import UnitCost
from tf_echo.graph_view import GraphView, Loop, LoopBytes, parse_view
from tf_echo.loop_planner import LoopChoice
from tf_echo.memory_model import simulate
from tf_echo.plan import LoopPlan, PeakMemory, RecomputePlan, RegionDecision
from tf_echo.report import report

KIB = 1024


def with_loops(
    text: str,
    *bodies: GraphView,
    trips: int = 8,
    trips_known: bool = True,
    compiled: bool = False,
    changed: Collection[str] = (),
) -> GraphView:
    """A view whose nodes `loop0`, `back0`, `loop1`, ... are loops of these bodies, with gradients.

    The last four outputs of a loop, and the last two of its gradient, are for what is kept and
    needed.
    """
    view = parse_view(text)
    loops = []
    for place, body in enumerate(bodies):
        forward, backward = view.node(f"loop{place}"), view.node(f"back{place}")
        settings = (trips, trips_known, compiled, body)
        tensors = (forward.outputs[-4:-2], forward.outputs[-2:], backward.outputs[-2:])
        loops.append(Loop(forward.id, backward.id, *settings, *tensors, frozenset(changed)))
    view = dataclasses.replace(view, loops=tuple(loops))
    memories = {p: loop_memory.loop_memory(loop, loop.body) for p, loop in enumerate(loops)}
    return loop_memory.resized(view, memories)


def step(body: GraphView, **settings) -> GraphView:
    """A step that is one loop."""
    text = """
        x = Placeholder [1KiB]
        loop0 = While x [1KiB, 0B, 0B fixed, 0B, 0B fixed]
        loss = Mean loop0 [4B]
        backward:
        g = Const [4B fixed]
        back0 = While g loop0:1 loop0:2 [1KiB, 0B, 0B fixed]
    """
    return with_loops(text, body, **settings)


def decide(view: GraphView) -> list[list[RegionDecision]]:
    """What Algorithm 1 proposes."""
    return [planner.plan_echo(view, regions.partition(view), UnitCost(), simulate(view))]


def plan(view: GraphView) -> LoopPlan:
    """The plan of a step's loop, judged by itself."""
    (choice,) = loop_planner.plan_loops(view, decide)
    return choice.plan


def attention() -> GraphView:
    return parse_view("""
        state = LoopVariable [1KiB]
        keys = Placeholder [16KiB]
        w = Placeholder [0B resource fixed]
        read = ReadVariableOp w [2KiB fixed]
        query = MatMul state read [1KiB]
        sum = AddV2 query keys [16KiB]
        energy = Tanh sum [16KiB]
        one = Const [4B int32 fixed]
        score = Sum energy one [1KiB]
        next = MatMul score read [1KiB]
        end = LoopEnd next [0B fixed]
        backward:
        dnext = LoopVariable end [1KiB]
        dscore = MatMul dnext read [1KiB]
        denergy = BroadcastTo dscore one [16KiB]
        dsum = TanhGrad energy denergy [16KiB]
        dquery = Sum dsum one [1KiB]
        dstate = MatMul dquery read [1KiB]
        loss: end
    """)


def test_print():
    v = step(attention())
    print(v)
    print(plan(v))
    print(loop_planner.plan_loops(v, decide)[0])
    p = passes.plan_view(v, passes.Settings(cost_model=UnitCost()))
    print(report(p))
    assert 0

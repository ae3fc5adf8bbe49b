"""Make the planner go further than it would, to put more weight on the rewriter."""

import collections
import dataclasses
from collections.abc import Callable, Sequence

import pytest
import tensorflow as tf

from tf_echo import (
    evaluation,
    gating,
    loop_planner,
    packing,
    passes,
    planner,
    rewriter,
    scheduling,
    workspaces,
)
from tf_echo.cost_model import CostModel
from tf_echo.graph_view import GraphView
from tf_echo.memory_model import Timeline
from tf_echo.plan import RecomputePlan, RegionDecision
from tf_echo.regions import Region
from tf_echo.tracing import Trace

PLANNERS = ("echo", "everything", "proposed")
"""As the planner decides; every op that may run twice; all that Algorithm 1 proposes, whether or
not the peak is lower, bits of all that may be packed."""


def ignore_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets small models pay: what a convolution's gradient needs while it runs outweighs them."""
    monkeypatch.setattr(workspaces, "_RULES", {})


def force(monkeypatch: pytest.MonkeyPatch, planner_name: str) -> None:
    """Makes policy "echo" one of `PLANNERS`; the forced ones also build up small sums by terms."""
    if planner_name != "echo":
        monkeypatch.setattr(evaluation, "choose", _choose_all)
        monkeypatch.setattr(evaluation, "drop_trivial", list)
        monkeypatch.setattr(scheduling, "_MIN_SUMMED_BYTES", 0)
        monkeypatch.setattr(packing, "MIN_ELEMENTS", 0)
        monkeypatch.setattr(loop_planner, "_MIN_SHARE", -float("inf"))
        monkeypatch.setattr(passes, "_with_loops", _all_loops)
    if planner_name == "everything":
        monkeypatch.setitem(planner.POLICIES, "echo", planner.Policy(_recompute_everything))


def record_replayed_ops(monkeypatch: pytest.MonkeyPatch) -> collections.Counter[str]:
    """Counts, by op type, the copies whose results are read; it grows while steps are traced."""
    found: collections.Counter[str] = collections.Counter()
    seen: set[tf.Operation] = set()
    carry_out = rewriter.rewrite

    def rewrite(trace: Trace, plan: RecomputePlan) -> None:
        carry_out(trace, plan)
        new = [copy for copy in rewriter.copies_of(trace.graph) if copy not in seen]
        seen.update(new)
        found.update(c.type for c in new if any(output.consumers() for output in c.outputs))

    monkeypatch.setattr(rewriter, "rewrite", rewrite)
    return found


def _choose_all(
    view: GraphView,
    decisions: Sequence[RegionDecision],
    schedule: evaluation.Schedule,
    *_: object,
) -> evaluation.Choice:
    rewired = evaluation.rewire(view, decisions, schedule)
    bits = evaluation.find_bits(view, decisions, rewired)
    return evaluation.take(view, decisions, dataclasses.replace(schedule, bits=bits), 1.0)


def _all_loops(
    view: GraphView,
    loops: list[loop_planner.LoopChoice],
    best: Callable[[GraphView], evaluation.Choice],
    *_: object,
) -> tuple[list[loop_planner.LoopChoice], evaluation.Choice]:
    return loops, best(loop_planner.apply(view, loops))


def _recompute_everything(
    view: GraphView,
    regions: Sequence[Region],
    cost_model: CostModel,
    timeline: Timeline,
    *_: object,
) -> list[RegionDecision]:
    readers = {region.index: _readers(view, region) for region in regions}
    readers = {index: found for index, found in readers.items() if found}
    gates = gating.find_gates(view, readers, gating.steps_of(timeline))
    return [_decision(view, region, gates.get(region.index)) for region in regions]


def _readers(view: GraphView, region: Region) -> list[int]:
    made = (tensor for node in region.nodes for tensor in view.nodes[node].outputs)
    return [reader for tensor in made for reader in gating.backward_readers(view, tensor)]


def _decision(view: GraphView, region: Region, gate: int | None) -> RegionDecision:
    nodes = () if gate is None else tuple(view.nodes[node].name for node in region.nodes)
    return RegionDecision(
        region.index,
        region.layer,
        len(region.nodes),
        recompute=gate is not None,
        released_bytes=0,
        kept_bytes=0,
        added_seconds=0.0,
        reason="forced",
        nodes=nodes,
        gate="" if gate is None else view.tensor_name(gate),
    )

"""Judge plans of loops: what loops keep and need when plans are carried out.

As in `evaluation`, the bodies are changed exactly as the rewriter changes TensorFlow's.
"""

from collections.abc import Sequence

from tf_echo import evaluation, loop_memory
from tf_echo.graph_view import GraphView, Loop
from tf_echo.loop_memory import LoopMemory
from tf_echo.plan import LoopPlan, RegionDecision


def planned(view: GraphView, plans: Sequence[LoopPlan]) -> GraphView:
    """The view with what its loops keep and need when plans are carried out.

    Args:
        view: the step.
        plans: of loops of the view.
    """
    chosen = {plan.loop: plan for plan in plans if plan.recompute}
    memories = {}
    for place, loop in enumerate(view.loops):
        name = view.nodes[loop.forward].name
        if name in chosen:
            memories[place] = _memory(loop, chosen[name])
    return loop_memory.resized(view, memories)


def _memory(loop: Loop, plan: LoopPlan) -> LoopMemory:
    return carry_out(loop, planned(loop.body, plan.loops), plan.decisions, plan.sums)[0]


def carry_out(
    loop: Loop, body: GraphView, decisions: Sequence[RegionDecision], sums: tuple[str, ...]
) -> tuple[LoopMemory, GraphView]:
    """What the loop keeps and needs after decisions upon its body, and the body then."""
    rewired = evaluation.rewire(body, decisions, evaluation.Schedule(sums=sums), True).view
    return loop_memory.loop_memory(loop, rewired, reread=True), rewired

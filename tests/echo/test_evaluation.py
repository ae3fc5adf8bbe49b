"""What a plan does to a view, and which decisions survive."""

import dataclasses

from tf_echo import evaluation, passes, planner, regions, scheduling
from tf_echo.cost_model import RooflineCost, UnitCost
from tf_echo.graph_view import GraphView, parse_view
from tf_echo.memory_model import simulate
from tf_echo.plan import RecomputePlan

LAYERS = 6


def network(size: str = "1MiB", weights: str = "4KiB") -> GraphView:
    """Layers of matmul, exp, exp, with gradients and updates."""
    lines = [f"x = Placeholder [{size}]", "lr = Placeholder [0B resource fixed]"]
    below = "x"
    for i in range(LAYERS):
        lines += [
            f"v{i} = Placeholder [0B resource fixed]",
            f"w{i} = ReadVariableOp v{i} [{weights} fixed]",
            f"h{i} = MatMul {below} w{i} [{size}]",
            f"a{i} = Exp h{i} [{size}]",
            f"b{i} = Exp a{i} [{size}]",
        ]
        below = f"b{i}"
    lines += [f"loss = Mean {below} [4B]", "backward:", "one = Const [4B fixed]"]
    gradient = "one"
    for i in reversed(range(LAYERS)):
        source = f"b{i - 1}" if i else "x"
        lines += [
            f"da{i} = Mul {gradient} b{i} [{size}]",
            f"dh{i} = Mul da{i} a{i} [{size}]",
            f"dw{i} = MatMul {source} dh{i} [{weights} fixed]",
            f"dx{i} = MatMul dh{i} w{i} [{size}]",
        ]
        gradient = f"dx{i}"
    for i in range(LAYERS):
        lines += [
            f"rate{i} = ReadVariableOp lr [4B fixed]",
            f"u{i} = Mul dw{i} rate{i} [{weights} fixed]",
            f"s{i} = AssignSubVariableOp v{i} u{i} []",
        ]
    lines.append("loss: loss")
    return parse_view("\n".join(lines))


def schedule(plan: RecomputePlan) -> evaluation.Schedule:
    return evaluation.Schedule(plan.sums)


def test_each_layer_is_recomputed_and_the_peak_falls():
    plan = passes.plan_view(network(), passes.Settings(cost_model=UnitCost()))
    assert len(plan.recomputed) >= LAYERS - 1
    assert plan.ratio > 1.4


def test_the_prediction_is_the_simulated_peak_of_the_rewired_step():
    view = network()
    plan = passes.plan_view(view, passes.Settings(cost_model=UnitCost()))
    after = simulate(evaluation.rewire(view, plan.decisions, schedule(plan)).view)
    assert plan.before.total_bytes == simulate(view).peak_bytes
    assert plan.after.total_bytes == after.peak_bytes
    for peak in (plan.before, plan.after):
        assert peak.total_bytes == peak.weight_bytes + peak.residual_bytes + peak.workspace_bytes


def test_rewiring_keeps_every_original_node_and_stays_consistent():
    view = network()
    plan = passes.plan_view(view, passes.Settings(cost_model=UnitCost()))
    rewired = evaluation.rewire(view, plan.decisions, schedule(plan)).view
    rewired.verify()
    names = {node.name for node in rewired.nodes}
    assert names >= {node.name for node in view.nodes}


def test_the_empty_plan_changes_nothing():
    view = network()
    assert str(evaluation.rewire(view, []).view) == str(view)


def test_what_is_recomputed_waits_for_the_weight_gradients_before_it():
    view = network()
    plan = passes.plan_view(view, passes.Settings(cost_model=UnitCost()))
    rewired = evaluation.rewire(view, plan.decisions, schedule(plan)).view
    copy = next(
        n
        for n in rewired.nodes
        if n.name.startswith("a2/recompute") or n.name.startswith("b2/recompute")
    )
    waited = {rewired.nodes[c].name for c in copy.control_inputs}
    assert "dw4" in waited or "dw5" in waited or "dw3" in waited


def test_an_input_gradient_waits_for_its_weight_gradient_and_the_update_for_both():
    view = network()
    names = {(view.nodes[a].name, view.nodes[b].name) for a, b in scheduling.put_offs(view)}
    assert ("dw3", "dx3") in names
    assert ("dx3", "u3") in names


def test_a_plan_that_does_not_lower_the_peak_is_dropped_and_says_so():
    view = network(size="4KiB", weights="8MiB")
    timeline = simulate(view)
    decisions = planner.plan_echo(view, regions.partition(view), RooflineCost(), timeline)
    choice = evaluation.choose(view, decisions, evaluation.Schedule(), timeline, 1.0)
    assert not any(d.recompute for d in choice.decisions)
    assert choice.before == choice.after
    assert "would not be lower" in choice.note


def test_a_region_that_the_peak_does_not_depend_on_is_kept():
    lines = str(network()).splitlines()
    # A huge temporary in the forward pass makes the peak, whatever is recomputed.
    lines.insert(0, "p = Placeholder [4B]")
    lines.insert(1, "t = MatMul p p [512MiB]")
    lines.insert(2, "q = MatMul t t [4B]")
    plan = passes.plan_view(parse_view("\n".join(lines)), passes.Settings(cost_model=UnitCost()))
    assert not plan.recomputed


def test_an_open_batch_is_judged_where_activations_outweigh_variables():
    small = network(size="4KiB", weights="1MiB")
    view = dataclasses.replace(small, weight_bytes=LAYERS * 2**20, batch_size=32)
    closed = passes.plan_view(view, passes.Settings(cost_model=UnitCost()))
    opened = passes.plan_view(view, passes.Settings(cost_model=UnitCost()), open_batch=True)
    assert not closed.recomputed
    assert len(opened.recomputed) >= LAYERS - 2
    assert opened.batch_size > 32 * 100

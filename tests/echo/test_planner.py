"""The paper's figures as graphs of a few nodes, and Algorithm 1 against brute force."""

import itertools
import random
import sys

import pytest

from tf_echo import evaluation, gating, passes, planner, regions
from tf_echo.cost_model import RooflineCost, UnitCost
from tf_echo.graph_view import GraphView, parse_view
from tf_echo.memory_model import simulate
from tf_echo.plan import RegionDecision


def decide(view: GraphView) -> list[RegionDecision]:
    """What Algorithm 1 proposes, before anything is simulated."""
    return planner.plan_echo(view, regions.partition(view), UnitCost(), simulate(view))


def text(view: GraphView) -> list[str]:
    return [str(decision) for decision in decide(view)]


def test_figure_6_a_chain_is_recomputed_from_its_input():
    view = parse_view("""
        x = Placeholder [1MiB]
        w = VarHandleOp [0B resource fixed]
        r = ReadVariableOp w [1KiB fixed]
        h = MatMul x r [1MiB]
        a = Exp h [1MiB]
        b = Exp a [1MiB]
        c = Exp b [1MiB]
        d = Exp c [1MiB]
        loss = Mean d [4B]
        backward:
        g = Const [4B fixed]
        s = Shape d [8B int32 fixed]
        dd = BroadcastTo g s [1MiB]
        dc = Mul dd d [1MiB]
        db = Mul dc c [1MiB]
        da = Mul db b [1MiB]
        dh = Mul da a [1MiB]
        dw = MatMul x dh [1KiB fixed]
    """)
    # Four tensors become one, as in the paper. It is a rather than h: as many bytes, one op less to
    # run again.
    assert text(view) == ["region 0: recompute 3 ops (releases 3 MiB, keeps 0 B)"]


def test_figure_7_add_then_tanh_is_kept_because_inputs_outweigh_output():
    view = parse_view("""
        p = Placeholder [1MiB]
        x = MatMul p p [1MiB]
        y = MatMul p p [1MiB]
        s = AddV2 x y [1MiB]
        z = Tanh s [1MiB]
        loss = Mean z [4B]
        backward:
        g = Const [4B fixed]
        dz = Neg g [1MiB]
        ds = TanhGrad z dz [1MiB]
    """)
    assert text(view) == ["region 0: keep (releases 1 MiB, would keep 2 MiB)"]


def shared_broadcast(count: int, between: str = "") -> GraphView:
    """Figure 8: `count` tensors of N = 1 KiB, each added to the same tensor of T x N and put
    through tanh."""
    lines = ["p = Placeholder [1KiB]", f"k = MatMul p p [{count}KiB]", "q0 = MatMul p p [1KiB]"]
    for t in range(count):
        if t:
            lines.append(f"q{t} = MatMul {f'o{t - 1}' if between else 'p'} p [1KiB]")
        lines.append(f"s{t} = AddV2 q{t} k [{count}KiB]")
        lines.append(f"z{t} = Tanh s{t} [{count}KiB]")
        lines.append(f"o{t} = Sum z{t} p [1KiB]")
    lines.append(f"total = AddN {' '.join(f'o{t}' for t in range(count))} [1KiB]")
    lines += ["loss = Mean total [4B]", "backward:", "g = Const [4B fixed]", "dz = Neg g [1KiB]"]
    lines += [f"dq{t} = TanhGrad z{t} dz [{count}KiB]" for t in reversed(range(count))]
    return parse_view("\n".join(lines))


def test_figure_8_shared_broadcast_is_recomputed_from_t_times_2n_bytes():
    decisions = [d for d in decide(shared_broadcast(16)) if d.recompute]
    assert sum(d.released_bytes for d in decisions) == 16 * 16 * 1024  # T x T x N
    assert sum(d.kept_bytes for d in decisions) == (16 + 16) * 1024  # T x 2N


@pytest.mark.parametrize(
    ("tied", "expected"),
    [
        ("l", [(("a",), "first", 2), (("b", "c"), "second", 2), (("d",), "third", 1)]),
        ("j", [(("a",), "first", 2), (("b", "c", "d"), "second", 3)]),
    ],
)
def test_what_is_independent_waits_for_its_own_gradient(tied, expected):
    text = f"""
        x = Placeholder [1MiB]
        h = MatMul x x [1MiB]
        k = Reshape h [1MiB]
        i = Placeholder [4B]
        j = Placeholder [4B]
        l = Placeholder [4B]
        a = AddV2 k i [1MiB]
        b = Mul k j [1MiB]
        c = Neg b [1MiB]
        d = Sub k {tied} [1MiB]
        p = MatMul a x [1MiB]
        q = MatMul c x [1MiB]
        r = MatMul d x [1MiB]
        all = AddN p q r [1MiB]
        loss = Mean all [4B]
        backward:
        g = Const [4B fixed]
        first = Mul g loss [1MiB]
        dw = MatMul a first [1MiB]
        second = MatMul dw first [1MiB]
        dc = MatMul c second [1MiB]
        db = Mul b dc [1MiB]
        third = MatMul db second [1MiB]
        dd = MatMul d third [1MiB]
        seed: g
    """
    view = parse_view(text)
    assert len(regions.partition(view)[0].nodes) == 5
    decisions = [d for d in decide(view) if d.recompute]
    assert [(d.nodes, d.gate, d.ops) for d in decisions] == expected
    assert [d.released_bytes for d in decisions] == [len(d.nodes) << 20 for d in decisions]


def test_figure_8_sharing_is_seen_across_regions_that_heavy_ops_separate():
    decisions = [d for d in decide(shared_broadcast(16, between="heavy")) if d.recompute]
    assert len(decisions) == 16
    assert sum(d.released_bytes for d in decisions) == 16 * 16 * 1024
    assert sum(d.kept_bytes for d in decisions) == (16 + 16) * 1024


@pytest.mark.parametrize(("count", "recomputed"), [(1, False), (2, False), (3, True), (8, True)])
def test_figure_13_sharing_pays_once_t_is_large_enough(count, recomputed):
    # T x 2N must be less than T x T x N.
    assert any(d.recompute for d in decide(shared_broadcast(count))) == recomputed


def test_figures_11_and_12_forward_walk_trims_add_and_tanh_one_after_the_other():
    view = parse_view("""
        p = Placeholder [1MiB]
        x = MatMul p p [1MiB]
        y = MatMul p p [1MiB]
        s = AddV2 x y [1MiB]
        z = Tanh s [1MiB]
        t = Tanh z [1MiB]
        loss = Mean t [4B]
        backward:
        g = Const [4B fixed]
        dt = Neg g [1MiB]
        dz = TanhGrad t dt [1MiB]
        ds = TanhGrad z dz [1MiB]
    """)
    (decision,) = decide(view)
    # The add goes (2 in, 1 out), the first tanh goes (1 in, 1 out, read by the backward pass); the
    # second is run again.
    assert decision.nodes == ("t",)


def test_figure_14_heavy_tail_is_never_run_again_but_its_input_is():
    view = parse_view("""
        p = Placeholder [1MiB]
        h = MatMul p p [1MiB]
        a = Exp h [1MiB]
        b = Exp a [1MiB]
        y = MatMul b p [1MiB]
        z = Square y [1MiB]
        loss = Mean z [4B]
        backward:
        g = Const [4B fixed]
        dy = Mul g y [1MiB]
        dw = MatMul b dy [1MiB]
        db = MatMul dy p [1MiB]
        da = Mul db b [1MiB]
        dh = Mul da a [1MiB]
    """)
    decision = next(d for d in decide(view) if d.recompute)
    # a is kept (h would cost as much), b is made from it again, y never is.
    assert decision.nodes == ("b",)
    assert decision.gate == "dy"
    rewired = evaluation.rewire(view, [decision]).view
    assert sum(node.op == "MatMul" for node in rewired.nodes) == 4
    assert rewired.tensor_name(rewired.node("dw").inputs[0]) == "b/recompute0"


def wide_input() -> GraphView:
    """A product whose large input is made of a small tensor, and read by its gradient."""
    return parse_view("""
        p = Placeholder [1MiB]
        m = Placeholder [16KiB]
        h = MatMul p m [16KiB]
        wide = Tile h m [1MiB]
        y = MatMul wide p [16KiB]
        loss = Mean y [4B]
        backward:
        g = Const [4B fixed]
        dy = Neg g [16KiB]
        dw = MatMul wide dy [1MiB]
    """)


def test_prior_work_keeps_what_a_heavy_op_reads_we_do_not():
    assert text(wide_input())[0] == "region 0: recompute 1 ops (releases 1 MiB, keeps 16 KiB)"


def test_memory_that_is_kept_anyway_is_counted_once():
    view = parse_view("""
        p = Placeholder [1MiB]
        y = MatMul p p [1MiB]
        a = Square y [1MiB]
        b = Exp a [1MiB]
        loss = Mean b [4B]
        backward:
        g = Const [4B fixed]
        db = Neg g [1MiB]
        da = Mul db b [1MiB]
        dy = Mul da y [1MiB]
    """)
    # The square's gradient reads y in any case, so that recomputing from it keeps nothing more.
    assert text(view) == ["region 0: recompute 2 ops (releases 1 MiB, keeps 0 B)"]


def test_views_share_their_inputs_memory():
    view = parse_view("""
        p = Placeholder [1MiB]
        y = MatMul p p [1MiB]
        v = Reshape y p [1MiB]
        a = Exp v [1MiB]
        loss = Mean a [4B]
        backward:
        g = Const [4B fixed]
        da = Neg g [1MiB]
        dv = Mul da a [1MiB]
        dy = Mul dv y [1MiB]
    """)
    assert text(view) == ["region 0: recompute 1 ops (releases 1 MiB, keeps 0 B)"]


def test_reads_of_shapes_hold_nothing():
    view = parse_view("""
        p = Placeholder [1MiB]
        y = MatMul p p [1MiB]
        a = Exp y [1MiB]
        loss = Mean a [4B]
        backward:
        g = Const [4B fixed]
        s = Shape a [8B int32 fixed]
        da = BroadcastTo g s [1MiB]
    """)
    assert text(view) == ["region 0: keep (the backward pass reads nothing of it)"]


@pytest.mark.parametrize(
    "op", ["NoSuchOp", "While", "PartitionedCall", "RandomUniform", "MatMul", "Range"]
)
def test_unknown_heavy_and_stateful_ops_are_never_recomputed(op):
    view = parse_view(f"""
        p = Placeholder [1KiB]
        a = {op} p p p [1MiB]
        b = Exp a [1MiB]
        loss = Mean b [4B]
        backward:
        g = Const [4B fixed]
        db = Neg g [1MiB]
        da = Mul db b [1MiB]
        dp = Mul da a [1MiB]
    """)
    assert all("a" not in d.nodes for d in decide(view))


def test_a_statistic_is_kept_because_it_is_small_for_the_time_it_saves():
    view = parse_view("""
        p = Placeholder [1MiB]
        x = MatMul p p [1MiB]
        mean = Mean x [4KiB]
        c = Sub x mean [1MiB]
        e = Exp c [1MiB]
        f = Exp e [1MiB]
        loss = Mean f [4B]
        backward:
        g = Const [4B fixed]
        df = Neg g [1MiB]
        de = Mul df f [1MiB]
        dc = Mul de e [1MiB]
        dx = Mul dc c x [1MiB]
    """)
    assert decide(view)[0].nodes == ("c", "e", "f")


def test_a_dropout_mask_is_drawn_again_from_its_key():
    view = parse_view("""
        p = Placeholder [1MiB]
        shape = Const [8B int32 fixed]
        key = Placeholder [8B uint64 fixed]
        counter = Placeholder [16B uint64 fixed]
        alg = Const [4B int32 fixed]
        rate = Const [4B fixed]
        x = MatMul p p [1MiB]
        r = StatelessRandomUniformV2 shape key counter alg [1MiB]
        mask = GreaterEqual r rate [256KiB bool]
        d = SelectV2 mask x rate [1MiB]
        y = MatMul d p [1MiB]
        loss = Mean y [4B]
        backward:
        g = Const [4B fixed]
        dy = Neg g [1MiB]
        dw = MatMul d dy [1MiB]
        dd = MatMul dy p [1MiB]
        dx = SelectV2 mask dd rate [1MiB]
    """)
    decision = next(d for d in decide(view) if d.recompute)
    assert decision.nodes[:2] == ("r", "mask")
    guarded = gating.guarded_tensors(view, [view.node(n) for n in decision.nodes])
    assert "key" in {view.tensor_name(t) for t in guarded}


def random_view(seed: int) -> GraphView:
    """A forward pass of up to 7 ops with sizes from 1 to 8 KiB, and a backward op for each that
    reads some of them."""
    rng = random.Random(seed)
    lines, names, back = ["x = Placeholder [4KiB]", "h = MatMul x x [4KiB]"], ["h"], []
    for i in range(rng.randint(3, 7)):
        op = rng.choice(["Exp", "Tanh", "AddV2", "Mul", "Sum", "MatMul"])
        inputs = rng.choices(names[-3:], k=2 if op in ("AddV2", "Mul", "MatMul") else 1)
        lines.append(f"n{i} = {op} {' '.join(inputs)} [{rng.choice([1, 2, 4, 8])}KiB]")
        back.append((f"n{i}", [t for t in (f"n{i}", *inputs) if rng.random() < 0.6]))
        names.append(f"n{i}")
    lines += [
        f"loss = AddN {' '.join(names)} [4B]",
        "backward:",
        "c = Const [4B fixed]",
        "g = Neg c [4KiB]",
    ]
    gradient = "g"
    for name, reads in reversed(back):
        lines.append(f"d{name} = Mul {' '.join([gradient, *reads])} [{rng.choice([1, 2, 4])}KiB]")
        gradient = f"d{name}"
    return parse_view("\n".join(lines))


def best_peak(view: GraphView) -> int:
    """The lowest simulated peak of all ways to choose which ops to run again, by trying them
    all."""
    candidates = [n for r in regions.partition(view) for n in r.nodes]
    steps = gating.steps_of(simulate(view))
    best = simulate(view).peak_bytes
    for count in range(1, len(candidates) + 1):
        for chosen in itertools.combinations(candidates, count):
            readers = [
                r
                for n in chosen
                for t in view.nodes[n].outputs
                for r in gating.backward_readers(view, t)
            ]
            if not readers:
                continue
            gate = gating.find_gates(view, {0: readers}, steps)[0]
            names = tuple(view.nodes[n].name for n in chosen)
            decision = RegionDecision(
                0, "", len(names), True, 0, 0, 0.0, "", names, view.tensor_name(gate)
            )
            best = min(best, simulate(evaluation.rewire(view, [decision]).view).peak_bytes)
    return best


def test_never_above_the_baseline_and_near_the_optimum_on_random_graphs(record_property, capsys):
    gaps, gains = [], 0
    for seed in range(120):
        view = random_view(seed)
        plan = passes.plan_view(view, passes.Settings(cost_model=RooflineCost()))
        assert plan.after.total_bytes <= plan.before.total_bytes
        rewired = evaluation.rewire(view, plan.decisions, evaluation.Schedule(plan.sums)).view
        assert simulate(rewired).peak_bytes == plan.after.total_bytes
        optimum = best_peak(view)
        gains += optimum < plan.before.total_bytes
        gaps.append(plan.after.total_bytes / min(optimum, plan.after.total_bytes) - 1)
    mean = sum(gaps) / len(gaps)
    record_property("mean_gap_to_optimum", mean)
    with capsys.disabled():
        sys.stdout.write(
            f"\ngap to the optimum on {len(gaps)} random graphs ({gains} can gain): "
            f"mean {mean:.1%}, worst {max(gaps):.1%}\n"
        )
    assert gains > 20
    assert mean < 0.05


def test_plans_are_the_same_every_time():
    view = shared_broadcast(9, between="heavy")
    settings = passes.Settings(cost_model=UnitCost())
    assert passes.plan_view(view, settings) == passes.plan_view(view, settings)


def test_policy_none_keeps_everything():
    plan = passes.plan_view(shared_broadcast(9), passes.Settings("none", UnitCost()))
    assert not plan.recomputed
    assert plan.before == plan.after


@pytest.mark.parametrize(("reader", "moved"), [("Max", True), ("Min", True), ("Sum", False)])
def test_what_grappler_would_swap_with_a_largest_value_stays(reader, moved):
    view = parse_view(f"""
    x = Placeholder [1MiB]
    w = Placeholder [1KiB fixed]
    h = MatMul x w [1MiB]
    r = Relu h [1MiB]
    axis = Const [4B int32 fixed]
    m = {reader} r axis [4KiB]
    loss = Mean m [4B]
    backward:
    g = Mul r loss [1MiB]
    loss: loss
    """)
    found = [n for region in regions.partition(view) for n in region.nodes]
    assert (view.by_name["r"] not in found) == moved

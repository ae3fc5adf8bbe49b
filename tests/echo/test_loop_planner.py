"""What loops keep of each iteration, and which of it is made again, on bodies of a few nodes."""

import dataclasses
import json
from collections.abc import Collection

import pytest

from tf_echo import evaluation, loop_evaluation, loop_memory, loop_planner, passes, planner, regions
from tf_echo.cost_model import UnitCost
from tf_echo.graph_view import Amount, GraphView, Loop, parse_view
from tf_echo.loop_memory import LoopMemory
from tf_echo.memory_model import simulate
from tf_echo.plan import LoopPlan, PeakMemory, RecomputePlan, RegionDecision
from tf_echo.report import report

KIB, MIB = 2**10, 2**20
NO_PEAK = PeakMemory(0, 0, 0, 0)
ECHO = passes.Settings(cost_model=UnitCost())


def with_loops(
    text: str,
    *bodies: GraphView,
    trips: int = 8,
    trips_known: bool = True,
    compiled: bool = False,
    changed: Collection[str] = (),
) -> GraphView:
    """A view in which `loop0`, `loop1`, ... are loops of these bodies and `back0`, `back1`, ...
    their gradients.

    The last four outputs of a loop, and the last two of a gradient, are for what is kept and
    needed.
    """
    view = parse_view(text)
    loops = []
    for place, body in enumerate(bodies):
        forward, backward = view.node(f"loop{place}"), view.node(f"back{place}")
        loops.append(
            Loop(
                forward.id,
                backward.id,
                trips,
                trips_known,
                compiled,
                body,
                forward.outputs[-4:-2],
                forward.outputs[-2:],
                backward.outputs[-2:],
                frozenset(changed),
            )
        )
    memories = {p: loop_memory.loop_memory(loop, loop.body) for p, loop in enumerate(loops)}
    return loop_memory.resized(dataclasses.replace(view, loops=tuple(loops)), memories)


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


def attention(unit: str = "KiB", keys: str = "Placeholder") -> GraphView:
    """One step of a decoder that looks at `keys`: the case for which the paper was written."""
    return parse_view(f"""
        state = LoopVariable [1{unit}]
        w = Placeholder [0B resource fixed]
        read = ReadVariableOp w [2{unit} fixed]
        keys = {keys} [16{unit}]
        axis = Const [4B int32 fixed]
        query = MatMul state read [1{unit}]
        sum = AddV2 query keys [16{unit}]
        energy = Tanh sum [16{unit}]
        score = Sum energy axis [1{unit}]
        next = MatMul score read [1{unit}]
        end = LoopEnd next [0B fixed]
        backward:
        dnext = LoopVariable end [1{unit}]
        dscore = MatMul dnext read [1{unit}]
        denergy = BroadcastTo dscore axis [16{unit}]
        dsum = TanhGrad energy denergy [16{unit}]
        dquery = Sum dsum axis [1{unit}]
        dstate = MatMul dquery read [1{unit}]
        loss: end
    """)


def nested(**settings) -> GraphView:
    """A body that holds a loop of three iterations of `attention`."""
    text = """
        state = LoopVariable [1KiB]
        keys = Placeholder [16KiB]
        loop0 = While state keys [1KiB, 0B, 0B fixed, 0B, 0B fixed]
        end = LoopEnd loop0 [0B fixed]
        backward:
        dend = LoopVariable end [1KiB]
        back0 = While dend loop0:1 loop0:2 [1KiB, 0B, 0B fixed]
        loss: end
    """
    return with_loops(text, attention(), trips=3, **settings)


def decide(view: GraphView) -> list[list[RegionDecision]]:
    """What Algorithm 1 proposes."""
    return [planner.plan_echo(view, regions.partition(view), UnitCost(), simulate(view))]


def plan(view: GraphView) -> LoopPlan:
    """The plan of a step's only loop, judged by itself."""
    (choice,) = loop_planner.plan_loops(view, decide)
    return choice.plan


def reading(tensor: str) -> GraphView:
    """A body of which the gradient reads one tensor or several."""
    return parse_view(f"""
        i = LoopVariable [4B int32 fixed]
        state = LoopVariable [1KiB]
        w = Placeholder [0B resource fixed]
        read = ReadVariableOp w [2KiB fixed]
        items = Placeholder [0B variant fixed]
        item = TensorListGetItem items i [4KiB]
        made = TensorListGetItem(changing) items i [4KiB]
        keys = Placeholder [16KiB]
        one = Const [4B fixed]
        h = MatMul state read [8KiB]
        v = Reshape h i [8KiB]
        end = LoopEnd v [0B fixed]
        backward:
        d = LoopVariable end [1KiB]
        e = MatMul d {tensor} [1KiB]
        loss: end
    """)


# Without XLA what is kept is the tensor itself, so that what shares its memory costs nothing. XLA
# copies. What can be read again is then neither kept nor copied.
@pytest.mark.parametrize(
    ("read_by_gradient", "kept", "copied", "read_again"),
    [
        ("h", 8, 8, 8),
        ("v", 8, 8, 8),
        ("h v", 8, 16, 16),
        ("h h", 8, 8, 8),
        ("state", 1, 1, 1),
        ("read", 0, 2, 0),
        ("item", 0, 4, 0),
        ("made", 4, 4, 4),
        ("keys", 0, 0, 0),
        ("one", 0, 0, 0),
        ("h read item keys state", 9, 15, 9),
    ],
)
def test_what_is_kept_of_an_iteration(read_by_gradient, kept, copied, read_again):
    body = reading(read_by_gradient)
    plain, compiled = (step(body, compiled=xla).loops[0] for xla in (False, True))
    found = [
        loop_memory.loop_memory(plain, body).kept.total,
        loop_memory.loop_memory(compiled, body).kept.total,
        loop_memory.loop_memory(compiled, body, reread=True).kept.total,
    ]
    assert found == [kept * KIB, copied * KIB, read_again * KIB]


def test_only_under_xla_is_anything_read_again():
    body = reading("h read item keys one")
    found = [
        loop_memory.read_again(step(body, compiled=xla).loops[0], body) for xla in (False, True)
    ]
    assert found == [[], ["read", "item"]]


def test_a_variable_that_is_written_in_between_is_not_read_again():
    body = reading("read")
    loop = step(body, compiled=True, changed=["read"]).loops[0]
    assert loop_memory.read_again(loop, body) == []
    assert loop_memory.loop_memory(loop, body, reread=True).kept == Amount(0, 2 * KIB)


def test_what_is_kept_counts_as_often_as_the_body_runs_and_work_once():
    view = step(attention(), trips=10)
    loop = view.loops[0]
    kept, forward, backward = (
        [view.tensors[t].nbytes for t in tensors]
        for tensors in (loop.kept, loop.forward_work, loop.backward_work)
    )
    assert kept == [10 * 16 * KIB, 0]  # energy
    # Besides the loop's result, which is the last `next`.
    assert forward == [(16 + 1) * KIB, 0]  # energy and score
    assert backward == [16 * KIB, 0]  # denergy, besides what is kept; dscore dies as it comes


def test_a_view_of_the_step_holds_what_its_loops_keep_and_need():
    lines = str(step(attention(), trips=10)).splitlines()
    assert "loop0 = While x [1KiB, 160KiB, 0B fixed, 17KiB, 0B fixed]" in lines
    assert "back0 = While g loop0:1 loop0:2 [1KiB, 16KiB, 0B fixed]" in lines


def test_bytes_that_grow_with_the_batch_are_told_from_those_that_do_not():
    body = parse_view("""
        state = LoopVariable [1KiB]
        w = LoopVariable [2KiB fixed]
        a = MatMul state w [4KiB]
        b = MatMul w w [8KiB fixed]
        end = LoopEnd a b [0B fixed]
        backward:
        d = LoopVariable end [1KiB]
        da = MatMul d a [16KiB]
        db = MatMul d b [32KiB fixed]
        dw = MatMul da db [64KiB fixed]
        loss: end
    """)
    memory = loop_memory.loop_memory(step(body).loops[0], body)
    assert memory.kept == Amount(4 * KIB, 8 * KIB)
    assert memory.forward_work == Amount((4 + 1) * KIB, (8 + 2) * KIB)  # a and state, b and w
    assert memory.backward_work == Amount((16 - 4) * KIB, (32 + 64 - 8) * KIB)


def test_figure_8_attention_is_recomputed_in_each_iteration_from_its_query():
    assert str(plan(step(attention()))).splitlines() == [
        "loop loop0: 8 x 16 KiB -> 1 KiB",
        "  region 0: recompute 2 ops (releases 16 KiB, keeps 1 KiB)",
    ]


# As in figure 7, two inputs of an addition outweigh its output, unless one is there anyway.
@pytest.mark.parametrize(
    ("keys", "recompute"),
    [("Placeholder", True), ("ReadVariableOp w", True), ("LoopVariable", False)],
)
def test_figure_8_it_costs_nothing_to_keep_what_is_the_same_in_each_iteration(keys, recompute):
    assert plan(step(attention(keys=keys))).recompute == recompute


def test_under_xla_weights_are_read_again_instead_of_kept():
    found = plan(step(attention(), compiled=True))
    assert (found.before_bytes, found.after_bytes) == ((16 + 2) * KIB, 1 * KIB)
    assert found.reread == ("read",)


def test_a_loop_is_changed_even_if_only_to_read_its_weights_again():
    found = plan(step(reading("state read"), compiled=True))
    assert (found.before_bytes, found.after_bytes) == (3 * KIB, 1 * KIB)
    assert (found.recompute, found.recomputed, found.reread) == (True, (), ("read",))


def saving(share: int) -> GraphView:
    """A body that keeps 100 KiB, of which `share` can be made again from a constant of the loop."""
    return parse_view(f"""
        state = LoopVariable [1KiB]
        keys = Placeholder [{share}KiB]
        h = MatMul state state [{100 - share}KiB]
        a = Exp keys [{share}KiB]
        end = LoopEnd h a [0B fixed]
        backward:
        d = LoopVariable end [1KiB]
        e = MatMul d h [1KiB]
        f = MatMul e a [1KiB]
        loss: end
    """)


@pytest.mark.parametrize(("share", "recompute"), [(4, False), (6, True)])
def test_a_loop_that_gains_less_than_5_percent_is_left_alone(share, recompute):
    assert plan(step(saving(share), trips=1000)).recompute == recompute


def test_the_reason_says_what_a_loop_that_is_left_alone_would_keep():
    found = plan(step(saving(4), trips=1000))
    assert str(found) == (
        "loop loop0: keep 1000 x 100 KiB (would keep 96 KiB of 100 KiB an iteration)"
    )
    assert found.after_bytes == found.before_bytes == 100 * KIB
    assert found.recomputed == ()


def test_a_loop_that_keeps_nothing_is_left_alone():
    assert str(plan(step(reading("keys")))) == "loop loop0: keep 8 x 0 B (it keeps nothing)"


# TensorFlow runs iterations side by side; XLA never does.
@pytest.mark.parametrize(("compiled", "in_order"), [(False, True), (True, False)])
@pytest.mark.parametrize("body", [attention(), reading("keys")], ids=["recomputed", "kept"])
def test_iterations_wait_for_one_another_unless_xla_compiles_them(body, compiled, in_order):
    assert plan(step(body, compiled=compiled)).in_order == in_order


@pytest.mark.parametrize(("compiled", "sums"), [(False, ("total",)), (True, ())])
def test_sums_of_gradients_in_a_body_are_built_up_term_by_term_unless_xla_fuses_them(
    compiled, sums
):
    body = parse_view("""
        state = LoopVariable [1KiB]
        keys = Placeholder [64KiB]
        a = Exp keys [64KiB]
        end = LoopEnd a [0B fixed]
        backward:
        d = LoopVariable end [1KiB]
        e = MatMul d a [64KiB]
        f = MatMul e d [64KiB]
        g = MatMul f d [64KiB]
        total = AddN e f g [64KiB]
        loss: end
    """)
    found = plan(step(body, compiled=compiled))
    assert found.recompute
    assert found.sums == sums


TWO_LOOPS = """
    x = Placeholder [1KiB]
    before = MatMul x x [{before}]
    small = Sum before x [1KiB]
    loop0 = While small [1KiB, 0B, 0B fixed, 0B, 0B fixed]
    loop1 = While loop0 [1KiB, 0B, 0B fixed, 0B, 0B fixed]
    loss = Mean loop1 [4B]
    backward:
    g = Const [4B fixed]
    back1 = While g loop1:1 loop1:2 [1KiB, 0B, 0B fixed]
    back0 = While back1 loop0:1 loop0:2 [1KiB, 0B, 0B fixed]
"""


def choose(view: GraphView) -> list[loop_planner.LoopChoice]:
    choices = loop_planner.plan_loops(view, decide)
    assert all(choice.plan.recompute for choice in choices)
    return loop_planner.choose(view, choices, lambda v: simulate(v).peak_bytes, 0.01)


def test_loops_that_are_never_there_at_the_peak_are_left_as_they_are():
    view = with_loops(TWO_LOOPS.format(before="1MiB"), attention(), attention())
    chosen = choose(view)
    assert [choice.plan.reason for choice in chosen] == ["the peak does not depend on it"] * 2
    assert loop_planner.apply(view, chosen) == view


def test_a_loop_that_hardly_adds_to_the_peak_is_left_as_it_is():
    view = with_loops(TWO_LOOPS.format(before="1KiB"), attention("B"), attention("KiB"))
    assert [choice.plan.recompute for choice in choose(view)] == [False, True]


def test_loops_that_make_the_peak_are_recomputed():
    view = with_loops(TWO_LOOPS.format(before="1KiB"), attention(), attention())
    assert [choice.plan.recompute for choice in choose(view)] == [True, True]


def test_the_plan_of_a_step_keeps_all_loops_where_that_does_not_lower_its_peak():
    view = with_loops(TWO_LOOPS.format(before="1MiB"), attention(), attention())
    found = passes.plan_view(view, ECHO)
    assert [p.reason for p in found.loops] == ["the predicted peak would not be lower"] * 2
    assert found.before == found.after


def test_the_plan_of_a_step_predicts_the_peak_with_its_loops_recomputed():
    view = step(attention())
    found = passes.plan_view(view, ECHO)
    assert found.loops == (plan(view),)
    planned = loop_evaluation.planned(view, found.loops)
    assert found.before.total_bytes == simulate(view).peak_bytes
    assert found.after.total_bytes == simulate(planned).peak_bytes
    assert found.after.residual_bytes == 8 * KIB


@pytest.mark.parametrize("compiled", [False, True])
def test_policy_none_changes_nothing(compiled):
    view = step(nested(compiled=compiled), compiled=compiled)
    found = passes.plan_view(view, passes.Settings("none", UnitCost()))
    loops = [*found.loops, *found.loops[0].loops]
    assert len(loops) == 2
    for loop in loops:
        changes = (loop.recompute, loop.in_order, loop.recomputed, loop.reread, loop.sums)
        assert changes == (False, False, (), (), ())
        assert loop.reason == "policy"
    assert found.before == found.after
    assert loop_evaluation.planned(view, found.loops) == view


def test_nested_loops_multiply():
    found = plan(step(nested(), trips=4))
    assert str(found).splitlines() == [
        "loop loop0: 4 x 48 KiB -> 3 KiB",
        "  loop loop0: 3 x 16 KiB -> 1 KiB",
        "    region 0: recompute 2 ops (releases 16 KiB, keeps 1 KiB)",
    ]
    assert found.released_bytes == 4 * 3 * (16 - 1) * KIB


def test_a_loop_that_is_left_alone_leaves_those_in_it_alone():
    view = step(nested())
    (choice,) = loop_planner.plan_loops(view, decide)
    kept = loop_planner.keep(choice, "no need")
    assert [str(p) for p in (kept.plan, *kept.plan.loops)] == [
        "loop loop0: keep 8 x 48 KiB (no need)",
        "loop loop0: keep 3 x 16 KiB (no need)",
    ]
    assert loop_planner.apply(view, [kept]) == view


def test_a_loop_in_a_loop_may_be_left_alone_by_its_name():
    body = nested()
    node = body.node("loop0")
    nodes = tuple(n._replace(name="inner") if n is node else n for n in body.nodes)
    view = step(dataclasses.replace(body, nodes=nodes))
    settings = passes.Settings(cost_model=UnitCost(), exclude=("inner",))
    (outer,) = passes.plan_view(view, settings).loops
    (inner,) = outer.loops
    assert (inner.recompute, inner.in_order, inner.reason) == (False, False, "excluded")
    assert plan(view).loops[0].recompute


def test_what_a_changed_gradient_reads_besides_lives_until_then():
    """Keys that only the forward loop read so far: the copies read them too."""
    text = """
        x = Placeholder [1KiB]
        all = Mul x x [16KiB]
        loop0 = While x all [1KiB, 0B, 0B fixed, 0B, 0B fixed]
        loss = Mean loop0 [4B]
        backward:
        g = Const [4B fixed]
        back0 = While g loop0:1 loop0:2 [1KiB, 0B, 0B fixed]
    """
    view = with_loops(text, attention())
    keys = view.tensor_named("all")
    loops = (dataclasses.replace(view.loops[0], constants={"keys": keys}),)
    view = dataclasses.replace(view, loops=loops)
    choices = loop_planner.plan_loops(view, decide)
    planned = loop_planner.apply(view, choices)
    assert keys not in view.node("back0").inputs
    assert keys in planned.node("back0").inputs
    assert planned == loop_evaluation.planned(view, [choices[0].plan])


def test_what_a_loop_over_the_batch_keeps_grows_with_the_batch():
    body = reading("h")
    loop = dataclasses.replace(step(body).loops[0], trips_scale=True)
    memory = LoopMemory(Amount(3, 4), Amount(0, 0), Amount(0, 0))
    view = dataclasses.replace(step(body), loops=(loop,))
    resized = loop_memory.resized(view, {0: memory})
    assert [resized.tensors[t].nbytes for t in loop.kept] == [8 * (3 + 4), 0]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("inner", [False, True])
def test_a_plan_alone_tells_what_the_loop_will_keep_and_need(inner, compiled):
    view = step(nested(compiled=compiled) if inner else attention(), compiled=compiled)
    choices = loop_planner.plan_loops(view, decide)
    planned = loop_evaluation.planned(view, [choice.plan for choice in choices])
    assert planned == loop_planner.apply(view, choices)
    assert planned != view


def test_a_body_that_is_recomputed_needs_room_for_that_once():
    view = step(attention())
    (choice,) = loop_planner.plan_loops(view, decide)
    rewired = evaluation.rewire(view.loops[0].body, choice.plan.decisions).view
    assert choice.memory == LoopMemory(
        Amount(1 * KIB, 0),  # query
        Amount((16 + 1 + 1) * KIB, 0),  # energy and score besides
        Amount((16 + 16) * KIB, 0),  # the second energy and denergy
    )
    assert choice.memory == loop_memory.loop_memory(view.loops[0], rewired)


def by_hand(**changes) -> LoopPlan:
    """Eight iterations that keep 1 MiB instead of 16 MiB."""
    decision = RegionDecision(
        0, "decoder", 3, True, 16 * MIB, MIB, 0.002, "fewer", ("sum", "energy"), "denergy"
    )
    plan = LoopPlan("while", 8, True, True, 16 * MIB, MIB, "fewer", True, (decision,))
    return dataclasses.replace(plan, **changes)


def of_step(*loops: LoopPlan) -> RecomputePlan:
    return RecomputePlan("echo", (), NO_PEAK, NO_PEAK, None, loops=loops)


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        ({}, ["loop while: 8 x 16 MiB -> 1 MiB"]),
        ({"trips_known": False}, ["loop while: about 8 x 16 MiB -> 1 MiB"]),
        ({"recompute": False}, ["loop while: keep 8 x 16 MiB (fewer)"]),
        (
            {"recompute": False, "trips_known": False},
            ["loop while: keep about 8 x 16 MiB (fewer)"],
        ),
    ],
)
def test_text_of_a_loop(changes, lines):
    assert str(by_hand(decisions=(), **changes)).splitlines() == lines


def test_text_of_a_plan_lists_its_loops():
    assert str(of_step(by_hand(decisions=()), by_hand(loop="other", decisions=()))) == (
        "loop while: 8 x 16 MiB -> 1 MiB\nloop other: 8 x 16 MiB -> 1 MiB"
    )


def test_a_loop_that_is_kept_releases_nothing():
    assert by_hand().released_bytes == 8 * 15 * MIB
    assert by_hand(recompute=False).released_bytes == 0


def test_plans_of_nested_loops_go_to_json_and_back():
    inner = by_hand(loop="inner", in_order=False, reread=("read", "item"))
    outer = by_hand(sums=("AddN",), loops=(inner, by_hand(loop="other", trips_known=False)))
    plan = of_step(outer, by_hand(loop="last"))
    assert RecomputePlan.from_json(plan.to_json()) == plan


def test_text_in_which_a_loop_lacks_something_is_no_plan():
    fields = json.loads(of_step(by_hand(loops=(by_hand(),))).to_json())
    del fields["loops"][0]["loops"][0]["trips"]
    with pytest.raises(ValueError, match=r"must be what `RecomputePlan\.to_json` returned"):
        RecomputePlan.from_json(json.dumps(fields))


def loop_lines(*loops: LoopPlan) -> list[str]:
    """What the report says of loops."""
    lines = report(of_step(*loops)).splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("Loop "))
    last = next(number for number, line in enumerate(lines) if line.startswith("predicted peak"))
    return [line for line in lines[first:last] if line]


def test_report_of_a_loop():
    assert loop_lines(by_hand()) == [
        "Loop while, 8 iterations: keeps 16.0 -> 1.0 of each, 128.0 -> 8.0 in all.",
        "Each iteration waits for the one before.",
        "region  layer    ops  decision   released  kept    ms  reason",
        "------  -------  ---  ---------  --------  ----  ----  ------",
        "     0  decoder  2/3  recompute      16.0   1.0  2.00  fewer",
        " total             2  recompute      16.0   1.0  2.00",
    ]


def test_report_says_where_the_number_of_iterations_is_nominal():
    assert loop_lines(by_hand(trips_known=False))[0] == (
        "Loop while, nominally 8 iterations: keeps 16.0 -> 1.0 of each, 128.0 -> 8.0 in all."
    )


def test_report_of_a_loop_that_is_left_alone():
    kept = by_hand(recompute=False, after_bytes=16 * MIB, reason="no need", in_order=False)
    assert loop_lines(kept) == [
        "Loop while, 8 iterations: keeps 16.0 -> 16.0 of each, 128.0 -> 128.0 in all.",
        "Nothing is recomputed in it: no need.",
    ]


def test_report_tells_what_is_read_again_and_summed_up():
    lines = loop_lines(by_hand(in_order=False, reread=("a", "b", "c"), sums=("d", "e")))
    assert lines[1:3] == [
        "3 variables or inputs are read again instead of kept.",
        "2 sums of gradients are built up term by term.",
    ]


def test_report_lists_loops_in_loops_after_the_one_that_they_are_in():
    lines = loop_lines(by_hand(loops=(by_hand(loop="inner", trips=2),)), by_hand(loop="last"))
    assert [line.split(",")[0] for line in lines if line.startswith("Loop ")] == [
        "Loop while",
        "Loop inner",
        "Loop last",
    ]


# 1/64 MiB of each of eight iterations is 1/8 MiB, from which on kept regions are listed.
@pytest.mark.parametrize(("trips", "listed"), [(7, False), (8, True)])
def test_report_counts_a_region_of_a_loop_as_often_as_the_body_runs(trips, listed):
    small = RegionDecision(1, "small", 1, False, MIB // 64, 0, 0.0, "no need")
    lines = loop_lines(by_hand(trips=trips, decisions=(*by_hand().decisions, small)))
    assert any("small" in line and "no need" in line for line in lines) == listed
    assert ("1 small regions that are kept are not listed." in lines) != listed

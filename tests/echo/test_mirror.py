"""Policy "mirror": all that is cheap runs again, unless a heavy op's gradient reads it."""

import random

import keras
import numpy as np
import pytest

import tf_echo
from tests import reference
from tests.echo import loop_models, models, small, test_planner, test_scheduling
from tf_echo import gating, passes, planner, regions
from tf_echo.cost_model import UnitCost
from tf_echo.graph_view import GraphView, parse_view
from tf_echo.memory_model import simulate
from tf_echo.op_traits import Kind
from tf_echo.plan import RecomputePlan

MIRROR = passes.Settings("mirror", UnitCost())


def plan(view: GraphView) -> RecomputePlan:
    found = passes.plan_view(view, MIRROR)
    assert found.sums == ()
    return found


def test_what_a_heavy_gradient_reads_is_kept_and_ends_the_path():
    """A gelu between two products: the second one's gradient reads its result."""
    view = parse_view("""
        x = Placeholder [1MiB]
        w = Placeholder [1KiB fixed]
        h = MatMul x w [1MiB]
        a = Erf h [1MiB]
        b = Mul a h [1MiB]
        c = Exp b [1MiB]
        d = MatMul b w [1MiB]
        e = Mul c d [1MiB]
        loss = Mean e [4B]
        backward:
        g = Const [4B fixed]
        de = BroadcastTo g [1MiB]
        dd = Mul de c [1MiB]
        dw = MatMul b dd [1KiB fixed]
        db = MatMul dd w [1MiB]
        dh = Mul db a [1MiB]
        dw2 = MatMul x dh [1KiB fixed]
        loss: loss
    """)
    nodes = {name for d in plan(view).recomputed for name in d.nodes}
    assert nodes == {"a", "c"}


def test_nothing_is_estimated():
    """Two large inputs are kept for one small result."""
    view = parse_view("""
        x = Placeholder [1KiB]
        w = Placeholder [1KiB fixed]
        p = MatMul x w [4MiB]
        q = MatMul x w [4MiB]
        s = Mul p q [4MiB]
        t = Sum s [1MiB]
        u = Exp t [1MiB]
        v = MatMul u w [1KiB]
        z1 = MatMul v w [4MiB]
        z2 = MatMul z1 w [4MiB]
        loss = Mean z2 [4B]
        backward:
        g = Const [4B fixed]
        dz = MatMul g w [1MiB]
        dt = Mul dz u [1MiB]
        loss: loss
    """)
    found = plan(view)
    assert [d.nodes for d in found.recomputed] == [("s", "t", "u")]
    assert found.recomputed[0].kept_bytes > found.recomputed[0].released_bytes
    assert found.after.total_bytes > found.before.total_bytes
    assert not passes.plan_view(view, passes.Settings(cost_model=UnitCost())).recomputed


def replayed(view: GraphView) -> list[tuple[str, ...]]:
    """What runs again, for each region of which anything does."""
    decisions = planner.plan_mirror(view, regions.partition(view), UnitCost(), simulate(view))
    return [d.nodes for d in decisions if d.recompute]


def test_everything_cheap_that_the_backward_pass_reads_is_recomputed():
    view = parse_view("""
        x = Placeholder [1MiB]
        h = MatMul x x [1MiB]
        a = Exp h [1MiB]
        b = Exp a [1MiB]
        c = Exp b [1MiB]
        loss = Mean c [4B]
        backward:
        g = Const [4B fixed]
        dc = Mul g c [1MiB]
        db = Mul dc b [1MiB]
        da = Mul db a [1MiB]
    """)
    # Echo would keep a rather than h: as many bytes, one op less to run again.
    assert replayed(view) == [("a", "b", "c")]


def test_what_only_leads_to_it_is_recomputed_too():
    view = parse_view("""
        x = Placeholder [1MiB]
        h = MatMul x x [1MiB]
        a = Exp h [1MiB]
        b = Exp a [1MiB]
        unread = Exp b [1MiB]
        loss = Mean unread [4B]
        backward:
        g = Const [4B fixed]
        db = Mul g b [1MiB]
    """)
    assert replayed(view) == [("a", "b")]


HEAVY_TAIL = """
    p = Placeholder [1MiB]
    h = MatMul p p [1MiB]
    a = Exp h [1MiB]
    b = Exp a [1MiB]
    c = Exp b [1MiB]
    y = {op} b p [1MiB]
    z = MatMul c p [1MiB]
    both = AddV2 y z [1MiB]
    loss = Mean both [4B]
    backward:
    g = Const [4B fixed]
    dy = Neg g [1MiB]
    dc = Mul dy c [1MiB]
    dw = {op} b dy [1MiB]
    db = Mul dc b [1MiB]
    da = Mul db a [1MiB]
"""


@pytest.mark.parametrize("op", ["MatMul", "BatchMatMulV2", "Einsum", "Conv2D"])
def test_what_the_gradient_of_a_heavy_op_reads_is_kept_and_ends_the_path(op):
    # b is kept, though cheap gradients read it, too; c runs again from it, and a by itself.
    assert replayed(parse_view(HEAVY_TAIL.format(op=op))) == [("a",), ("c",)]


def test_without_a_heavy_reader_the_path_goes_on():
    view = parse_view(HEAVY_TAIL.format(op="Mul"))
    assert replayed(view) == [("a", "b", "c")]


def test_echo_recomputes_what_mirror_keeps_for_a_heavy_op():
    view = test_planner.wide_input()
    assert replayed(view) == []
    assert [d.nodes for d in test_planner.decide(view) if d.recompute] == [("wide",)]


def test_an_input_of_a_heavy_op_is_recomputed_where_only_its_shape_is_read():
    view = parse_view("""
        p = Placeholder [1MiB]
        h = MatMul p p [1MiB]
        a = Exp h [1MiB]
        y = MatMul a p [1MiB]
        loss = Mean y [4B]
        backward:
        g = Const [4B fixed]
        s = Shape a [8B int32 fixed]
        dy = BroadcastTo g s [1MiB]
        da = Mul dy a [1MiB]
    """)
    assert replayed(view) == [("a",)]


@pytest.mark.parametrize(
    "op", ["MatMul", "Conv2D", "NoSuchOp", "While", "PartitionedCall", "RandomUniform", "Range"]
)
def test_heavy_unknown_and_stateful_ops_are_never_recomputed(op):
    view = parse_view(f"""
        p = Placeholder [1KiB]
        a = {op} p p p [1MiB]
        b = Exp a [1MiB]
        loss = Mean b [4B]
        backward:
        g = Const [4B fixed]
        db = Mul g b [1MiB]
        da = Mul db a [1MiB]
    """)
    assert replayed(view) == [("b",)]


def _with_heavy_gradients(seed: int) -> GraphView:
    """A random graph of which some gradients are products."""
    rng = random.Random(seed)
    forward, _, backward = str(test_planner.random_view(seed)).partition("backward:\n")
    lines = backward.splitlines()
    changed = [line.replace(" = Mul ", rng.choice([" = Mul ", " = MatMul "])) for line in lines]
    return parse_view("\n".join([forward, "backward:", *changed]))


def test_on_random_graphs_exactly_what_is_read_by_cheap_gradients_alone_is_recomputed():
    seen = {True: 0, False: 0}
    for seed in range(60):
        view = _with_heavy_gradients(seed)
        again = {name for nodes in replayed(view) for name in nodes}
        for region in regions.partition(view):
            for number in region.nodes:
                node = view.nodes[number]
                readers = gating.backward_readers(view, node.outputs[0])
                if readers:
                    heavy = any(view.kinds[r] is Kind.HEAVY for r in readers)
                    assert (node.name in again) != heavy, f"{node.name} of\n{view}"
                    seen[heavy] += 1
        assert all(not view.node(name).backward for name in again)
    assert min(seen.values()) > 20


def test_sums_are_not_built_up_term_by_term():
    view = test_scheduling.shared_weight(9)
    assert passes.plan_view(view, passes.Settings(cost_model=UnitCost())).sums
    assert plan(view).sums == ()


def test_no_product_of_a_real_model_runs_again():
    plan = tf_echo.explain(small.compiled("adam"), *small.one_batch(), policy="mirror")
    again = {name for d in plan.recomputed for name in d.nodes}
    assert any("Erfc" in name for name in again)
    assert not [name for name in again if "MatMul" in name]


def test_what_a_region_excludes_or_does_not_include_is_left_alone():
    model = small.compiled("adam")
    for arguments in ({"exclude": ("dense_1",)}, {"include": ("dense",)}):
        found = tf_echo.explain(model, *small.one_batch(), policy="mirror", **arguments)
        assert found.recomputed
        assert not [n for d in found.recomputed for n in d.nodes if "/dense_1_" in n]


_CASES = [
    *models.CASES[:: len(models.CASES) // 4][:4],
    loop_models.named("lstm_with_dropout_and_recurrent_dropout"),
    loop_models.named("attention_decoder"),
    loop_models.named("loop_nested"),
]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.slow] if number % 3 else [], id=str(case))
        for number, case in enumerate(_CASES)
    ],
)
def test_training_is_bit_equal(case):
    def train(policy: str | None) -> reference.Run:
        def optimizer() -> keras.optimizers.Optimizer:
            inner = keras.optimizers.SGD(0.01, momentum=0.9)
            return tf_echo.EchoOptimizer(inner, policy=policy) if policy else inner

        options = {**case.compiling, "jit_compile": False}
        with reference.grappler(enabled=False):
            return reference.train(
                case.build, optimizer, case.dataset(False), options, case.fitting
            )

    run = train("mirror")
    found = run.model.optimizer.plan
    assert found.recomputed or any(loop.recompute for loop in found.loops)
    assert not any(loop.in_order for loop in found.loops)
    assert reference.differences(run, train(None)) == []


@pytest.mark.parametrize("name", ["lstm_with_dropout_and_recurrent_dropout", "loop_nested"])
def test_loops_are_recomputed_but_not_put_in_order(name):
    case = loop_models.named(name)
    model = case.build()
    model.compile("sgd", "mse")
    found = tf_echo.explain(model, case.dataset(False), policy="mirror")
    (loop,) = found.loops
    assert loop.recompute
    assert all((p.in_order, p.sums) == (False, ()) for p in (loop, *loop.loops))


def test_a_loss_that_works_out_its_gradient_in_a_loop_of_its_own():
    """TensorFlow makes what has effects wait for what had effects before."""

    def trained(optimizer: keras.optimizers.Optimizer) -> keras.Model:
        x = keras.Input((12, 8))
        h = keras.layers.Dense(8, activation="tanh")(x)
        model = keras.Model(x, keras.layers.Dense(5)(h))
        model.compile(optimizer, "ctc")
        drawn = np.random.default_rng(1)
        sounds, words = drawn.normal(size=(16, 12, 8)), drawn.integers(1, 5, (16, 4))
        model.fit(sounds, words, batch_size=8, shuffle=False, verbose=0)
        return model

    keras.utils.set_random_seed(1)
    expected = trained(keras.optimizers.SGD(0.1))
    keras.utils.set_random_seed(1)
    model = trained(tf_echo.EchoOptimizer(keras.optimizers.SGD(0.1), policy="mirror"))
    assert model.optimizer.plan.recomputed
    small.assert_equal(small.state(model), small.state(expected))

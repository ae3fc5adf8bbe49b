"""Policy "mirror": all that is cheap runs again, unless a heavy op's gradient reads it."""

import keras
import pytest

import tf_echo
from tests import reference
from tests.echo import loop_models, models
from tf_echo import passes
from tf_echo.cost_model import UnitCost
from tf_echo.graph_view import GraphView, parse_view
from tf_echo.plan import RecomputePlan

MIRROR = passes.Settings("mirror", UnitCost())


def plan(view: GraphView) -> RecomputePlan:
    found = passes.plan_view(view, MIRROR)
    assert (found.sums, found.untied) == ((), ())
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


_CASES = [
    *models.CASES[:: len(models.CASES) // 4][:4],
    loop_models.named("lstm_with_dropout_and_recurrent_dropout"),
    loop_models.named("attention_decoder"),
]


@pytest.mark.parametrize("case", _CASES, ids=str)
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

"""Orders that let tensors die early, and sums that are built up term by term."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_echo
from tests import reference
from tf_echo import evaluation, passes, rewriter, scheduling
from tf_echo.cost_model import UnitCost
from tf_echo.graph_view import GraphView, parse_view
from tf_echo.memory_model import simulate


def shared_weight(steps: int) -> GraphView:
    """One weight that is used in every step: its gradients of 1 MiB are summed."""
    lines = ["x = Placeholder [4KiB]", "v = Placeholder [0B resource fixed]"]
    lines += ["w = ReadVariableOp v [1MiB fixed]", "h0 = MatMul x w [4KiB]"]
    lines += [f"h{i} = MatMul h{i - 1} w [4KiB]" for i in range(1, steps)]
    lines += [f"loss = Mean h{steps - 1} [4B]", "backward:", "g = Const [4B fixed]"]
    lines += [f"d{steps} = Neg g [4KiB]"]
    for i in reversed(range(steps)):
        lines.append(f"dw{i} = MatMul {f'h{i - 1}' if i else 'x'} d{i + 1} [1MiB fixed]")
        lines.append(f"d{i} = MatMul d{i + 1} w [4KiB]")
    terms = " ".join(f"dw{i}" for i in reversed(range(steps)))
    lines += [f"sum = AddN {terms} [1MiB fixed]", "u = AssignSubVariableOp v sum []", "loss: loss"]
    return parse_view("\n".join(lines))


@pytest.mark.parametrize("steps", [3, 8, 9, 10, 17, 30])
def test_terms_of_a_running_sum_are_not_all_held(steps):
    view = shared_weight(steps)
    plan = passes.plan_view(view, passes.Settings(cost_model=UnitCost()))
    assert plan.sums == ("sum",)
    mib = 2**20
    assert plan.before.total_bytes > steps * mib
    # A total, a block, and the next term.
    assert plan.after.total_bytes < 4 * mib
    after = evaluation.rewire(view, plan.decisions, evaluation.Schedule(plan.sums))
    after.view.verify()
    assert simulate(after.view).peak_bytes == plan.after.total_bytes


@pytest.mark.parametrize("count", range(3, 36))
def test_additions_use_each_value_once(count):
    view = shared_weight(count)
    additions = scheduling.running_sum(view, view.node("sum").id).additions
    used = sorted(v for a in additions for v in (a.left, a.right))
    assert used == list(range(2 * count - 2))


def test_terms_that_do_not_come_one_after_the_other_are_left_alone():
    text = str(shared_weight(5)).replace("AddN dw4 dw3", "AddN dw3 dw4")
    assert scheduling.running_sums(parse_view(text)) == []


@pytest.mark.parametrize("steps", [5, 9, 10, 19, 26])
def test_running_sums_are_bit_equal_to_what_addn_gives(steps):
    weight = tf.Variable(np.random.default_rng(0).standard_normal((64, 64)).astype("float32") / 8)

    gradient, plans = tf.Variable(tf.zeros_like(weight)), []

    def run(planned: bool) -> np.ndarray:
        @tf.function(autograph=False)
        def step(x: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                h = x
                for _ in range(steps):
                    h = tf.tanh(tf.matmul(h, weight))
                loss = tf.reduce_sum(h**2)
            result = tape.gradient(loss, weight)
            gradient.assign(result)
            if planned:
                trace, plan = passes.plan_step([loss], [result], passes.Settings())
                rewriter.rewrite(trace, plan)
                plans.append(plan)

        with reference.grappler(enabled=False):
            step(tf.random.stateless_normal((16, 64), (1, 2)))
        return gradient.numpy()

    np.testing.assert_array_equal(run(True), run(False))
    assert plans[-1].sums


@pytest.mark.parametrize(
    "kernel",
    [
        "k = ReadVariableOp v [1KiB fixed]",
        "r = ReadVariableOp v [1KiB fixed]\n    k = Cast r [1KiB fixed]",
        "r = ReadVariableOp v [1KiB fixed]\n    n = Mean r [4B fixed]\n"
        "    k = RealDiv r n [1KiB fixed]",
    ],
    ids=["read", "cast", "normalized"],
)
def test_a_product_with_a_kernel_is_no_weight_gradient(kernel):
    view = parse_view(f"""
    v = VarHandleOp [0B resource fixed]
    x = Placeholder [1MiB]
    {kernel}
    h = MatMul x k [1MiB]
    y = MatMul h k [1MiB]
    loss = Mean y [4B]
    backward:
    dy = Mul y loss [1MiB]
    dk = MatMul h dy [1KiB fixed]
    dh = MatMul dy k [1MiB]
    dk1 = MatMul x dh [1KiB fixed]
    loss: loss
    """)
    pairs = scheduling.put_offs(view)
    assert [tuple(view.nodes[n].name for n in pair) for pair in pairs] == [("dk", "dh")]


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_weight_gradients_run_first_whatever_becomes_of_the_kernel(policy, monkeypatch):
    views = []
    plan_step = passes.plan_step

    def record(*args):
        trace, plan = plan_step(*args)
        views.append(trace.view)
        return trace, plan

    monkeypatch.setattr(passes, "plan_step", record)
    keras.config.set_dtype_policy(policy)
    try:
        x = h = keras.Input((64, 8))
        for _ in range(3):  # kernels of these are reshaped
            h = keras.layers.Conv1D(8, 3, padding="same", activation="gelu")(h)
        model = keras.Model(x, h)
        model.compile(tf_echo.EchoOptimizer("sgd"), "mse", jit_compile=False)
        model.fit(np.ones((64, 64, 8)), np.ones((64, 64, 8)), batch_size=64, verbose=0)
    finally:
        keras.config.set_dtype_policy("float32")
    view = views[-1]
    pairs = scheduling.put_offs(view)
    ops = {(view.nodes[a].op, view.nodes[b].op) for a, b in pairs}
    assert ("Conv2DBackpropFilter", "Conv2DBackpropInput") in ops


@pytest.mark.parametrize("op", ["RandomStandardNormal", "StatelessRandomNormalV2"])
def test_noise_is_an_activation_though_it_is_made_of_nothing(op):
    view = parse_view(f"""
    v = VarHandleOp [0B resource fixed]
    shape = Const [8B int32 fixed]
    x = {op} shape [1MiB]
    k = ReadVariableOp v [1KiB fixed]
    h = MatMul x k [1MiB]
    y = MatMul h k [1MiB]
    loss = Mean y [4B]
    backward:
    dy = Mul y loss [1MiB]
    dk = MatMul h dy [1KiB fixed]
    dh = MatMul dy k [1MiB]
    loss: loss
    """)
    pairs = scheduling.put_offs(view)
    assert [tuple(view.nodes[n].name for n in pair) for pair in pairs] == [("dk", "dh")]


@pytest.mark.parametrize("reshape", ["", "r = Reshape dy [1MiB]"], ids=["the same", "reshaped"])
def test_the_gradient_of_a_bias_comes_before_what_reads_the_same_gradient(reshape):
    read = "r" if reshape else "dy"
    view = parse_view(f"""
    v = VarHandleOp [0B resource fixed]
    x = Placeholder [1MiB]
    k = ReadVariableOp v [1KiB fixed]
    h = MatMul x k [1MiB]
    loss = Mean h [4B]
    backward:
    dy = Mul h loss [1MiB]
    db = BiasAddGrad dy [1KiB fixed]
    {reshape}
    dk = MatMul h {read} [1KiB fixed]
    dh = MatMul {read} k [1MiB]
    loss: loss
    """)
    pairs = scheduling.put_offs(view)
    assert [tuple(view.nodes[n].name for n in pair) for pair in pairs] == [
        ("dk", "dh"),
        ("db", "dh"),
    ]


def test_a_sum_that_goes_on_with_another_is_built_up_too():
    """TensorFlow adds up gradients in groups of 128 MiB."""

    def trained(optimizer: keras.optimizers.Optimizer) -> list[np.ndarray]:
        keras.utils.set_random_seed(2)
        keras.utils.clear_session(free_memory=False)
        rnn = keras.layers.LSTM(512, unroll=True)
        model = keras.Sequential([keras.Input((40, 512)), rnn, keras.layers.Dense(1)])
        model.compile(optimizer, "mse", jit_compile=False)
        model.optimizer.build(model.trainable_variables)
        rng = np.random.default_rng(0)
        with reference.grappler(enabled=False):
            model.fit(
                rng.normal(size=(8, 40, 512)), rng.normal(size=(8, 1)), batch_size=4, verbose=0
            )
        return [v.numpy() for v in model.variables]

    echo = tf_echo.EchoOptimizer("sgd")
    actual, expected = trained(echo), trained(keras.optimizers.SGD())
    assert len(echo.plan.sums) >= 4, echo.plan  # of two weights, in groups
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_only_the_first_term_may_be_a_sum():
    lines = ["x = Placeholder [4KiB]", "loss = Mean x [4B]", "backward:", "g = Mul x loss [1MiB]"]
    lines += [f"t{i} = Neg g [1MiB]" for i in range(4)]
    lines += ["a = AddN t0 t1 t2 t3 [1MiB]", *(f"u{i} = Neg g [1MiB]" for i in range(3))]
    first = parse_view("\n".join([*lines, "b = AddN a u0 u1 u2 [1MiB]", "loss: loss"]))
    last = parse_view(
        "\n".join([*lines, "v = Neg g [1MiB]", "c = AddN u0 u1 u2 a [1MiB]", "loss: loss"])
    )
    assert [first.nodes[n].name for n in scheduling.running_sums(first)] == ["a", "b"]
    assert [last.nodes[n].name for n in scheduling.running_sums(last)] == ["a"]


STATES = """
    w = VarHandleOp [0B resource fixed]
    m = VarHandleOp [0B resource fixed]
    x = Placeholder [1MiB]
    k = ReadVariableOp w [1MiB fixed]
    h = MatMul x k [1MiB]
    loss = Mean h [4B]
    backward:
    g = Const [4B fixed]
    dh = Mul g loss [1MiB]
    dk = MatMul x dh [1MiB fixed]
    r = ReadVariableOp m [1MiB fixed]
    decay = Const [4B fixed]
    decayed = Mul decay r [{size} fixed]
    scaled = Mul decay dk [1MiB fixed]
    sum = AddV2 decayed scaled [1MiB fixed]
    write = AssignVariableOp m sum []
    loss: loss
    seed: g
"""


def test_what_an_update_makes_of_its_state_waits_for_the_gradient():
    view = parse_view(STATES.format(size="1MiB"))
    pairs = {tuple(view.nodes[n].name for n in pair) for pair in scheduling.put_offs(view)}
    assert ("dk", "decayed") in pairs
    assert not any(second in ("r", "scaled") for _, second in pairs)


def test_small_states_do_not_wait():
    view = parse_view(STATES.format(size="4B"))
    pairs = {tuple(view.nodes[n].name for n in pair) for pair in scheduling.put_offs(view)}
    assert not any(second == "decayed" for _, second in pairs)


LAYERS_WITH_UPDATES = """
    v1 = VarHandleOp [0B resource fixed]
    v2 = VarHandleOp [0B resource fixed]
    lr = Placeholder [4B fixed]
    x = Placeholder [1MiB]
    w1 = ReadVariableOp v1 [1MiB fixed]
    w2 = ReadVariableOp v2 [1MiB fixed]
    h = MatMul x w1 [1MiB]
    a = Exp h [1MiB]
    y = MatMul a w2 [1MiB]
    loss = Mean y [4B]
    backward:
    g = Const [4B fixed]
    dy = Mul g loss [1MiB]
    dw2 = MatMul x dy [1MiB fixed]
    da = MatMul dy w2 [1MiB]
    dh = Mul da a [1MiB]
    dw1 = MatMul x dh [1MiB fixed]
    {norm}
    u2 = Mul {by} dw2 [1MiB fixed]
    s2 = AssignSubVariableOp v2 u2 []
    u1 = Mul lr dw1 [1MiB fixed]
    s1 = AssignSubVariableOp v1 u1 []
    loss: loss
    seed: g
"""


@pytest.mark.parametrize(
    ("norm", "by", "expected"),
    [
        ("", "lr", ["dw2", "da", "s2"]),
        # Clipped by the norm of all gradients it needs those of layers below.
        ("norm = AddV2 dw1 dw2 [4B fixed]", "norm", ["dw2", "da"]),
    ],
    ids=["by itself", "clipped"],
)
def test_what_is_recomputed_waits_for_updates_that_need_nothing_later(norm, by, expected):
    view = parse_view(LAYERS_WITH_UPDATES.format(norm=norm, by=by))
    first = view.node("dh").id
    (found,) = scheduling.waits(view, [first]).values()
    assert [view.nodes[n].name for n in found] == expected


def test_an_update_that_waits_for_a_later_input_gradient_is_not_waited_for():
    # Its input gradient comes after what is recomputed, and the update waits for that.
    text = LAYERS_WITH_UPDATES.format(norm="", by="lr").replace("Exp h", "Exp x")
    moved = "    da = MatMul dy w2 [1MiB]\n"
    late = text.replace(moved, "    c = Mul dy a [1MiB]\n    da = MatMul dy w2 [1MiB]\n")
    view = parse_view(late)
    (found,) = scheduling.waits(view, [view.node("c").id]).values()
    assert [view.nodes[n].name for n in found] == ["dw2"]
    assert ("da", "u2") in {
        tuple(view.nodes[n].name for n in pair) for pair in scheduling.put_offs(view)
    }


def test_an_update_that_what_is_made_early_leads_to_is_not_waited_for():
    """It may be made to wait for a gradient that needs what is recomputed."""
    made = "b2 = Exp hh [1MiB fixed]\n c2 = Mul lr dw2 [1MiB fixed]\n u2 = Mul c2 b2 [1MiB fixed]"
    text = LAYERS_WITH_UPDATES.format(norm="", by="lr")
    text = text.replace("u2 = Mul lr dw2 [1MiB fixed]", made)
    text = text.replace("dw2 = MatMul x dy", "hh = MatMul a x [1MiB fixed]\n dw2 = MatMul x dy")
    view = parse_view(text)
    (found,) = scheduling.waits(view, [view.node("dh").id]).values()
    assert "s2" not in [view.nodes[n].name for n in found]
    assert "hh" in [view.nodes[n].name for n in found]


def test_a_bias_that_tensorflow_merges_with_a_filter_is_waited_for_together_with_it():
    view = parse_view("""
        x = Placeholder [1MiB]
        v = Placeholder [0B resource fixed]
        w = ReadVariableOp v [1KiB fixed]
        a = Tanh x [1MiB]
        b = Conv2D a w [1MiB]
        loss = Mean b [4B]
        backward:
        g = Mul b loss [1MiB]
        db = BiasAddGrad g [1KiB fixed]
        dw = Conv2DBackpropFilter a g [1KiB fixed]
        da = Conv2DBackpropInput w g [1MiB]
        dx = TanhGrad a da [1MiB]
        loss: loss
    """)
    dw, dx = view.node("dw").id, view.node("dx").id
    found = scheduling.waits(view, [dw, dx])
    # What `dw` reads must not wait for `db`, of which oneDNN makes one node with `dw`.
    assert found[dw] == []
    assert {view.nodes[n].name for n in found[dx]} >= {"db", "dw"}

"""Residuals of which one bit an element is kept."""

import dataclasses
import functools
import multiprocessing
from concurrent import futures

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tf_echo
from tests import reference
from tests.echo import small
from tf_echo import evaluation, packer, packing, planner, regions
from tf_echo.cost_model import RooflineCost
from tf_echo.graph_view import GraphView, parse_view
from tf_echo.memory_model import simulate
from tf_echo.plan import PackedResidual, RecomputePlan, RegionDecision

MIB = 2**20
EchoOptimizer = tf_echo.EchoOptimizer

RESIDUAL = """
    x = Placeholder [1MiB]
    w = Placeholder [1KiB fixed]
    h = MatMul x w [1MiB]
    r = Relu h [1MiB]
    y = AddV2 x r [1MiB]
    z = MatMul y w [1MiB]
    loss = Mean z [4B]
    backward:
    one = Const [4B fixed]
    dz = Mul one loss [1MiB]
    dw2 = MatMul y dz [1KiB fixed]
    dy = MatMul dz w [1MiB]
    dh = ReluGrad dy r [1MiB]
    dw = MatMul x dh [1KiB fixed]
    loss: loss
    seed: one
"""


def found_in(text: str) -> list[tuple[str, str, str]]:
    view = parse_view(text)
    return [
        (view.tensor_name(c.tensor), c.test, view.tensor_name(c.gate)) for c in packing.find(view)
    ]


def test_of_a_relu_that_only_its_gradient_reads_a_bit_is_kept():
    assert found_in(RESIDUAL) == [("r", "x > 0", "dy")]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("ReluGrad", "LeakyReluGrad", [("r", "x > 0", "dy")]),
        ("ReluGrad", "Relu6Grad", [("r", "0 < x < 6", "dy")]),
        # A gradient that reads the value.
        ("ReluGrad", "TanhGrad", []),
        # Read as the upstream gradient.
        ("dh = ReluGrad dy r", "dh = ReluGrad r dy", []),
        # Read by a product as well.
        ("dw2 = MatMul y dz", "dw2 = MatMul r dz", []),
        # Kept as what shares its memory.
        ("dw2 = MatMul y dz", "dw2 = MatMul s dz", []),
        # Only its shape is read besides.
        ("dw2 = MatMul y dz", "dw2 = Shape r", [("r", "x > 0", "dy")]),
        # Few elements, whatever the batch.
        ("r = Relu h [1MiB]", "r = Relu h [1KiB fixed]", []),
        # Of unknown size.
        ("r = Relu h [1MiB]", "r = Relu h [?]", []),
        # An input of the step.
        ("r = Relu h", "r = Placeholder", []),
    ],
)
def test_what_else_reads_it_decides(old, new, expected):
    text = RESIDUAL.replace(
        "y = AddV2 x r [1MiB]", "s = Reshape r [1MiB]\n    y = AddV2 x r [1MiB]"
    )
    assert found_in(text.replace(old, new)) == expected


def test_what_runs_again_may_ask_for_more_than_a_gradient():
    view = parse_view(RESIDUAL)
    again = {view.by_name["dh"]: view.tensor_named("dy")}
    assert packing.find(view, again) == []


def test_unpacking_waits_for_nothing_that_is_not_there_for_it():
    view = parse_view(RESIDUAL)
    assert packing.find(view, usable=frozenset()) == []


def test_the_packed_step_as_text():
    view = parse_view(RESIDUAL)
    packed = packing.pack(view, packing.find(view)).view
    packed.verify()
    lines = str(packed).splitlines()
    assert lines[lines.index("r = Relu h [1MiB]") :][:7] == [
        "r = Relu h [1MiB]",
        "r/positive = Greater r [256KiB bool]",
        "r/bytes = Cast r/positive [256KiB uint8]",
        "r/gathered = Mul r/bytes [256KiB uint64]",
        "r/shifted = RightShift r/gathered [256KiB uint64]",
        "r/bits = Cast r/shifted [32KiB uint8]",
        "y = AddV2 x r ^r/bits [1MiB]",
    ]
    assert lines[lines.index("dy = MatMul dz w [1MiB]") :][:6] == [
        "dy = MatMul dz w [1MiB]",
        "r/word = Cast r/bits ^dy [256KiB uint64]",
        "r/spread = Mul r/word [256KiB uint64]",
        "r/chosen = BitwiseAnd r/spread [256KiB uint64]",
        "r/unpacked = Cast r/chosen [1MiB]",
        "dh = ReluGrad dy r/unpacked [1MiB]",
    ]


def tower(count: int) -> GraphView:
    """Residual blocks of a product and a ReLU."""
    lines = ["h0 = Placeholder [1MiB]", "v = VarHandleOp [0B resource fixed]"]
    lines += ["w = ReadVariableOp v [1KiB fixed]"]
    for i in range(count):
        lines += [
            f"p{i} = MatMul h{i} w [1MiB]",
            f"r{i} = Relu p{i} [1MiB]",
            f"h{i + 1} = AddV2 h{i} r{i} [1MiB]",
        ]
    lines += [f"loss = Mean h{count} [4B]", "backward:", "one = Const [4B fixed]"]
    lines += [f"d{count} = Mul one loss [1MiB]"]
    for i in reversed(range(count)):
        lines += [
            f"g{i} = ReluGrad d{i + 1} r{i} [1MiB]",
            f"dw{i} = MatMul h{i} g{i} [1KiB fixed]",
            f"b{i} = MatMul g{i} w [1MiB]",
            f"d{i} = AddV2 d{i + 1} b{i} [1MiB]",
        ]
    return parse_view("\n".join([*lines, "loss: loss", "seed: one"]))


def decide(view: GraphView, bits: bool) -> list[RegionDecision]:
    found = regions.partition(view)
    return planner.plan_echo(view, found, RooflineCost(), simulate(view), bits)


def choose(view: GraphView, bits: bool) -> evaluation.Choice:
    decisions = decide(view, bits)
    return evaluation.choose(view, decisions, evaluation.Schedule(), simulate(view), 1.0, bits=bits)


def test_a_tower_of_relus_keeps_half():
    view = tower(12)
    packed = choose(view, bits=True)
    assert [b.tensor for b in packed.schedule.bits] == [f"r{i}" for i in range(12)]
    # Of each block its input, and a 32nd of a ReLU; a few more while one block is at work.
    assert packed.after.total_bytes <= (12 * (1 + 1 / 32) + 5) * MIB
    assert packed.before.total_bytes >= 24 * MIB
    assert choose(view, bits=False).schedule.bits == ()


DROPOUT = """
    x = Placeholder [1MiB]
    w = Placeholder [1KiB fixed]
    seed_ = Placeholder [16B int32 fixed]
    shape = Const [8B int32 fixed]
    h = MatMul x w [1MiB]
    u = StatelessRandomUniformV2 shape seed_ [1MiB]
    rate = Const [4B fixed]
    keep = GreaterEqual u rate [256KiB bool]
    zero = Const [4B fixed]
    e = Tanh h [1MiB]
    m = Mul h e [1MiB]
    d = SelectV2 keep m zero [1MiB]
    z = MatMul d w [1MiB]
    loss = Mean z [4B]
    backward:
    one = Const [4B fixed]
    dz = Mul one loss [1MiB]
    dw2 = MatMul d dz [1KiB fixed]
    dd = MatMul dz w [1MiB]
    dm = SelectV2 keep dd zero [1MiB]
    de = Mul dm h [1MiB]
    dt = TanhGrad e de [1MiB]
    dh = Mul dm e [1MiB]
    sum = AddV2 dt dh [1MiB]
    dw = MatMul x sum [1KiB fixed]
    loss: loss
    seed: one
"""


def test_a_mask_that_is_cheaper_to_unpack_than_to_draw_is_kept_for_all_that_reads_it():
    view = parse_view(DROPOUT)
    decisions = decide(view, bits=True)
    assert [d.nodes for d in decisions if d.recompute] == [("e", "m", "d")]
    bits = evaluation.find_bits(view, decisions, evaluation.rewire(view, decisions))
    assert [(b.tensor, b.test, b.gate) for b in bits] == [("keep", "x", "dz")]
    again = evaluation.rewire(view, decisions, evaluation.Schedule(bits=bits)).view
    readers = [n.name for n in again.nodes if again.tensor_named("keep/unpacked") in n.inputs]
    assert readers == ["d/recompute0", "dm"]
    # Without packing it is drawn again.
    names = [d.nodes for d in decide(view, bits=False) if d.recompute]
    assert names == [("u", "keep", "e", "m", "d")]


_SPECIAL = [0.0, -0.0, 1e-30, -1e-30, 3.0, 6.0, 5.99, 7.0, -2.0, np.inf, -np.inf, np.nan]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "bool"])
@pytest.mark.parametrize("shape", [(), (8,), (7, 3), (3, 0)])
@pytest.mark.parametrize("known", [True, False])
def test_bits_unpack_to_what_they_were(dtype, shape, known):
    values = np.resize(_SPECIAL, shape).astype("float32")
    values = tf.cast(values, dtype) if dtype != "bool" else tf.constant(values > 0.5)
    spec = tf.TensorSpec(shape if known else None, dtype)

    @tf.function(input_signature=[spec])
    def there_and_back(source, test="x" if dtype == "bool" else "0 < x < 6"):
        mask = packer._mask(source, test)
        bits = packer._pack(mask)
        return bits, packer._unpack(bits, source, test), tf.cast(mask, source.dtype)

    bits, unpacked, expected = there_and_back(values)
    assert bits.shape == [-(-values.shape.num_elements() // 8)]
    small.assert_equal(*([tf.cast(tensor, "float64")] for tensor in (unpacked, expected)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("gradient", ["ReluGrad", "Relu6Grad", "LeakyReluGrad"])
@pytest.mark.parametrize("compiled", [False, True])
def test_gradient_ops_take_what_is_unpacked_for_the_number_itself(dtype, gradient, compiled):
    features = tf.cast(np.resize(_SPECIAL, 12 * 16), dtype)
    upstream = tf.cast(np.resize([*_SPECIAL, 0.5], 12 * 16), dtype)
    test = packing._TESTS[gradient]

    @tf.function(jit_compile=compiled)
    def both():
        op = functools.partial(getattr(tf.raw_ops, gradient), gradients=upstream)
        kept = packer._unpack(packer._pack(packer._mask(features, test)), features, test)
        return op(features=features), op(features=kept)

    expected, actual = both()
    np.testing.assert_array_equal(
        *(tf.cast(tensor, "float64").numpy() for tensor in (actual, expected))
    )


WIDTH = 24


def _residual_model(activation: str, dropout: float) -> keras.Model:
    small.mlp()  # clears the session
    x = h = keras.Input((small.FEATURES,))
    h = layers.Dense(WIDTH)(h)
    for _ in range(6):
        branch = layers.Activation(activation)(layers.Dense(WIDTH)(h))
        h = h + layers.Dropout(dropout)(branch)
    return keras.Model(x, layers.Dense(1, dtype="float32")(h))


def _trained(optimizer, activation="relu", dropout=0.0, open_batch=False, **compiling):
    model = _residual_model(activation, dropout)
    model.compile(optimizer, "mse", **compiling)
    model.optimizer.build(model.trainable_variables)
    with reference.grappler(enabled=False):
        model.fit(small.dataset(drop_remainder=not open_batch), shuffle=False, verbose=0)
    return model


@pytest.mark.parametrize("activation", ["relu", "relu6", "leaky_relu"])
@pytest.mark.parametrize("dropout", [0.0, pytest.param(0.3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["plain", "xla"]
)
def test_a_model_trains_the_same_on_bits(activation, dropout, compiled):
    settings = {"activation": activation, "dropout": dropout, "jit_compile": compiled}
    expected = _trained(keras.optimizers.Adam(), **settings)
    model = _trained(EchoOptimizer("adam"), **settings)
    assert len(model.optimizer.plan.bits) >= 6
    small.assert_equal(small.state(model), small.state(expected))


def test_an_open_batch_is_packed_whatever_its_size():
    small_batch = {"activation": "relu6", "dropout": 0.3, "open_batch": True}
    expected = _trained(keras.optimizers.Adam(), **small_batch)
    model = _trained(EchoOptimizer("adam"), **small_batch)
    assert len(model.optimizer.plan.bits) >= 6, model.optimizer.plan
    small.assert_equal(small.state(model), small.state(expected))


def test_bits_can_be_left_out():
    model = _trained(EchoOptimizer("sgd", without=["bits"]))
    assert model.optimizer.plan.bits == ()
    assert not any("/bits" in line for line in str(model.optimizer.plan).splitlines())


def _peak_of_residual_branches(echo: bool) -> tuple[int, RecomputePlan | None]:
    """What the allocator says, and the plan."""
    keras.utils.set_random_seed(1)
    x = h = keras.Input((256,))
    for _ in range(10):
        h = h + layers.Dense(256, activation="relu")(h)
    model = keras.Model(x, layers.Dense(1)(h))
    model.compile(EchoOptimizer("sgd") if echo else "sgd", "mse", jit_compile=False)
    peaks = []

    def step_ends(batch, logs):
        peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"])
        tf.config.experimental.reset_memory_stats("CPU:0")

    data = tf.data.Dataset.from_tensors((np.ones((4096, 256)), np.ones((4096, 1)))).repeat(4)
    callback = keras.callbacks.LambdaCallback(on_train_batch_end=step_ends)
    model.fit(data, verbose=0, callbacks=[callback])
    return sorted(peaks)[1], model.optimizer.plan if echo else None


def test_the_measured_peak_is_that_of_the_bits():
    # Where others have trained before, the allocator has chunks larger than what is asked for.
    spawn = multiprocessing.get_context("spawn")
    with futures.ProcessPoolExecutor(1, mp_context=spawn) as fresh:
        before, _ = fresh.submit(_peak_of_residual_branches, False).result()
        after, plan = fresh.submit(_peak_of_residual_branches, True).result()
    assert len(plan.bits) == 10
    # Ten ReLUs of 4 MiB, less what unpacking one of them needs.
    assert before - after > 7 * 4 * MIB
    assert abs(plan.after.total_bytes / after - 1) < 0.2


def test_a_plan_with_bits_prints_and_goes_to_json_and_back():
    plan = _trained(EchoOptimizer("sgd"), dropout=0.3).optimizer.plan
    assert plan.bits
    assert RecomputePlan.from_json(plan.to_json()) == plan
    residual = PackedResidual("a/Relu", "x > 0", "gate", 32 * MIB, MIB)
    assert str(residual) == "bits a/Relu: keep x > 0 (releases 32 MiB, keeps 1 MiB)"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tensor": "nowhere"}, "does not hold 'nowhere'"),
        ({"gate": "nowhere:3"}, "does not hold 'nowhere'"),
        ({"test": "0 < x < 6"}, "asks for something else"),
        ({"tensor": "dense/BiasAdd"}, "does not hold|asks for something else"),
        ({"gate": "last"}, "which itself needs them"),
    ],
)
def test_bits_that_are_not_this_graphs_are_refused(change, message):
    plan = _trained(EchoOptimizer("sgd")).optimizer.plan
    if change.get("gate") == "last":
        change = {"gate": plan.bits[-1].gate}
        assert change["gate"] != plan.bits[0].gate
        residual = dataclasses.replace(plan.bits[-1], gate=plan.bits[0].gate)
        changed = dataclasses.replace(plan, bits=(*plan.bits[:-1], residual))
    else:
        residual = dataclasses.replace(plan.bits[0], **change)
        changed = dataclasses.replace(plan, bits=(residual, *plan.bits[1:]))
    with pytest.raises(ValueError, match=message):
        _trained(EchoOptimizer("sgd", plan=changed))


def test_bits_of_what_is_made_again_are_refused():
    plan = _trained(EchoOptimizer("sgd", without=["bits"]), dropout=0.3).optimizer.plan
    drawn = [(n, d.gate) for d in plan.recomputed for n in d.nodes if "GreaterEqual" in n]
    name, gate = drawn[0]
    bits = (PackedResidual(name, "x", gate, 3072, 384),)
    changed = dataclasses.replace(plan, bits=bits)
    with pytest.raises(ValueError, match="which nothing reads"):
        _trained(EchoOptimizer("sgd", plan=changed), dropout=0.3)


def test_a_gradient_penalty_asks_for_signs_twice():
    def trained(optimizer: keras.optimizers.Optimizer) -> list[np.ndarray]:
        model = _residual_model("relu", 0.3)
        optimizer.build(model.trainable_variables)
        x, y = (tf.constant(part) for part in small.one_batch())

        @tf.function
        def step():
            with tf.GradientTape() as tape:
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    out = model(x, training=True)
                slope = inner.gradient(out, x)
                loss = tf.reduce_mean((out - y) ** 2) + tf.reduce_mean(slope**2)
                scaled = optimizer.scale_loss(loss)
            optimizer.apply(tape.gradient(scaled, model.trainable_variables))

        with reference.grappler(enabled=False):
            for _ in range(3):
                step()
        return [v.numpy() for part in (model, optimizer) for v in part.variables]

    expected = trained(keras.optimizers.SGD(1e-3, momentum=0.9))
    actual = trained(EchoOptimizer(keras.optimizers.SGD(1e-3, momentum=0.9)))
    small.assert_equal(actual, expected)


def test_bits_that_were_given_are_kept():
    first = _trained(EchoOptimizer("sgd"), dropout=0.3)
    plan = dataclasses.replace(first.optimizer.plan, bits=first.optimizer.plan.bits[:2])
    again = _trained(EchoOptimizer("sgd", plan=plan), dropout=0.3)
    assert again.optimizer.plan.bits == plan.bits
    assert again.optimizer.plan.after.total_bytes > first.optimizer.plan.after.total_bytes
    small.assert_equal(small.state(again), small.state(first))


def test_two_optimizers_share_what_is_packed():
    def trained(make) -> list[np.ndarray]:
        model = _residual_model("relu", 0.3)
        heads = [layers.Dense(1), layers.Dense(1)]
        optimizers = [make(), make()]
        x, y = small.one_batch()

        @tf.function
        def step(x, y):
            with tf.GradientTape(persistent=True) as tape:
                h = model(x, training=True)
                losses = [tf.reduce_mean((head(h) - y) ** 2) for head in heads]
                scaled = [o.scale_loss(loss) for o, loss in zip(optimizers, losses, strict=True)]
            for optimizer, loss, head in zip(optimizers, scaled, heads, strict=True):
                variables = [*model.trainable_variables, *head.trainable_variables]
                optimizer.apply(tape.gradient(loss, variables), variables)

        for head in heads:
            head.build((None, 1))
        for optimizer, head in zip(optimizers, heads, strict=True):
            optimizer.build([*model.trainable_variables, *head.trainable_variables])
        with reference.grappler(enabled=False):
            for _ in range(3):
                step(x, y)
        plans.append([getattr(o, "plan", None) for o in optimizers])
        return [v.numpy() for part in (model, *heads, *optimizers) for v in part.variables]

    plans: list[list[RecomputePlan | None]] = []
    expected = trained(lambda: keras.optimizers.SGD(1e-3, momentum=0.9))
    actual = trained(lambda: EchoOptimizer(keras.optimizers.SGD(1e-3, momentum=0.9)))
    assert plans[1][0].bits
    small.assert_equal(actual, expected)

"""What is recomputed is not merged back by Grappler, seen in the graph that really runs; under XLA
the numbers stay the same.
"""

import collections
from collections.abc import Callable, Iterator

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

import tf_echo
from tests import reference
from tests.echo import forcing, models
from tf_echo import rewriter

_Optimizer = Callable[[], keras.optimizers.Optimizer]


def _sgd() -> keras.optimizers.SGD:
    return keras.optimizers.SGD(0.01, momentum=0.9)


def _echo() -> keras.optimizers.Optimizer:
    return tf_echo.EchoOptimizer(_sgd())


def _echo_without_bits() -> keras.optimizers.Optimizer:
    return tf_echo.EchoOptimizer(_sgd(), without=["bits"])


@pytest.fixture
def optimized_graphs() -> Iterator[Callable[[], list[tf.compat.v1.GraphDef]]]:
    """Gives all graphs that ran since it was last called, as Grappler left them."""
    current = context.context()
    current.enable_graph_collection()

    def collect() -> list[tf.compat.v1.GraphDef]:
        functions = current.export_run_metadata().function_graphs
        return [function.post_optimization_graph for function in functions]

    with reference.grappler(enabled=True):
        yield collect
    current.disable_graph_collection()


def _count(case: models.Case, optimizer: _Optimizer, collect: Callable) -> collections.Counter[str]:
    """How often each op type occurs in one train step."""
    collect()
    dataset = case.dataset(open_batch=False).take(1)
    reference.train(case.build, optimizer, dataset, case.compiling, case.fitting)
    return collections.Counter(node.op for graph in collect() for node in graph.node)


# Op types that Grappler does not replace by others, or fold into constants.
@pytest.mark.parametrize(
    ("name", "ops"),
    [
        ("gelu_swish_relu_and_tanh", "Erfc Sigmoid"),
        ("exact_and_approximate_gelu", "Erfc Tanh Pow"),
        ("dropout", "Erfc StatelessRandomUniformV2 GreaterEqual"),
        ("batch_normalization_after_conv", "Relu"),
        ("layer_normalization", "Erfc"),
        ("unrolled_lstm", "Tanh"),
        ("transformer", "Erfc StatelessRandomUniformV2 GreaterEqual GatherV2"),
        ("gan", "Erfc Sigmoid StatelessRandomUniformV2"),
    ],
)
def test_grappler_keeps_every_copy(name, ops, optimized_graphs, monkeypatch):
    forcing.ignore_workspaces(monkeypatch)
    replayed = forcing.record_replayed_ops(monkeypatch)
    case = models.named(name)
    plain = _count(case, _sgd, optimized_graphs)
    rewritten = _count(case, _echo_without_bits, optimized_graphs)
    for op in ops.split():
        assert replayed[op] > 0, op
        assert rewritten[op] == plain[op] + replayed[op], op


def test_grappler_keeps_what_is_packed(optimized_graphs):
    found = []

    def echo() -> keras.optimizers.Optimizer:
        found.append(_echo())
        return found[0]

    counts = _count(models.named("transformer"), echo, optimized_graphs)
    plan = found[0].plan
    assert len(plan.bits) > 0
    assert counts["RightShift"] == counts["BitwiseAnd"] == len(plan.bits)


def test_grappler_merges_copies_that_wait_for_nothing(optimized_graphs, monkeypatch):
    case = models.named("dropout")
    plain = _count(case, _sgd, optimized_graphs)
    monkeypatch.setattr(
        rewriter._Region, "_tied", lambda region, tensor: region.trace.tensor(tensor)
    )
    unguarded = _count(case, _echo_without_bits, optimized_graphs)
    for op in ("Erfc", "StatelessRandomUniformV2", "GreaterEqual", "Mul", "Neg"):
        assert unguarded[op] == plain[op], op


# Below 1e-6 of a layer's norm: XLA fuses, and so rounds, as the rest of the graph allows.
@pytest.mark.parametrize(
    ("name", "planner", "batch"),
    [
        pytest.param("gelu_swish_relu_and_tanh", "echo", "open", marks=pytest.mark.slow),
        ("dropout", "everything", "fixed"),
        pytest.param(
            "batch_normalization_after_conv", "everything", "fixed", marks=pytest.mark.slow
        ),
        pytest.param("layer_normalization", "echo", "open", marks=pytest.mark.slow),
        ("self_attention", "echo", "fixed"),
        pytest.param("custom_gradients", "echo", "open", marks=pytest.mark.slow),
        pytest.param("lstm_in_a_loop", "echo", "open", marks=pytest.mark.slow),
        pytest.param("layer_normalization", "everything", "open", marks=pytest.mark.slow),
    ],
)
def test_xla_trains_the_same(name, planner, batch, monkeypatch):
    forcing.force(monkeypatch, planner)
    replayed = forcing.record_replayed_ops(monkeypatch)
    case = models.named(name)
    dataset = case.dataset(batch == "open")
    compiling = {**case.compiling, "jit_compile": True}
    with reference.grappler(enabled=False):
        plain, echo = (
            reference.train(case.build, optimizer, dataset, compiling, case.fitting)
            for optimizer in (_sgd, _echo)
        )
    assert replayed
    assert reference.differences(echo, plain, tolerance=1e-6) == []


def test_a_largest_value_that_is_broadcast_stays_what_it_is():
    """Grappler swaps a ReLU and the Max that alone reads it, and then takes the result for as large
    as the ReLU was."""

    def build() -> keras.Model:
        points = keras.Input((256, 16))
        normed = keras.layers.BatchNormalization()(keras.layers.Dense(64)(points))
        whole = keras.ops.max(keras.ops.relu(normed), axis=1, keepdims=True)
        local = keras.layers.Dense(32, activation="gelu")(points)
        wide = keras.ops.broadcast_to(whole, (16, 256, 64))
        both = keras.ops.concatenate([local, wide], axis=-1)
        both = keras.ops.relu(keras.layers.BatchNormalization()(keras.layers.Dense(96)(both)))
        return keras.Model(points, keras.layers.Dense(8)(both))

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(3, 16, 256, 16)), rng.normal(size=(3, 16, 256, 8))
    batches = tf.data.Dataset.from_tensor_slices((x.astype("float32"), y.astype("float32")))
    with reference.grappler(enabled=True):
        plain = reference.train(build, _sgd, batches.take(2))
        echo = reference.train(build, _echo, batches.take(2))
    assert echo.model.optimizer.plan.recomputed
    # Batch normalization makes much of what Grappler rounds differently.
    assert reference.differences(echo, plain, 1e-3) == []

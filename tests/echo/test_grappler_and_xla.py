"""What is recomputed is not merged back by Grappler, seen in the graph that really runs; under XLA
the numbers stay the same.
"""

import collections
from collections.abc import Callable, Iterator

import keras
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
        ("gan", "Erfc Sigmoid StatelessRandomUniformV2 GreaterEqual"),
    ],
)
def test_grappler_keeps_every_copy(name, ops, optimized_graphs, monkeypatch):
    replayed = forcing.record_replayed_ops(monkeypatch)
    case = models.named(name)
    plain = _count(case, _sgd, optimized_graphs)
    rewritten = _count(case, _echo, optimized_graphs)
    for op in ops.split():
        assert replayed[op] > 0, op
        assert rewritten[op] == plain[op] + replayed[op], op


def test_grappler_merges_copies_that_wait_for_nothing(optimized_graphs, monkeypatch):
    case = models.named("dropout")
    plain = _count(case, _sgd, optimized_graphs)
    monkeypatch.setattr(
        rewriter._Region, "_guard", lambda region, tensor: region.trace.tensor(tensor)
    )
    unguarded = _count(case, _echo, optimized_graphs)
    for op in ("Erfc", "StatelessRandomUniformV2", "GreaterEqual", "Mul", "Neg"):
        assert unguarded[op] == plain[op], op


# Below 1e-6 of a layer's norm: XLA fuses, and so rounds, as the rest of the graph allows.
@pytest.mark.parametrize(
    ("name", "planner", "batch"),
    [
        ("gelu_swish_relu_and_tanh", "echo", "open"),
        ("dropout", "everything", "fixed"),
        ("batch_normalization_after_conv", "everything", "fixed"),
        ("layer_normalization", "echo", "open"),
        ("self_attention", "echo", "fixed"),
        ("custom_gradients", "echo", "open"),
        ("lstm_in_a_loop", "echo", "open"),
        ("layer_normalization", "everything", "open"),
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

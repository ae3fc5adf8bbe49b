"""Gradient ops that read nothing but the forward pass are put where their results are needed."""

from collections.abc import Callable

import keras
import numpy as np
import pytest
from keras import layers

import tf_echo
from tests import reference
from tests.echo import small
from tf_echo import gating, passes, scheduling
from tf_echo.graph_view import GraphView, parse_view
from tf_echo.memory_model import simulate

MIB = 2**20


def layers_of(count: int, seed: bool = True) -> GraphView:
    """Products of which each gradient is multiplied by two things that are made of its input."""
    lines = ["x = Placeholder [1MiB]", "w = Placeholder [1KiB fixed]", "h0 = MatMul x w [1MiB]"]
    lines += [f"h{i} = MatMul h{i - 1} w [1MiB]" for i in range(1, count)]
    lines += [f"loss = Mean h{count - 1} [4B]", "backward:", "g = Const [4B fixed]"]
    lines += [f"d{count} = BroadcastTo g [1MiB]"]
    for i in reversed(range(count)):
        lines += [
            f"e{i} = Exp h{i} [1MiB]",
            f"f{i} = Mul e{i} h{i} [1MiB]",
            f"m{i} = Mul d{i + 1} f{i} [1MiB]",
            f"dw{i} = MatMul h{i} m{i} [1KiB fixed]",
            f"d{i} = MatMul m{i} w [1MiB]",
        ]
    lines += ["loss: loss", *(["seed: g"] if seed else [])]
    return parse_view("\n".join(lines))


def test_all_ops_up_to_the_one_that_reads_a_gradient_wait_for_it():
    view = layers_of(2)
    names = [
        (view.nodes[d.node].name, view.nodes[d.reader].name, view.tensor_name(d.gate))
        for d in gating.find_delays(view)
    ]
    assert names == [
        ("e1", "m1", "d2"),
        ("f1", "m1", "d2"),
        ("e0", "m0", "d1"),
        ("f0", "m0", "d1"),
    ]


def test_without_the_gradient_of_the_loss_nothing_waits():
    assert gating.find_delays(layers_of(2, seed=False)) == []


@pytest.mark.parametrize(
    ("old", "new", "waiting"),
    [
        # Read later too.
        ("dw1 = MatMul h1 m1", "dw1 = MatMul e1 m1", {"e1", "f1", "e0", "f0"}),
        # Heavy, and something that is read by it.
        ("f1 = Mul e1 h1", "f1 = MatMul e1 h1", {"e0", "f0"}),
        # Something waits for it.
        ("m1 = Mul d2 f1", "m1 = Mul d2 f1 ^e1", {"f1", "e0", "f0"}),
    ],
)
def test_only_cheap_ops_that_nothing_else_waits_for_wait(old, new, waiting):
    view = parse_view(str(layers_of(2)).replace(old, new))
    assert {view.nodes[d.node].name for d in gating.find_delays(view)} == waiting


def test_a_delayed_view_is_in_order_and_runs_what_waits_behind_the_gradients():
    view = layers_of(6)
    delayed, order = scheduling.with_delays(view, gating.find_delays(view))
    delayed.verify()
    assert [view.nodes[number].name for number in order] == [n.name for n in delayed.nodes]
    assert sorted(order) == list(range(len(view.nodes)))
    steps = gating.steps_of(simulate(delayed))
    for i in range(6):
        gradient, exp = (delayed.node(name).id for name in (f"d{i + 1}", f"e{i}"))
        assert steps[exp] > steps[gradient]


def _mish(optimizer: keras.optimizers.Optimizer, count: int, width: int) -> keras.Model:
    model = keras.Sequential([keras.Input((width,))])
    for _ in range(count):
        model.add(layers.Dense(width, activation="mish"))
    model.compile(optimizer, loss="mse", jit_compile=False)
    return model


def test_derivatives_of_activations_are_put_where_they_are_needed(monkeypatch):
    found: list[GraphView] = []
    original = passes.plan_view
    monkeypatch.setattr(passes, "plan_view", lambda v, *a: (found.append(v), original(v, *a))[1])
    tf_echo.explain(_mish("sgd", 3, 8), *np.zeros((2, 64, 8), "float32"))
    waiting = [n for n in found[0].nodes if n.op == "Sigmoid" and n.backward and n.control_inputs]
    assert len(waiting) == 3


@pytest.mark.parametrize("without", [("recompute",), ()])
def test_training_in_such_an_order_is_bit_equal(without):
    def build() -> keras.Model:
        return keras.Sequential([_mish("sgd", 4, small.FEATURES), layers.Dense(1)])

    def train(optimizer: Callable[[], keras.optimizers.Optimizer]) -> reference.Run:
        with reference.grappler(enabled=False):
            return reference.train(build, optimizer, small.dataset())

    run = train(lambda: tf_echo.EchoOptimizer(keras.optimizers.SGD(0.01), without=without))
    assert bool(run.model.optimizer.plan.recomputed) == (not without)
    assert reference.differences(run, train(lambda: keras.optimizers.SGD(0.01))) == []


def test_parts_that_do_not_exist_cannot_be_left_out():
    with pytest.raises(ValueError, match=r"`without` must be a sequence of some of 'recompute'"):
        tf_echo.EchoOptimizer("sgd", without=("everything",))

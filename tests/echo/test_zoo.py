"""Every model of the zoo: Echo never costs memory and never changes what is learned.

Each run has a process of its own, on the allocator that GPUs use (benchmarks/harness.py).
"""

import importlib
import pathlib
import types

import pytest

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
MORE = 0.03
"""The part by which a step may ask for more than the baseline's, besides what the steps of a run
differ by: as much as processes differ that run the same graph."""
DIFFERENCE = 1e-5
"""Of the last losses, relative: Echo's graph gives the same bits, but Grappler fuses other ops
where other ops read them."""
WIDER = {
    "mobilenet": 0.1,
    "mobilenet-v2": 0.1,
    "densenet121": 0.1,
    "nasnet-mobile": 0.1,
    "efficientnet-v2-b0": 5e-2,
    "shuffle-net": 5e-3,
    "efficientnet-b0": 1e-3,
    "xception": 1e-3,
}
"""Batch normalization of small batches, or the largest of many positions: one rounding grows by
magnitudes within the six steps. Without Grappler these losses are equal bit by bit."""


def names() -> list[str]:
    """The zoo's models, in processes of pytest-xdist as in one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        return list(importlib.import_module("zoo").ZOO)


@pytest.fixture
def echo_zoo(monkeypatch) -> types.ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("echo_zoo")


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_echo_costs_no_memory_and_changes_no_loss(echo_zoo, name):
    none, echo = (echo_zoo.measure(name, policy) for policy in echo_zoo.POLICIES)
    assert echo_zoo.rise(none, echo) <= MORE
    assert echo_zoo.loss_difference(none, echo) <= WIDER.get(name, DIFFERENCE)

"""Models with loops train the same with and without EchoOptimizer, bit by bit, with and without
XLA, and keep less of each iteration.
"""

import functools
from collections.abc import Callable, Iterator

import keras
import pytest

import tf_echo
from tests import reference
from tests.echo import forcing, loop_models, models
from tf_echo.plan import LoopPlan

_RUNS = [
    pytest.param(
        case.name,
        planner,
        ("open", "fixed")[(number + place) % 2],
        id=f"{case}-{planner}",
        marks=[pytest.mark.slow] if (number + place) % 3 else [],
    )
    for number, case in enumerate(loop_models.CASES)
    for place, planner in enumerate(forcing.PLANNERS)
]
_COMPILED = [
    pytest.param(case.name, marks=[pytest.mark.slow] if number % 4 else [])
    for number, case in enumerate(loop_models.CASES)
    if case.name not in loop_models.WITHOUT_XLA
]


def _sgd() -> keras.optimizers.SGD:
    return keras.optimizers.SGD(0.01, momentum=0.9)


def _train(
    case: models.Case,
    optimizer: Callable[[], keras.optimizers.Optimizer],
    batch: str,
    compiled: bool = False,
) -> reference.Run:
    options = {**case.compiling, "jit_compile": compiled}
    with reference.grappler(enabled=False):
        dataset = case.dataset(batch == "open")
        return reference.train(case.build, optimizer, dataset, options, case.fitting)


@functools.lru_cache(maxsize=4)
def _train_plain(name: str, batch: str, compiled: bool = False) -> reference.Run:
    return _train(loop_models.named(name), _sgd, batch, compiled)


def _all_loops(plans: Iterator[LoopPlan] | tuple[LoopPlan, ...]) -> Iterator[LoopPlan]:
    for plan in plans:
        yield plan
        yield from _all_loops(plan.loops)


@pytest.mark.parametrize(("name", "planner", "batch"), _RUNS)
def test_model_with_loops_trains_the_same(name, planner, batch, monkeypatch):
    forcing.force(monkeypatch, planner)
    run = _train(loop_models.named(name), lambda: tf_echo.EchoOptimizer(_sgd()), batch)
    loops = list(_all_loops(run.model.optimizer.plan.loops))
    assert loops
    if planner != "echo":
        assert all(loop.recompute for loop in loops)
    assert reference.differences(run, _train_plain(name, batch)) == []


@pytest.mark.parametrize("name", _COMPILED)
def test_model_with_loops_trains_the_same_under_xla(name):
    run = _train(loop_models.named(name), lambda: tf_echo.EchoOptimizer(_sgd()), "fixed", True)
    # XLA fuses, and so rounds, what is around a loop differently.
    assert reference.differences(run, _train_plain(name, "fixed", True), 1e-6) == []
    assert any(loop.recompute for loop in run.model.optimizer.plan.loops)

"""What `import tf_echo` offers, and that all of it is described."""

import inspect
import pathlib
import subprocess
import sys

import pytest

import tf_echo

NAMES = """
    CostModel EchoOptimizer EchoWarning GraphView MeasuredCost PeakMemory RecomputePlan
    RegionDecision RooflineCost UnitCost explain measure_costs parse_view report
""".split()


def test_the_public_names():
    assert sorted(tf_echo.__all__) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_everything_public_is_described(name):
    item = getattr(tf_echo, name)
    undescribed = [f"{name}.{n}" for n, m in _own_members(item) if not inspect.getdoc(m)]
    assert inspect.getdoc(item)
    assert undescribed == []


def _own_members(item: object) -> list[tuple[str, object]]:
    """Methods and properties that the class itself defines."""
    if not inspect.isclass(item):
        return []
    members = [(n, m) for n, m in vars(item).items() if not n.startswith("_")]
    return [
        (n, getattr(m, "__func__", m))
        for n, m in members
        if callable(getattr(m, "__func__", m)) or isinstance(m, property)
    ]


@pytest.mark.parametrize("name", ["EchoOptimizer", "explain", "report"])
def test_every_argument_is_described(name):
    item = getattr(tf_echo, name)
    described = inspect.getdoc(item)
    arguments = [
        p
        for p in inspect.signature(item.__init__ if inspect.isclass(item) else item).parameters
        if p != "self"
    ]
    assert [a for a in arguments if f"{a}: " not in described] == []


def test_the_signature_of_the_optimizer():
    parameters = list(inspect.signature(tf_echo.EchoOptimizer.__init__).parameters.values())[1:]
    defaults = {p.name: p.default for p in parameters}
    assert defaults.pop("inner_optimizer") is inspect.Parameter.empty
    assert defaults == {
        "policy": "echo",
        "loss_scale": "auto",
        "nominal_batch_size": None,
        "cost_model": None,
        "name": None,
    }


def test_the_types_are_marked():
    assert (pathlib.Path(tf_echo.__path__[0]) / "py.typed").exists()


PLAIN = """
    graph_view op_traits regions memory_model cost_model planner plan evaluation gating report
""".split()

# A stand-in for the package, so that its __init__, which does import TensorFlow, is not run.
_IMPORT_ALONE = """
import importlib, sys, types
package = types.ModuleType("tf_echo")
package.__path__ = [sys.argv[1]]
sys.modules["tf_echo"] = package
for name in sys.argv[2:]:
    importlib.import_module("tf_echo." + name)
print(sorted({name.partition(".")[0] for name in sys.modules} & {"tensorflow", "keras"}))
"""


def test_the_planning_modules_run_without_tensorflow():
    arguments = [sys.executable, "-c", _IMPORT_ALONE, tf_echo.__path__[0], *PLAIN]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

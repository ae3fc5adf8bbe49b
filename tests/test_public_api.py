"""What `import tf_echo` offers, and that all of it is described."""

import inspect
import pathlib
import subprocess
import sys

import pytest

import tf_echo
import tf_scratchpipe

NAMES = {
    tf_echo: """
        CostModel EchoOptimizer EchoWarning GraphView MeasuredCost PeakMemory RecomputePlan
        RegionDecision RooflineCost UnitCost Verification explain measure_costs parse_view report
        verify
    """.split(),
    tf_scratchpipe: """
        AbandonedError BadIdError CacheMonitor CacheStats HazardError ResumeTraining
        RowwiseAdagrad ScratchPipeEmbedding
        StallError TooFewSlotsError count_ids lookahead
    """.split(),
}


@pytest.mark.parametrize("package", NAMES)
def test_the_public_names(package):
    assert sorted(package.__all__) == sorted(NAMES[package])


@pytest.mark.parametrize(("package", "name"), [(p, n) for p, names in NAMES.items() for n in names])
def test_everything_public_is_described(package, name):
    item = getattr(package, name)
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


@pytest.mark.parametrize(
    ("package", "name"),
    [
        (tf_echo, "EchoOptimizer"),
        (tf_echo, "explain"),
        (tf_echo, "report"),
        (tf_echo, "verify"),
        (tf_scratchpipe, "RowwiseAdagrad"),
        (tf_scratchpipe, "ScratchPipeEmbedding"),
        (tf_scratchpipe, "lookahead"),
        (tf_scratchpipe, "ResumeTraining"),
        (tf_scratchpipe, "count_ids"),
    ],
)
def test_every_argument_is_described(package, name):
    item = getattr(package, name)
    described = inspect.getdoc(item)
    arguments = [
        p
        for p in inspect.signature(item.__init__ if inspect.isclass(item) else item).parameters
        if p not in ("self", "name", "kwargs")
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
        "exclude": (),
        "name": None,
        "include": (),
        "plan": None,
        "without": (),
    }


def test_the_signature_of_the_embedding():
    parameters = list(
        inspect.signature(tf_scratchpipe.ScratchPipeEmbedding.__init__).parameters.values()
    )[1:-1]
    defaults = {p.name: p.default for p in parameters}
    assert list(defaults)[:2] == ["input_dim", "output_dim"]
    assert dict(list(defaults.items())[2:11]) == {
        "num_slots": None,
        "combiner": None,
        "optimizer": None,
        "embeddings_initializer": "uniform",
        "mode": "pipelined",
        "replacement": "lru",
        "mask_zero": False,
        "oov_id": None,
        "name": None,
    }


@pytest.mark.parametrize("package", NAMES)
def test_the_types_are_marked(package):
    assert (pathlib.Path(package.__path__[0]) / "py.typed").exists()


PLAIN = {
    tf_echo: """
        graph_view op_traits regions memory_model cost_model planner plan evaluation gating report
    """.split(),
    tf_scratchpipe: """
        plan codes errors executor hit_map hold_window host_table replacement row_sampler planner
        invariants stats table_files checkpoint_directory
    """.split(),
}

# A stand-in for the package, so that its __init__, which does import TensorFlow, is not run.
_IMPORT_ALONE = """
import importlib, sys, types
name, path, *modules = sys.argv[1:]
package = types.ModuleType(name)
package.__path__ = [path]
sys.modules[name] = package
for module in modules:
    importlib.import_module(f"{name}.{module}")
print(sorted({name.partition(".")[0] for name in sys.modules} & {"tensorflow", "keras"}))
"""


@pytest.mark.parametrize("package", PLAIN)
def test_the_planning_modules_run_without_tensorflow(package):
    arguments = [package.__name__, package.__path__[0], *PLAIN[package]]
    command = [sys.executable, "-c", _IMPORT_ALONE, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

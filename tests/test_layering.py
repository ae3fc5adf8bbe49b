"""Imports run one way, as read from the source.

Data, analysis, planner, TensorFlow code, orchestration, Keras's face: none imports a later one.
"""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent

# Each layer may import from itself, where order below allows, and from the layers before it.
ECHO_LAYERS = (
    ("op_traits", "executor_order", "graph_view", "workspaces"),
    ("memory_model", "cost_model", "plan"),
    ("gating", "report", "loop_memory", "exclusion"),
    ("scheduling", "packing"),
    ("regions", "early", "evaluation", "loop_evaluation"),
    ("planner", "loop_planner"),
    ("tf_internals", "loop_internals"),
    ("nominal_shapes", "tracer", "grappler_order", "tracing", "measuring"),
    ("gates", "summing", "packer"),
    ("loop_rewriter",),
    ("rewriter",),
    ("passes",),
    ("training",),
    ("optimizer",),
    ("explain",),
    ("verify",),
    ("__init__",),
)
SCRATCHPIPE_LAYERS = (
    ("plan",),
    (
        "codes",
        "executor",
        "hit_map",
        "hold_window",
        "host_table",
        "table_files",
        "checkpoint_directory",
    ),
    ("errors", "replacement", "row_sampler"),
    ("planner", "slot_budget"),
    ("whole_planner",),
    ("invariants", "stats"),
    ("keras_internals", "tf_internals", "storage", "pooling", "rowwise_adagrad", "table_variable"),
    ("initial_rows", "masks", "row_optimizers", "row_step", "transfers"),
    ("accumulation",),
    ("table",),
    ("slot_group",),
    ("lookup",),
    ("pinned", "counting"),
    ("engine",),
    ("trained_state",),
    ("layer_saving", "tensor_state", "exported"),
    ("embedding",),
    ("model_state", "repositioning"),
    ("resume",),
    ("features", "pipeline", "monitor"),
    ("lookahead",),
    ("__init__",),
    ("tf_keras_internals",),
    ("tf_keras_core", "tf_keras_optimizers"),
    ("tf_keras_embedding",),
    ("tf_keras_lookahead",),
    ("for_tf_keras",),
)
LAYERS = {"tf_echo": ECHO_LAYERS, "tf_scratchpipe": SCRATCHPIPE_LAYERS}
WITHOUT_TENSORFLOW = {
    "tf_echo": """
        executor_order graph_view op_traits workspaces regions memory_model cost_model planner plan
        early evaluation gating scheduling packing report loop_memory loop_evaluation loop_planner
        exclusion
    """.split(),
    "tf_scratchpipe": """
        plan codes errors executor hit_map hold_window host_table replacement row_sampler planner
        slot_budget whole_planner invariants stats table_files checkpoint_directory
    """.split(),
}


def _modules(package: str) -> dict[str, pathlib.Path]:
    return {path.stem: path for path in sorted((ROOT / package).glob("*.py"))}


def _imports(path: pathlib.Path) -> set[str]:
    """Dotted names of all that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _own_imports(package: str, path: pathlib.Path) -> set[str]:
    """Names of the package's own modules that a file imports."""
    dotted = [name.split(".") for name in _imports(path)]
    return {parts[1] for parts in dotted if parts[0] == package and len(parts) > 1} & set(
        _modules(package)
    )


def _imports_package(path: pathlib.Path, *packages: str) -> set[str]:
    return {name for name in _imports(path) if name.partition(".")[0] in packages}


@pytest.mark.parametrize("package", LAYERS)
def test_every_module_has_a_layer(package):
    layered = sorted(name for layer in LAYERS[package] for name in layer)
    assert layered == sorted(_modules(package))


@pytest.mark.parametrize(
    ("package", "module"), [(package, name) for package in LAYERS for name in _modules(package)]
)
def test_imports_come_from_earlier_layers(package, module):
    level = {name: number for number, layer in enumerate(LAYERS[package]) for name in layer}
    imported = _own_imports(package, ROOT / package / f"{module}.py")
    assert {name for name in imported if level[name] > level[module]} == set()


@pytest.mark.parametrize("package", ["tf_echo", "tf_scratchpipe"])
def test_no_imports_in_a_circle(package):
    modules = _modules(package)
    waiting = {name: _own_imports(package, path) - {name} for name, path in modules.items()}
    while free := {name for name, needed in waiting.items() if not needed}:
        waiting = {name: needed - free for name, needed in waiting.items() if name not in free}
    assert waiting == {}


@pytest.mark.parametrize(
    ("package", "module"), [(p, m) for p, names in WITHOUT_TENSORFLOW.items() for m in names]
)
def test_deciding_needs_no_tensorflow(package, module):
    path = ROOT / package / f"{module}.py"
    assert _imports_package(path, "tensorflow", "keras") == set()
    # Nor does anything that it imports.
    assert _own_imports(package, path) <= set(WITHOUT_TENSORFLOW[package])


def test_planner_and_rewriter_meet_in_the_plan_only():
    planners, rewriters = {"planner", "loop_planner"}, {"rewriter", "loop_rewriter"}
    for planner in planners:
        assert not rewriters & _own_imports("tf_echo", ROOT / f"tf_echo/{planner}.py")
    for rewriter in rewriters:
        assert not planners & _own_imports("tf_echo", ROOT / f"tf_echo/{rewriter}.py")


@pytest.mark.parametrize(
    ("package", "other"), [("tf_echo", "tf_scratchpipe"), ("tf_scratchpipe", "tf_echo")]
)
def test_the_packages_never_import_each_other(package, other):
    assert {n: i for n, p in _modules(package).items() if (i := _imports_package(p, other))} == {}


PRIVATE = (
    "tensorflow.python",
    "tensorflow.core",
    "tensorflow.compiler",
    "keras.src",
    "tf_keras.src",
)


@pytest.mark.parametrize("package", ["tf_echo", "tf_scratchpipe"])
def test_private_parts_of_tensorflow_are_imported_where_their_names_say_so(package):
    internals = {"tf_internals", "loop_internals", "tf_keras_internals"}
    others = {name: path for name, path in _modules(package).items() if name not in internals}
    private = {
        name: sorted(i for i in _imports(path) if i.startswith(PRIVATE))
        for name, path in others.items()
    }
    assert {name: found for name, found in private.items() if found} == {}


@pytest.mark.parametrize("package", ["tf_echo", "tf_scratchpipe"])
def test_tf_keras_is_imported_by_its_own_binding_only(package):
    importers = {name for name, p in _modules(package).items() if _imports_package(p, "tf_keras")}
    binding = {name for name in _modules(package) if "tf_keras" in name}
    assert importers <= binding
    # And the package does not import that: it is there without tf_keras.
    others = {name: path for name, path in _modules(package).items() if name not in binding}
    assert {n: i for n, p in others.items() if (i := _own_imports(package, p) & binding)} == {}


def test_no_package_imports_tests():
    for package in ("tf_echo", "tf_scratchpipe"):
        for path in _modules(package).values():
            assert _imports_package(path, "tests", "pytest") == set()

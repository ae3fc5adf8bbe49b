"""The layer for tf_keras and TensorFlow Recommenders, which need a process of their own.

One such process runs all tests of `tf_keras_cases.py`; what it finds of each is asserted here.
"""

import ast
import importlib.util
import os
import pathlib
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent
CASES = pathlib.Path(__file__).parent / "tf_keras_cases.py"
NEEDED = ("tf_keras", "tensorflow_recommenders")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")

NAMES = [
    node.name
    for node in ast.parse(CASES.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
]


def _run(*arguments, legacy=True):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("TF_USE_LEGACY_KERAS", None)
    if legacy:
        environment["TF_USE_LEGACY_KERAS"] = "1"
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)


def _cases(folder, marked):
    """What went wrong in each test function: texts by case, none if all went well."""
    report = folder / "report.xml"
    options = "-m pytest -q -p no:xdist -p no:cacheprovider -o addopts= --strict-markers -m"
    done = _run(*options.split(), marked, f"--junitxml={report}", CASES)
    assert report.exists(), done.stdout + done.stderr
    found = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        texts = found.setdefault(case.get("name").partition("[")[0], {})
        problems = [child for child in case if child.tag in ("failure", "error", "skipped")]
        if problems:
            texts[case.get("name")] = "\n".join(child.text or "" for child in problems)
    assert found, done.stdout + done.stderr
    return found


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return _cases(tmp_path_factory.mktemp("tf_keras"), "not slow")


@pytest.mark.parametrize("name", NAMES)
def test_under_tf_keras(name, outcomes):
    problems = outcomes.get(name, {})
    assert problems == {}, "\n".join(problems.values())


@pytest.mark.slow
def test_under_tf_keras_what_takes_long(tmp_path):
    outcomes = _cases(tmp_path, "slow")
    assert len(outcomes) == 7
    assert not any(outcomes.values()), outcomes


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("recbole") is None, reason="no MovieLens-100K here")
def test_the_example_trains_each_model_to_the_metric_of_its_twin():
    done = _run(ROOT / "examples" / "tfrs_ranking.py")
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.count("  ") > 3][1:]
    assert [line[0] for line in lines] == ["tasks.Ranking", "tasks.Retrieval", "models.Ranking"]
    for _, _, plain, cached, difference, hits, evictions, *_ in lines:
        assert (plain, difference, hits) == (cached, "0e+00", "100.0%")
        assert int(evictions.replace(",", "")) > 100_000
    stars, retrieved, liked = (float(line[3]) for line in lines)
    # The mean of all ratings has 1.12, a hundred movies by chance 0.06, a coin 0.5.
    assert stars < 1.0
    assert retrieved > 0.14
    assert liked > 0.75


_WITHOUT_THE_VARIABLE = """
import sys
import keras, tensorflow as tf, tf_scratchpipe
assert "tf_keras" not in sys.modules
sys.modules["tf_keras"] = None
try:
    from tf_scratchpipe import for_tf_keras
except ImportError as error:
    print(error)
del sys.modules["tf_keras"]
from tf_scratchpipe import for_tf_keras
assert not issubclass(for_tf_keras.ScratchPipeEmbedding, keras.layers.Layer)
assert tf.keras.layers.Dense is keras.layers.Dense
"""


def test_keras_3_stays_what_it_is_and_tf_keras_is_asked_for_when_it_is_missing():
    done = _run("-c", _WITHOUT_THE_VARIABLE, legacy=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("tf_scratchpipe.for_tf_keras needs tf_keras. Install it")
    assert 'pip install "tf-echo-scratchpipe[tfrs]"' in done.stdout

"""What the traced step contains: no read of a whole variable, and each op on its device."""

import json
import os
import pathlib
import subprocess
import sys

import keras
import pytest
import tensorflow as tf

from tests.scratchpipe import uncached
from tf_scratchpipe import ScratchPipeEmbedding, lookahead


def _graphs(graph):
    """A graph and all functions that it calls."""
    definition = graph.as_graph_def()
    yield definition.node
    for function in definition.library.function:
        yield function.node_def


def _traced_step(model, batch):
    return uncached.train_step(model).get_concrete_function(*batch)


@pytest.mark.parametrize("mode", ["pipelined", "synchronous", "static", "host"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_no_variable_of_the_table_is_read_as_a_whole(mode, optimizer):
    hot = {"hot_ids": [1, 2, 3]} if mode == "static" else {}
    model, layer = uncached.cached_model(optimizer, num_slots=600, mode=mode, **hot)
    ids, targets = uncached.data(1)
    concrete = _traced_step(model, (tf.constant(ids), tf.constant(targets)))
    readers = [
        operation.type
        for handle in _handles(concrete.graph, layer)
        for operation in handle.consumers()
    ]
    assert set(readers) == {"ResourceGather", "ResourceScatterUpdate"}


def _handles(graph, layer):
    """The graph's inputs that are handles of the table or its optimizer slots."""
    storages = uncached.storages(layer)
    handles = [variable.handle for storage in storages for variable in storage.variables]
    return [inner for outer, inner in graph.captures if any(outer is own for own in handles)]


def test_a_wider_table_does_not_change_the_step():
    kinds = []
    for rows in (100, 100_000):
        inputs = keras.Input((4,), dtype="int32")
        layer = ScratchPipeEmbedding(rows, 4, num_slots=90, combiner="sum", optimizer="adam")
        model = keras.Model(inputs, keras.layers.Dense(1)(layer(inputs)))
        model.compile("sgd", "mse")
        ids, targets = uncached.data(1, rows=100)
        concrete = _traced_step(model, (tf.constant(ids), tf.constant(targets)))
        kinds.append(sorted(sorted(n.op for n in nodes) for nodes in _graphs(concrete.graph)))
    assert kinds[0] == kinds[1]


def test_growth_and_epochs_do_not_trace_again():
    model, layer = uncached.cached_model("adagrad", num_slots=None)
    traces = []
    original = layer.call
    layer.call = lambda *a, **k: (traces.append(1), original(*a, **k))[1]
    ids, targets = uncached.data(20)
    small = ids % 40
    model.fit(uncached.dataset(small[:320], targets[:320]).apply(lookahead(model)), verbose=0)
    before, slots = len(traces), layer.stats().slots
    model.fit(uncached.dataset(ids, targets).apply(lookahead(model)), epochs=2, verbose=0)
    assert layer.stats().slots > slots
    # The last batch of an epoch is smaller: one more trace with an open batch dimension.
    assert len(traces) - before <= 1


_PLACED = """
import json, sys
import numpy as np
import tensorflow as tf
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
sys.path.insert(0, sys.argv[1])
from tests.scratchpipe import uncached
from tf_scratchpipe import lookahead

mode, optimizer = sys.argv[2:]
hot = {"hot_ids": np.arange(300)} if mode == "static" else {}
model, layer = uncached.cached_model(
    optimizer, num_slots=600, mode=mode, storage_device="/device:CPU:1", **hot
)
ids, targets = uncached.data(20)
train = uncached.dataset(ids, targets).apply(lookahead(model, debug=mode == "pipelined"))
model.fit(train, verbose=0)
host, other = uncached.cached_model(optimizer, num_slots=600, mode="host")
host.fit(uncached.dataset(ids, targets), verbose=0)
# Graph optimizers may round otherwise where a step is cut in two.
close = bool(np.allclose(layer.get_table(), other.get_table(), rtol=0, atol=1e-8))

step = uncached.train_step(model)
batch = next(iter(train))
step.get_concrete_function(*batch)
from tensorflow.python.eager import context
context.enable_run_metadata()
step(*batch)
data = context.export_run_metadata()
placed = {}
for graph in data.partition_graphs:
    for node in graph.node:
        placed.setdefault(node.op, []).append(node.device[-5:])
storages = uncached.storages(layer)[1 if mode == "host" else 0:]
variables = [v.device[-5:] for s in storages for v in s.variables]
print(json.dumps({"close": close, "placed": placed, "variables": variables,
                  "applied": layer.engine.rows.applied.device[-5:]}))
"""


@pytest.mark.parametrize(
    ("mode", "optimizer", "variables", "gathers"),
    [
        ("pipelined", "adagrad", ["CPU:1"] * 2, {"CPU:1"}),
        pytest.param("synchronous", "sgd", ["CPU:1"], {"CPU:1"}, marks=pytest.mark.slow),
        ("static", "adagrad", ["CPU:1"] * 2 + ["CPU:0"] * 2, {"CPU:0", "CPU:1"}),
        pytest.param("host", "adagrad", ["CPU:0"] * 2, {"CPU:0"}, marks=pytest.mark.slow),
    ],
)
def test_storage_and_its_gathers_are_on_the_device(mode, optimizer, variables, gathers):
    root = str(pathlib.Path(__file__).parent.parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", _PLACED, root, mode, optimizer],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["close"]
    assert found["variables"] == variables
    assert found["applied"] == "CPU:0"
    assert set(found["placed"]["ResourceScatterUpdate"]) == gathers
    if mode == "static":  # The map from ids to places is on the host.
        gathers = gathers | {"CPU:0"}
    assert set(found["placed"]["ResourceGather"]) == gathers

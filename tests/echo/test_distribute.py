"""Under `tf.distribute` a model trains the same with and without EchoOptimizer, bit by bit.

Devices and clusters are settled when TensorFlow starts, so each setting runs in processes of its
own: this file, as a script, trains every case twice, with the plain optimizer and with the wrapped
one, and writes down what became of both. Grappler is off: what it fuses, and so rounds, depends on
what else is in the graph.

One trace holds the steps of all replicas of a process, and has one plan.
"""

import dataclasses
import json
import os
import pathlib
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tf_echo
from tests import reference

BATCH, STEPS, FEATURES, WIDTH = 256, 5, 32, 64
SECONDS = 180
"""After which a process is taken to hang."""

Strategy = tf.distribute.Strategy


@dataclasses.dataclass(frozen=True)
class Result:
    """What one training left behind, read back from its process."""

    values: list[np.ndarray]
    """Losses, weights, other variables of the model, variables of the optimizer."""
    recomputed: list[list[str]]
    """For each plan, the names of the ops that run again."""
    warned: list[str]


# In the processes.


def _model(normalization: Callable[[], layers.Layer] | None = None) -> keras.Model:
    model = keras.Sequential([keras.Input((FEATURES,))])
    for _ in range(3):
        model.add(layers.Dense(WIDTH, activation="gelu"))
        model.add(layers.Dropout(0.2) if normalization is None else normalization())
    model.add(layers.Dense(1))
    return model


def _arrays() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.normal(size=(STEPS * BATCH - BATCH // 3, FEATURES)).astype("float32")
    return x, x[:, :1] ** 2


def _dataset(open_batch: bool) -> tf.data.Dataset:
    dataset = tf.data.Dataset.from_tensor_slices(_arrays()).repeat(2)
    return dataset.batch(BATCH, drop_remainder=not open_batch)


def _fit(
    strategy: Strategy, model: keras.Model, optimizer: Any, open_batch: bool = False
) -> Sequence[float]:
    model.compile(optimizer=optimizer, loss="mse", metrics=["mae"], jit_compile=False)
    history = model.fit(_dataset(open_batch), epochs=2, shuffle=False, verbose=0).history
    return [*history["loss"], *history["mae"]]


def _fit_open(strategy: Strategy, model: keras.Model, optimizer: Any) -> Sequence[float]:
    return _fit(strategy, model, optimizer, open_batch=True)


def _loop(strategy: Strategy, model: keras.Model, optimizer: Any) -> Sequence[float]:
    def step_of_a_replica(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
            scaled = optimizer.scale_loss(loss / strategy.num_replicas_in_sync)
        gradients = tape.gradient(scaled, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    @tf.function
    def step(x, y):
        losses = strategy.run(step_of_a_replica, args=(x, y))
        return strategy.reduce("mean", losses, axis=None)

    dataset = strategy.experimental_distribute_dataset(_dataset(open_batch=False))
    return [float(step(x, y)) for x, y in dataset]


def _sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.01, momentum=0.9)


def _scaled() -> keras.optimizers.Optimizer:
    # Keras asks one replica alone whether gradients are finite, so it must stay small enough.
    return keras.optimizers.LossScaleOptimizer(_sgd(), initial_scale=1024.0, dynamic_growth_steps=5)


def _half() -> keras.Model:
    keras.config.set_dtype_policy("mixed_float16")  # until the session is cleared
    return _model()


def _synchronized() -> layers.Layer:
    return layers.BatchNormalization(momentum=0.9, synchronized=True)


CASES: dict[str, tuple[Callable[..., Any], Callable[[], keras.Model], Callable[[], Any]]] = {
    "fit": (_fit, _model, _sgd),
    "open batch": (_fit_open, _model, _sgd),
    "loop": (_loop, _model, lambda: keras.optimizers.Adam(0.01)),
    "loss scale": (_fit, _half, _scaled),
    "synchronized": (_fit, lambda: _model(_synchronized), _sgd),
}
STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "one device": lambda: tf.distribute.OneDeviceStrategy("CPU:1"),
    "mirrored": lambda: tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]),
    "workers": lambda: tf.distribute.MultiWorkerMirroredStrategy(),
}


def _train(strategy: Strategy, case: str, wrap: Callable[[Any], Any]) -> dict[str, Any]:
    train, build, inner = CASES[case]
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(3)
    with strategy.scope(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", tf_echo.EchoWarning)
        model, optimizer = build(), wrap(inner())
        optimizer.build(model.trainable_variables)
        losses = train(strategy, model, optimizer)
    variables = [*model.variables, *optimizer.variables]
    return {
        "values": [np.float64(losses), *(variable.numpy() for variable in variables)],
        "recomputed": [
            [node for decision in plan.recomputed for node in decision.nodes]
            for plan in getattr(optimizer, "plans", [])
        ],
        "warned": [str(w.message) for w in caught if w.category is tf_echo.EchoWarning],
    }


def main(strategy_name: str, path: str, *cases: str) -> None:
    """Trains cases in this process, and writes what became of them to files."""
    if strategy_name != "workers":
        (cpu,) = tf.config.list_physical_devices("CPU")
        halves = [tf.config.LogicalDeviceConfiguration()] * 2
        tf.config.set_logical_device_configuration(cpu, halves)
    strategy = STRATEGIES[strategy_name]()
    notes, arrays = {}, {}
    with reference.grappler(enabled=False):
        for case in cases:
            for who, wrap in {"plain": lambda o: o, "echo": tf_echo.EchoOptimizer}.items():
                found = _train(strategy, case, wrap)
                values = found.pop("values")
                arrays.update({f"{case}-{who}-{n:03}": value for n, value in enumerate(values)})
                notes[f"{case}-{who}"] = found
    np.savez(f"{path}.npz", **arrays)
    pathlib.Path(f"{path}.json").write_text(json.dumps(notes))


# In the tests.


def _run(
    tmp_path: pathlib.Path, strategy: str, *cases: str, cluster: Sequence[dict] = ({},)
) -> list[dict[str, tuple[Result, Result]]]:
    """For each process of the cluster and each case, the results with and without Echo."""
    paths = [str(tmp_path / f"worker{number}") for number in range(len(cluster))]
    command = [sys.executable, "-m", "tests.echo.test_distribute", strategy]
    logs = [pathlib.Path(f"{path}.log") for path in paths]
    processes = [
        subprocess.Popen(
            [*command, path, *cases],
            env={**os.environ, **environment},
            cwd=pathlib.Path(__file__).parents[2],
            stderr=log.open("w"),
        )
        for path, log, environment in zip(paths, logs, cluster, strict=True)
    ]
    try:
        for process, log in zip(processes, logs, strict=True):
            assert process.wait(timeout=SECONDS) == 0, log.read_text()
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [{case: _results(path, case) for case in cases} for path in paths]


def _results(path: str, case: str) -> tuple[Result, Result]:
    notes = json.loads(pathlib.Path(f"{path}.json").read_text())
    with np.load(f"{path}.npz") as arrays:
        echo, plain = (
            Result(
                [arrays[name] for name in sorted(arrays) if name.startswith(f"{case}-{who}-")],
                **notes[f"{case}-{who}"],
            )
            for who in ("echo", "plain")
        )
    return echo, plain


def _assert_same(values: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> None:
    assert len(values) == len(expected) > 1
    for value, other in zip(values, expected, strict=True):
        np.testing.assert_array_equal(value, other)


def _replicas(nodes: Sequence[str]) -> set[bool]:
    """Of which replicas ops run again: False for the first, True for the second."""
    return {node.startswith("replica_1/") for node in nodes}


@pytest.fixture(scope="module")
def mirrored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Result, Result]]:
    return _run(tmp_path_factory.mktemp("mirrored"), "mirrored", *CASES)[0]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_replicas_train_the_same(case, mirrored):
    echo, plain = mirrored[case]
    _assert_same(echo.values, plain.values)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_one_plan_recomputes_in_both_replicas(case, mirrored):
    echo, _ = mirrored[case]
    assert [_replicas(nodes) for nodes in echo.recomputed] == [{False, True}]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_no_replica_is_warned(case, mirrored):
    echo, _ = mirrored[case]
    assert echo.warned == []


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Result, Result]]:
    return _run(tmp_path_factory.mktemp("one_device"), "one device", "fit", "loop")[0]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["fit", "loop"])
def test_one_device_trains_the_same(case, one_device):
    echo, plain = one_device[case]
    assert [bool(nodes) for nodes in echo.recomputed] == [True]
    assert echo.warned == []
    _assert_same(echo.values, plain.values)


def _cluster(workers: int) -> list[dict[str, str]]:
    """What tells each process of a cluster on this machine who it is."""
    sockets = [socket.socket() for _ in range(workers)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    addresses = ["{}:{}".format(*one.getsockname()) for one in sockets]
    for one in sockets:
        one.close()
    return [
        {
            "TF_CONFIG": json.dumps(
                {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
            )
        }
        for index in range(workers)
    ]


@pytest.mark.slow
def test_two_workers_train_the_same(tmp_path):
    """In a loop by hand: without Echo, too, `fit` fails under this strategy."""
    first, second = _run(tmp_path, "workers", "loop", cluster=_cluster(2))
    for echo, plain in (first["loop"], second["loop"]):
        assert [bool(nodes) for nodes in echo.recomputed] == [True]
        assert echo.warned == []
        _assert_same(echo.values, plain.values)
    _assert_same(first["loop"][0].values, second["loop"][0].values)


if __name__ == "__main__":
    main(*sys.argv[1:])

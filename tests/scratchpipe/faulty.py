"""Models that are hit by faults, and twins without a cache that are trained on what was trained."""

import functools
import gc
import itertools
import threading
import time
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.scratchpipe import uncached
from tf_scratchpipe import ScratchPipeEmbedding

BATCHES = 12
IDS, TARGETS = uncached.data(BATCHES)


def cases(by_default: set[Any], *axes: Iterable[str]) -> list[Any]:
    """All combinations, of which some are run by default."""
    return [
        pytest.param(*case, marks=() if case in by_default else pytest.mark.slow)
        for case in itertools.product(*axes)
    ]


def _adagrad(**settings: Any) -> keras.optimizers.Optimizer:
    return keras.optimizers.Adagrad(0.1, **settings)


OPTIMIZERS = {
    "accumulating": lambda: _adagrad(gradient_accumulation_steps=5),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(_adagrad(), dynamic_growth_steps=3),
}
SLOTS = {"tight": 130, "shared": 260, "two": 260}


def _checked_loss(targets: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    """Fails for targets that are not numbers."""
    return keras.losses.mean_squared_error(
        tf.debugging.check_numerics(targets, "bad targets"), outputs
    )


class Trained:
    """A model with one or two tables. In case "shared", both read one feature."""

    def __init__(self, case: str, mode: str = "pipelined") -> None:
        self.case = case
        names = ("a", "b") if case in ("two", "shared") else ("a",)
        settings = {"combiner": "sum", "embeddings_initializer": uncached.initializer()}
        settings |= {"num_slots": SLOTS.get(case, 600), "mode": mode}
        self.tables = [
            ScratchPipeEmbedding(uncached.ROWS, uncached.DIM, name=f"table_{name}", **settings)
            for name in names
        ]
        inputs = {
            name: keras.Input((uncached.LOOKUPS,), dtype="int32", name=name)
            for name in (names if case == "two" else "a")
        }
        read = [inputs.get(name, inputs["a"]) for name in names]
        rows = [table(ids) for table, ids in zip(self.tables, read, strict=True)]
        # Sums of two gradients would be rounded otherwise in another order.
        joined = keras.layers.Concatenate()(rows) if len(rows) > 1 else rows[0]
        kernel = keras.initializers.GlorotUniform(seed=1)
        self.model = keras.Model(inputs, keras.layers.Dense(1, kernel_initializer=kernel)(joined))
        loss = "mse" if case == "scaled" else _checked_loss
        self.model.compile(OPTIMIZERS.get(case, _adagrad)(), loss)

    def state(self) -> list[np.ndarray]:
        """All that training changes but the optimizer's own."""
        dense = [weight.numpy() for weight in self.model.layers[-1].weights]
        return dense + [table.engine.get(number) for table in self.tables for number in (0, 1)]

    def batches_trained(self) -> int:
        """The last batch of a fit may be smaller than others."""
        return -(-self.tables[0].stats().train_lookups // IDS[: uncached.BATCH].size)


def source(case: str) -> tf.data.Dataset:
    """The batches of a fit. Those of case "two" have two features."""
    targets = TARGETS.copy()
    if case == "scaled":  # Two in a row, and one more, are skipped.
        targets[[uncached.BATCH, 2 * uncached.BATCH, 6 * uncached.BATCH]] = np.inf
    features = {"a": IDS, "b": IDS[::-1]} if case == "two" else {"a": IDS}
    return uncached.dataset(features, targets)


class Twin:
    """Trained on plain ids, without a cache; in case "plain" without the layer."""

    def __init__(self, case: str) -> None:
        self.fits: tuple[int, ...] = ()
        self._source = source(case)
        if case == "plain":
            model, layer = uncached.uncached_model("adagrad")
            self._source = self._source.map(lambda features, targets: (features["a"], targets))
            self._outcome = lambda: uncached.uncached_outcome(model, layer, {})
            self.state = lambda: self._outcome().dense + self._outcome().tables
        else:
            trained = Trained(case, "host")
            model, self.state = trained.model, trained.state
        self._model = model

    def fit(self, batches: int) -> None:
        self.fits = (*self.fits, batches)
        if batches:
            self._model.fit(self._source.take(batches), verbose=0)


_twins: dict[str, Twin] = {}


@functools.cache
def expected(case: str, fits: tuple[int, ...]) -> list[np.ndarray]:
    """The state after so many batches in each fit."""
    twin = _twins.get(case)
    if twin is None or fits[: len(twin.fits)] != twin.fits:
        twin = _twins[case] = Twin(case)
    for batches in fits[len(twin.fits) :]:
        twin.fit(batches)
    return twin.state()


def assert_trained_on(trained: Trained, *fits: int) -> None:
    """The state is that after so many batches in each fit, bit by bit."""
    for mine, theirs in zip(trained.state(), expected(trained.case, fits), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def assert_no_threads() -> None:
    """The stages' threads have ended, or do with the iterator, which Keras may leave to `gc`."""
    until = time.monotonic() + 10
    while ours := [t.name for t in threading.enumerate() if t.name.startswith("scratchpipe")]:
        assert time.monotonic() < until, ours
        gc.collect()
        time.sleep(0.01)


def fail(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, at: int) -> None:
    """Have the call of this number fail, of those outside of graphs."""
    original = getattr(owner, name)
    calls: list[bool] = []

    def failing(*arguments: Any, **settings: Any) -> Any:
        calls.append(tf.executing_eagerly())
        if sum(calls) == at and calls[-1]:
            raise OSError(28, "No space left: injected")
        return original(*arguments, **settings)

    monkeypatch.setattr(owner, name, failing)

"""Long trainings with ids whose popularity drifts, stopped and begun again at random.

What is held stays as much as it was, every lookup finds its row, and the result is, bit by bit,
that of an uncached model which is trained, stopped and begun again alike.
"""

import collections
import gc
import os
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.scratchpipe import uncached
from tests.scratchpipe.faulty import assert_no_threads
from tf_scratchpipe import lookahead
from tf_scratchpipe.executor import _Channel
from tf_scratchpipe.pipeline import Batch, PipelineRun
from tf_scratchpipe.plan import BatchPlan
from tf_scratchpipe.planner import Looked
from tf_scratchpipe.transfers import Transfer

OURS = (PipelineRun, Batch, BatchPlan, Looked, Transfer, _Channel)
VALIDATION = uncached.dataset(*uncached.data(3, seed=1))
GROWTH = 5 * 2**20
"""Bytes in 15,000 steps and 30 fits, for what allocators and Keras do. To keep the slots of each
batch would take three times as much."""


def _batch(number):
    """Zipf's law over rows of which others are at the top with every batch."""
    rng = np.random.default_rng([7, number])
    ids = rng.zipf(1.2, (uncached.BATCH, uncached.LOOKUPS)) - 1 + number // 2
    ids[:, 0] = ids[:, 1]
    targets = rng.random((uncached.BATCH, 1))
    return (ids % uncached.ROWS).astype("int32"), targets.astype("float32")


class _Course(keras.callbacks.Callback):
    """Counts the steps of all fits, and stops a fit where it should.

    Its dataset goes on, in each pass, with the batch after the last one that was trained.
    """

    def __init__(self, stops):
        super().__init__()
        self.stops = stops
        self.trained = 0
        shapes = (uncached.BATCH, uncached.LOOKUPS), (uncached.BATCH, 1)
        self.dataset = tf.data.Dataset.from_generator(
            lambda: map(_batch, range(self.trained, stops[-1] + 100)),
            output_signature=(
                tf.TensorSpec(shapes[0], tf.int32),
                tf.TensorSpec(shapes[1], tf.float32),
            ),
        )

    def on_train_batch_end(self, batch, logs=None):
        self.trained += 1
        if self.trained in self.stops:
            self.model.stop_training = True

    def run(self, model, train, steps, after_fit=lambda: None):
        """Fit again and again. Returns the histories, joined."""
        joined = collections.defaultdict(list)
        while self.trained < self.stops[-1]:
            history = model.fit(
                train,
                epochs=10**6,
                steps_per_epoch=steps,
                validation_data=VALIDATION,
                verbose=0,
                callbacks=[self],
            ).history
            for name, values in history.items():
                joined[name] += values
            after_fit()
        return dict(joined)


class _Watch:
    """What the process holds after each fit, without what other tests have left."""

    def __init__(self):
        self.rss, self.threads, self.objects = [], [], []
        self._before = self._ours()

    @staticmethod
    def _ours():
        gc.collect()
        kinds = collections.Counter(type(each) for each in gc.get_objects())
        return {kind.__name__: kinds[kind] for kind in OURS}

    def __call__(self):
        assert_no_threads()
        held = {name: count - self._before[name] for name, count in self._ours().items()}
        self.objects.append(held)
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
        self.rss.append(pages * os.sysconf("SC_PAGE_SIZE"))
        self.threads.append(len(os.listdir("/proc/self/task")))


def _soak(steps, stops, validate_every, seed=0):
    """Train both and compare. Returns the layer, and what was held after each fit."""
    rng = np.random.default_rng(seed)
    points = sorted({*rng.choice(steps - 1, stops, replace=False) + 1, steps})
    model, layer = uncached.cached_model("adagrad", num_slots=600)
    course, watch = _Course(points), _Watch()
    train = course.dataset.apply(lookahead(model, stall_seconds=60)).prefetch(2)
    history = course.run(model, train, validate_every, watch)
    twin, table = uncached.uncached_model("adagrad")
    course = _Course(points)
    expected = course.run(twin, course.dataset, validate_every)
    uncached.assert_same(
        uncached.outcome(model, layer, history),
        uncached.uncached_outcome(twin, table, expected),
    )
    assert course.trained == steps
    assert len(watch.rss) == stops + 1
    stats = layer.stats()
    assert stats.train_lookups == steps * uncached.BATCH * uncached.LOOKUPS
    assert stats.train_hits == stats.train_lookups
    assert stats.evictions > steps
    return watch


def _assert_few(objects):
    """One pass that has been stopped is held, with the batches that were in its stages."""
    for held in objects:
        assert held["PipelineRun"] <= 1
        assert all(count <= 20 for count in held.values()), held


def test_some_steps_with_stops_at_random():
    watch = _soak(100, 2, 40)
    _assert_few(watch.objects)


@pytest.mark.slow
def test_twenty_thousand_steps_take_no_more_memory_than_a_few():
    watch = _soak(20_000, 40, 500)
    _assert_few(watch.objects)
    warm = len(watch.rss) // 4
    assert watch.rss[-1] - watch.rss[warm] < GROWTH, [size >> 10 for size in watch.rss]
    assert watch.threads[-1] <= max(watch.threads[: warm + 1]), watch.threads

"""The disk is full while a training is saved: the training is what it was, and goes on.

Writes to `/dev/full` fail as they do then.
"""

import errno
import functools
import pathlib

import keras
import numpy as np
import pytest

from tests.scratchpipe import uncached
from tests.scratchpipe.faulty import assert_no_threads
from tf_scratchpipe import ResumeTraining, layer_saving, lookahead

pytestmark = pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="needs /dev/full")

BATCHES = 12
SOURCE = uncached.dataset(*uncached.data(BATCHES))


@functools.cache
def _expected(*fits):
    """After so many batches in each fit."""
    model, layer = uncached.uncached_model("adagrad")
    for batches in fits:
        model.fit(SOURCE.take(batches), verbose=0)
    return uncached.uncached_outcome(model, layer, {})


def _assert_trained_on(model, layer, *fits):
    uncached.assert_same(uncached.outcome(model, layer, {}), _expected(*fits))


def _fill_disk(monkeypatch, name, at):
    """What is written to the `at`-th file of this name does not fit."""
    original, opened = pathlib.Path.open, []

    def full(self, mode="r", *arguments, **settings):
        if self.name == name and "w" in mode:
            opened.append(self)
            if len(opened) == at:
                return original(pathlib.Path("/dev/full"), mode, *arguments, **settings)
        return original(self, mode, *arguments, **settings)

    monkeypatch.setattr(pathlib.Path, "open", full)


FILES = ["table.npy", "optimizer.accumulator.npy", "state.json", "variables.bin", "training.json"]
DEFAULT = ["optimizer.accumulator.npy", "training.json"]


@pytest.mark.parametrize("executor", ["inline", "thread"])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in DEFAULT else pytest.mark.slow) for n in FILES]
)
def test_a_checkpoint_that_does_not_fit(tmp_path, name, executor, monkeypatch):
    model, layer = uncached.cached_model("adagrad", num_slots=260)
    resume = ResumeTraining(tmp_path, save_freq=4)
    train = SOURCE.apply(lookahead(model, resume=resume, executor=executor)).prefetch(2)
    _fill_disk(monkeypatch, name, 2)
    with pytest.raises(OSError, match="No space left on device") as raised:
        model.fit(train, verbose=0, callbacks=[resume])
    assert raised.value.errno == errno.ENOSPC
    del raised
    _assert_trained_on(model, layer, 8)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
    monkeypatch.undo()
    assert int(layer.stats().train_lookups) == 8 * uncached.BATCH * uncached.LOOKUPS
    # From the checkpoint before, after batch 4.
    model.fit(train, verbose=0, callbacks=[resume])
    _assert_trained_on(model, layer, BATCHES)
    assert_no_threads()


@pytest.mark.parametrize("executor", ["inline", "thread"])
def test_a_model_file_that_does_not_fit(tmp_path, executor, monkeypatch):
    monkeypatch.setattr(layer_saving, "SIDECAR_BYTES", 0)
    model, layer = uncached.cached_model("adagrad", num_slots=260)
    train = SOURCE.apply(lookahead(model, executor=executor)).prefetch(2)
    each = keras.callbacks.ModelCheckpoint(tmp_path / "{batch}.keras", save_freq=3)
    with monkeypatch.context() as patch:
        _fill_disk(patch, "optimizer.accumulator.npy", 2)
        with pytest.raises(OSError, match="No space left on device"):
            model.fit(train, verbose=0, callbacks=[each])
    _assert_trained_on(model, layer, 6)
    model.fit(train, verbose=0)
    _assert_trained_on(model, layer, 6, BATCHES)
    model.save(tmp_path / "whole.keras")
    loaded = keras.models.load_model(tmp_path / "whole.keras")
    np.testing.assert_array_equal(loaded.get_layer("table").get_table(), layer.get_table())
    assert_no_threads()

"""What the caches do is shown while a model trains."""

import csv

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_scratchpipe import CacheMonitor, ScratchPipeEmbedding, lookahead

RNG = np.random.default_rng(0)
BATCH, BATCHES, ROWS = 8, 12, 90
COUNTS = ("hit_rate", "fills", "evictions", "held", "slots")


def _model(mode="pipelined", shared=False):
    inputs = {name: keras.Input((2,), dtype="int32", name=name) for name in ("a", "b")}
    reads = [("one", "a"), ("two", "a" if shared else "b")]
    rows = [
        ScratchPipeEmbedding(ROWS, 3, num_slots=70, combiner="sum", mode=mode, name=name)(
            inputs[feature]
        )
        for name, feature in reads
    ]
    used = {"a": inputs["a"]} if shared else inputs
    model = keras.Model(used, keras.layers.Dense(1)(keras.layers.concatenate(rows)))
    model.compile("sgd", "mse")
    return model


def _data(model):
    count = BATCH * BATCHES
    ids = {name: RNG.integers(0, ROWS, (count, 2)).astype("int32") for name in ("a", "b")}
    features = {name: ids[name] for name in model.input}
    targets = RNG.random((count, 1)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((features, targets)).batch(BATCH)
    return data.apply(lookahead(model))


def _fit(model, *callbacks, **options):
    options = {"epochs": 3, "verbose": 0, "callbacks": list(callbacks), **options}
    return model.fit(_data(model), **options).history


class _BatchLogs(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(dict(logs))


def test_epochs_add_up_to_the_layers_own_numbers():
    model = _model()
    history = _fit(model, CacheMonitor())
    stats = [model.get_layer(name).stats() for name in ("one", "two")]
    assert len(history["loss"]) == len(history["cache_fills"]) == 3
    for name in ("fills", "evictions"):
        assert sum(history[f"cache_{name}"]) == sum(getattr(one, name) for one in stats) > 0
    lookups = 2 * BATCH * BATCHES * 2
    expected = sum(one.hits for one in stats) / sum(one.lookups for one in stats)
    assert stats[0].lookups * 2 == 3 * lookups
    np.testing.assert_allclose(np.mean(history["cache_hit_rate"]), expected)
    assert history["cache_slots"] == [140.0] * 3
    assert 0 < history["cache_held"][-1] == sum(one.held for one in stats)


def test_seconds_of_layers_of_one_dataset_count_once():
    model = _model()
    history = _fit(model, CacheMonitor(), epochs=1)
    waits = model.get_layer("two").stats().wait_seconds
    for stage in ("load", "plan", "collect", "exchange", "insert", "train"):
        (seconds,) = history[f"stall_{stage}_seconds"]
        expected = sum(s for (waiting, _), s in waits.items() if waiting == stage)
        np.testing.assert_allclose(seconds, expected, rtol=0.2, atol=0.02)


def test_layers_that_share_their_slots_count_once():
    model = _model(shared=True)
    history = _fit(model, CacheMonitor(per_layer=True))
    for name in COUNTS:
        assert history[f"cache_{name}"] == history[f"one_{name}"] == history[f"two_{name}"]


def test_each_layer_has_its_numbers_where_that_is_asked_for():
    history = _fit(_model(), CacheMonitor(per_layer=True))
    assert {f"{layer}_{name}" for layer in ("one", "two") for name in COUNTS} < set(history)
    for name in ("fills", "evictions", "held", "slots"):
        both = np.add(history[f"one_{name}"], history[f"two_{name}"])
        np.testing.assert_array_equal(history[f"cache_{name}"], both)


def test_numbers_come_after_batches_too_where_that_is_asked_for():
    logs = _BatchLogs()
    _fit(_model(), CacheMonitor(update_freq=4), logs, epochs=1)
    told = [number for number, log in enumerate(logs.seen) if "cache_hit_rate" in log]
    assert told == [3, 7, 11]


def test_the_log_file_has_them(tmp_path):
    _fit(_model(), CacheMonitor(), keras.callbacks.CSVLogger(str(tmp_path / "log.csv")))
    with open(tmp_path / "log.csv") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 3
    assert all(float(line["cache_fills"]) > 0 for line in lines)


def test_a_second_training_begins_anew():
    model = _model()
    monitor = CacheMonitor()
    _fit(model, monitor)
    before = model.get_layer("one").stats().fills + model.get_layer("two").stats().fills
    again = _fit(model, monitor)
    after = model.get_layer("one").stats().fills + model.get_layer("two").stats().fills
    assert sum(again["cache_fills"]) == after - before


@pytest.mark.filterwarnings("ignore:.*plain ids")
def test_a_cache_without_a_pipeline_is_shown_too():
    model = _model()
    history = model.fit(_data(_model("host")), verbose=0, callbacks=[CacheMonitor()]).history
    assert history["cache_fills"][0] > 0


def test_a_model_without_a_cache_is_an_error():
    with pytest.raises(ValueError, match="no ScratchPipeEmbedding layer with a cache"):
        _fit(_model("host"), CacheMonitor())


@pytest.mark.parametrize("update_freq", [0, -1, True, "batch", 1.5])
def test_wrong_frequencies_are_refused(update_freq):
    with pytest.raises(ValueError, match="`update_freq` must be"):
        CacheMonitor(update_freq=update_freq)

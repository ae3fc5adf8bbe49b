"""Iterators are started, abandoned, stopped, broken; the table is that of the trained batches."""

import threading
import time
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.scratchpipe import uncached
from tf_scratchpipe import ScratchPipeEmbedding, lookahead, pipeline, slot_group
from tf_scratchpipe.host_table import HostTable
from tf_scratchpipe.slot_group import SlotGroup

BATCHES = 12
IDS, TARGETS = uncached.data(BATCHES)
SOURCE = uncached.dataset(IDS, TARGETS)
EACH = [(ids.numpy(), targets.numpy()) for ids, targets in SOURCE]

executors = pytest.mark.parametrize(
    "executor", [pytest.param("inline", marks=pytest.mark.slow), "thread"]
)


def _model(slots=600, **settings):
    return uncached.cached_model("adagrad", num_slots=slots, **settings)


def _assert_trained_on(layer, batches):
    """The table is the one that these batches give, trained one after the other."""
    model, other = _model(mode="host")
    for ids, targets in batches:
        model.train_on_batch(ids, targets)
    for number in range(2):
        np.testing.assert_array_equal(layer.engine.get(number), other.engine.get(number))


def _threads():
    return [t.name for t in threading.enumerate() if t.name.startswith("scratchpipe")]


class _Stop(keras.callbacks.Callback):
    def __init__(self, after, how):
        super().__init__()
        self.after, self.how = after, how

    def on_train_batch_end(self, batch, logs=None):
        if batch + 1 == self.after:
            self.how(self.model)


@executors
def test_an_abandoned_first_look(executor):
    model, layer = _model()
    planned = SOURCE.apply(lookahead(model, executor=executor, debug=True))
    for _ in range(3):
        next(iter(planned))
    model.fit(planned, verbose=0)
    _assert_trained_on(layer, EACH)


@executors
@pytest.mark.parametrize("slots", [130, 600, None])
def test_a_pass_without_training(executor, slots, monkeypatch):
    monkeypatch.setattr(pipeline, "_DROPPED_SECONDS", 1.0)
    model, layer = _model(slots)
    planned = SOURCE.take(3).apply(lookahead(model, executor=executor, debug=True))
    if slots == 130:
        # There is no room for three batches of which none is trained.
        list(planned.take(1))
    else:
        assert len(list(planned)) == 3
    model.fit(planned, verbose=0, epochs=2)
    _assert_trained_on(layer, EACH[:3] * 2)


def test_a_second_pass_waits_for_slow_steps_of_the_first(monkeypatch):
    monkeypatch.setattr(pipeline, "_DROPPED_SECONDS", 0.2)
    model, layer = _model(130)
    planned = SOURCE.take(2).apply(lookahead(model, debug=True)).repeat(2).prefetch(3)
    for number, (ids, targets) in enumerate(planned):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(ids, training=True) - targets))
        # The next pass wants the slots of this step, which is under way for long.
        time.sleep(1.0 if number == 1 else 0.0)
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply(gradients, model.trainable_variables)
    assert number == 3
    host, other = _model(mode="host")
    for batch in EACH[:2] * 2:
        host.train_on_batch(*batch)
    # Eager steps round otherwise than graphs do.
    np.testing.assert_allclose(layer.get_table(), other.get_table(), rtol=1e-4, atol=1e-6)


def test_batches_of_an_earlier_pass_that_nobody_trains_are_given_up(monkeypatch):
    monkeypatch.setattr(pipeline, "_DROPPED_SECONDS", 0.2)
    model, layer = _model(130)
    assert len(list(SOURCE.take(1).apply(lookahead(model, debug=True)))) == 1
    model.fit(SOURCE.apply(lookahead(model, debug=True)), verbose=0)
    _assert_trained_on(layer, EACH)


@executors
def test_early_stop_and_start_again(executor):
    model, layer = _model()
    planned = SOURCE.apply(lookahead(model, executor=executor, debug=True)).prefetch(2)

    def stop(model):
        model.stop_training = True

    model.fit(planned, verbose=0, epochs=3, callbacks=[_Stop(4, stop)])
    _assert_trained_on(layer, EACH[:4])
    model.fit(planned, verbose=0)
    _assert_trained_on(layer, EACH[:4] + EACH)


@executors
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupt_and_start_again(executor, error):
    model, layer = _model()
    planned = SOURCE.apply(lookahead(model, executor=executor, debug=True))

    def raise_it(model):
        raise error

    with pytest.raises(error):
        model.fit(planned, verbose=0, callbacks=[_Stop(5, raise_it)])
    assert model.evaluate(SOURCE, verbose=0) > 0
    model.fit(planned, verbose=0)
    _assert_trained_on(layer, EACH[:5] + EACH)


@executors
def test_an_error_of_the_source_comes_in_order(executor):
    def generate():
        yield from EACH[:5]
        raise OSError("disk full")

    source = tf.data.Dataset.from_generator(generate, output_signature=SOURCE.element_spec)
    model, layer = _model()
    with pytest.raises(tf.errors.OpError, match="disk full"):
        model.fit(source.apply(lookahead(model, executor=executor)), verbose=0)
    _assert_trained_on(layer, EACH[:5])
    model.fit(SOURCE.apply(lookahead(model)), verbose=0)
    _assert_trained_on(layer, EACH[:5] + EACH)


@executors
@pytest.mark.parametrize("stage", ["look", "plan", "collect", "exchange", "insert"])
def test_an_error_in_a_stage_comes_in_order(executor, stage, monkeypatch):
    model, layer = _model()
    original, calls = getattr(SlotGroup, stage), []

    def failing(self, *arguments):
        calls.append(stage)
        if len(calls) == 6:
            raise OSError("broken stage")
        return original(self, *arguments)

    monkeypatch.setattr(SlotGroup, stage, failing)
    planned = SOURCE.apply(lookahead(model, executor=executor, debug=True))
    with pytest.raises(tf.errors.OpError, match="broken stage"):
        model.fit(planned, verbose=0)
    # The batches before it were trained, but for those that a look further ahead holds back.
    trained = layer.stats().train_lookups // EACH[0][0].size
    assert trained in ({3, 5} if stage == "look" else {5})
    _assert_trained_on(layer, EACH[:trained])
    model.fit(planned, verbose=0)
    _assert_trained_on(layer, EACH[:trained] + EACH)


def test_threads_end():
    model, _ = _model()
    planned = SOURCE.apply(lookahead(model))
    model.fit(planned, verbose=0)
    assert _threads() == []
    iterator = iter(SOURCE.repeat().apply(lookahead(model)))
    next(iterator)
    assert len(_threads()) == 5
    del iterator
    deadline = time.monotonic() + 10
    while _threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert _threads() == []


def test_a_new_iterator_ends_the_old_one():
    model, layer = _model()
    planned = SOURCE.apply(lookahead(model))
    old = iter(planned)
    stale = next(old)
    new = iter(planned)
    fresh = next(new)
    with pytest.raises(tf.errors.OpError, match="another one was started"):
        for _ in old:
            pass
    with pytest.raises(tf.errors.OpError, match="out of order"):
        model.train_on_batch(*stale)
    model.train_on_batch(*fresh)
    _assert_trained_on(layer, EACH[:1])


@pytest.mark.parametrize(
    "reorder",
    [
        lambda data: data.shuffle(4, seed=1),
        lambda data: data.cache().repeat(2),
        lambda data: data.skip(1),
        lambda data: data.interleave(lambda *b: tf.data.Dataset.from_tensors(b).repeat(2)),
    ],
    ids=["shuffle", "cache", "skip", "twice"],
)
def test_batches_out_of_order_are_an_error(reorder):
    model, _ = _model()
    planned = reorder(SOURCE.apply(lookahead(model)))
    with pytest.raises(tf.errors.OpError, match="must come after shuffle"):
        model.fit(planned, verbose=0)


def test_planned_batches_are_not_evaluated():
    model, layer = _model()
    planned = SOURCE.apply(lookahead(model))
    with pytest.raises(tf.errors.OpError, match="dataset as it is without"):
        model.evaluate(planned, verbose=0)
    model.fit(planned, verbose=0)
    _assert_trained_on(layer, EACH)


@executors
def test_everything_reads_through_while_batches_are_in_flight(executor):
    model, layer = _model()
    planned = SOURCE.repeat().apply(lookahead(model, executor=executor, debug=True)).prefetch(2)
    model.fit(planned, verbose=0, steps_per_epoch=7)
    host, other = _model(mode="host")
    for batch in EACH[:7]:
        host.train_on_batch(*batch)
    # The pipeline has planned and moved rows of batches that were not trained.
    assert layer.stats().batches > 7
    before = layer.stats()
    assert model.evaluate(SOURCE, verbose=0) == host.evaluate(SOURCE, verbose=0)
    np.testing.assert_array_equal(model.predict(IDS, verbose=0), host.predict(IDS, verbose=0))
    np.testing.assert_array_equal(model(IDS[:9]), host(IDS[:9]))
    np.testing.assert_array_equal(layer.get_table(), other.get_table())
    layer.flush()
    np.testing.assert_array_equal(layer.get_table(), other.get_table())
    after = layer.stats()
    assert (after.train_lookups, after.evictions) == (before.train_lookups, before.evictions)


@executors
def test_a_table_set_while_batches_are_in_flight(executor):
    model, layer = _model()
    host, other = _model(mode="host")
    values = np.random.default_rng(1).random((uncached.ROWS, uncached.DIM)).astype("float32")
    planned = SOURCE.apply(lookahead(model, executor=executor, debug=True)).prefetch(2)
    for number, (batch, plain) in enumerate(zip(planned, EACH, strict=True)):
        if number == 4:
            layer.set_table(values)
            other.set_table(values)
        model.train_on_batch(*batch)
        host.train_on_batch(*plain)
    np.testing.assert_array_equal(layer.get_table(), other.get_table())


def test_plain_and_planned_training_take_turns():
    model, layer = _model()
    planned = SOURCE.apply(lookahead(model, debug=True))
    with pytest.warns(UserWarning, match="trained on plain ids"):
        model.fit(SOURCE, verbose=0)
    model.fit(planned, verbose=0)
    model.fit(SOURCE.take(3), verbose=0)
    iterator = iter(planned)
    model.train_on_batch(*next(iterator))
    model.fit(SOURCE.take(2), verbose=0)
    with pytest.raises(tf.errors.OpError, match="trained on plain ids"):
        for _ in iterator:  # TensorFlow may have some left.
            pass
    model.fit(planned, verbose=0)
    _assert_trained_on(layer, EACH * 2 + EACH[:3] + EACH[:1] + EACH[:2] + EACH)


def test_training_on_plain_ids_warns_once():
    model, _ = _model()
    with pytest.warns(UserWarning, match="lookahead") as warnings:
        model.fit(SOURCE, verbose=0, epochs=2)
    assert sum("plain ids" in str(w.message) for w in warnings) == 1


def test_a_step_that_skips_the_layer_is_an_error():
    model, layer = _model()
    dense = model.trainable_variables[1:]
    iterator = iter(SOURCE.apply(lookahead(model)))
    for number in range(2):
        ids, targets = next(iterator)
        with tf.GradientTape() as tape:
            if number == 1:
                with pytest.raises(tf.errors.OpError, match=r"layer\.trainable = False"):
                    model(ids, training=True)
                return
            loss = tf.reduce_mean(tf.square(model(ids, training=True) - targets))
        model.optimizer.build(model.trainable_variables)
        model.optimizer.apply(tape.gradient(loss, dense), dense)
        np.testing.assert_array_equal(layer.get_table(), _model()[1].get_table())


@executors
def test_a_stall_names_stage_batch_and_reason(executor):
    model, layer = _model(130)
    planned = SOURCE.apply(lookahead(model, executor=executor, stall_seconds=0.3))
    message = r"Stage 'collect' has waited for \d+\.\d s with batch 2.*training of batch 1.*'table'"
    with pytest.raises(tf.errors.OpError, match=message):
        list(planned)
    model.fit(planned, verbose=0)
    _assert_trained_on(layer, EACH)


def test_a_machine_that_stood_still_is_no_stall(monkeypatch):
    stood_still = [0.0]
    clock = types.SimpleNamespace(
        monotonic=lambda: time.monotonic() + stood_still[0], perf_counter=time.perf_counter
    )
    monkeypatch.setattr(pipeline, "time", clock)
    monkeypatch.setattr(slot_group, "time", clock)
    model, layer = _model(130)
    with pytest.warns(UserWarning, match="plain ids"):
        model.train_on_batch(*EACH[0])
    planned = SOURCE.apply(lookahead(model, stall_seconds=30.0)).prefetch(2)
    for number, batch in enumerate(planned):
        model.train_on_batch(*batch)
        if number == 3:
            time.sleep(0.5)  # By now a stage waits for the next step.
            stood_still[0] += 3600.0
            time.sleep(0.5)
    _assert_trained_on(layer, [EACH[0], *EACH])


def test_evaluation_is_no_stall():
    model, layer = _model(130)
    with pytest.warns(UserWarning, match="plain ids"):
        model.train_on_batch(*EACH[0])  # The first step takes time to be traced.
    model.predict(IDS[:32], verbose=0)
    planned = SOURCE.apply(lookahead(model, stall_seconds=4.0)).prefetch(2)
    for number, batch in enumerate(planned):
        model.train_on_batch(*batch)
        until = time.monotonic() + (6.0 if number == 3 else 0)
        while time.monotonic() < until:
            model.predict(IDS[:32], verbose=0)
    _assert_trained_on(layer, [EACH[0], *EACH])


def test_a_batch_that_is_too_large_is_an_error():
    model, layer = _model(60)
    needed = max(np.unique(ids).size for ids, _ in EACH)
    with pytest.raises(tf.errors.OpError, match=r"`num_slots` is too small.*num_slots=60.*Pass"):
        model.fit(SOURCE.apply(lookahead(model)), verbose=0)
    model, layer = _model(needed)
    with pytest.warns(UserWarning, match="too few to hold the rows of 3 batches before and 2"):
        model.fit(SOURCE.apply(lookahead(model, debug=True)), verbose=0)
    _assert_trained_on(layer, EACH)
    assert layer.stats().shortened > 0


@pytest.mark.parametrize(("past", "future"), [(0, 0), (0, 2), (1, 2), (3, 0), (5, 4)])
def test_any_window_is_right(past, future):
    model, layer = _model(400)
    planned = lookahead(model, past=past, future=future, debug=True)
    model.fit(SOURCE.apply(planned), epochs=2, verbose=0)
    _assert_trained_on(layer, EACH * 2)


def test_a_frozen_layer_trains_the_rest():
    model, layer = _model()
    layer.trainable = False
    model.compile("sgd", "mse")
    before = layer.get_table(), model.layers[-1].kernel.numpy()
    layer.follow(model.optimizer)
    model.fit(SOURCE.apply(lookahead(model)), epochs=2, verbose=0)
    np.testing.assert_array_equal(layer.get_table(), before[0])
    assert not np.array_equal(model.layers[-1].kernel, before[1])
    layer.trainable = True
    model.compile(uncached.OPTIMIZERS["adagrad"](), "mse")
    model.layers[-1].set_weights(_model()[0].layers[-1].get_weights())
    model.fit(SOURCE.apply(lookahead(model)), verbose=0)
    _assert_trained_on(layer, EACH)


def test_a_frozen_layer_of_two_features_with_hardly_any_slots():
    ids = np.random.default_rng(2).integers(0, 90, (400, 2, 3)).astype("int32")
    inputs = [keras.Input((3,), dtype="int32", name=name) for name in "ab"]
    layer = ScratchPipeEmbedding(90, 4, num_slots=24, optimizer="sgd", trainable=False)
    rows = [keras.layers.Flatten()(layer(one)) for one in inputs]
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.concatenate(rows)))
    model.compile("sgd", "mse")
    table = layer.get_table()
    # What the rows are shows in the loss: nothing else depends on them.
    expected = table[ids].reshape(400, -1)
    plain = keras.Sequential([keras.Input((24,)), keras.layers.Dense(1)])
    plain.set_weights(model.layers[-1].get_weights())
    plain.compile("sgd", "mse")
    targets = np.ones((400, 1), "float32")
    source = tf.data.Dataset.from_tensor_slices(((ids[:, 0], ids[:, 1]), targets)).batch(4)
    history = model.fit(source.apply(lookahead(model)), epochs=2, verbose=0).history
    wanted = plain.fit(expected, targets, batch_size=4, shuffle=False, epochs=2, verbose=0).history
    np.testing.assert_allclose(history["loss"], wanted["loss"], rtol=1e-5)
    assert layer.stats().evictions > 1000
    assert layer.stats().shortened > 100


@pytest.mark.parametrize("planned", [True, False])
def test_gradients_applied_twice_for_one_lookup_are_an_error(planned):
    model, layer = _model(mode="pipelined" if planned else "synchronous")
    data = SOURCE.apply(lookahead(model)) if planned else SOURCE
    ids, targets = next(iter(data))
    with tf.GradientTape(persistent=True) as tape:
        loss = tf.reduce_mean(tf.square(model(ids, training=True) - targets))
    variables = model.trainable_variables
    model.optimizer.apply(tape.gradient(loss, variables), variables)
    before = layer.get_table()
    with pytest.raises(tf.errors.OpError, match="applied twice for one lookup"):
        model.optimizer.apply(tape.gradient(loss, variables), variables)
    np.testing.assert_array_equal(layer.get_table(), before)


def _full(*_):
    raise OSError("full")


def test_a_pass_that_ends_before_its_first_insert(monkeypatch):
    model, layer = _model(130)
    monkeypatch.setattr(SlotGroup, "insert", _full)
    with pytest.raises(tf.errors.OpError, match="full"):
        list(SOURCE.apply(lookahead(model, past=0, future=0)))
    monkeypatch.undo()
    model.fit(SOURCE.apply(lookahead(model, debug=True)), verbose=0)
    _assert_trained_on(layer, EACH)


def test_a_failed_admission_leaves_no_trace(monkeypatch):
    model, layer = _model(mode="synchronous")
    monkeypatch.setattr(SlotGroup, "exchange", _full)
    with pytest.raises(tf.errors.OpError, match="full"):
        model.fit(SOURCE, verbose=0)
    monkeypatch.undo()
    model.fit(SOURCE, verbose=0)
    _assert_trained_on(layer, EACH)


@executors
def test_debug_finds_a_row_that_was_lost(executor, monkeypatch):
    model, _ = _model(400)
    original = HostTable.scatter
    monkeypatch.setattr(HostTable, "scatter", lambda self, i, r: original(self, i[1:], r[1:]))
    planned = SOURCE.apply(lookahead(model, executor=executor, debug=True))
    with pytest.raises(tf.errors.OpError, match=r"HazardError.*reads stale rows"):
        model.fit(planned, epochs=4, verbose=0)

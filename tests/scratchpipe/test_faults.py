"""Faults in every stage: those before are trained, none after, and the next fit is exact.

A fault is raised in the place of a stage's work, or in the middle of it. The twins have no cache.
"""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.scratchpipe.faulty import (
    BATCHES,
    Trained,
    assert_no_threads,
    assert_trained_on,
    cases,
    fail,
    source,
)
from tf_scratchpipe import lookahead, storage
from tf_scratchpipe.host_table import HostTable
from tf_scratchpipe.lookup import IdCheck
from tf_scratchpipe.slot_group import SlotGroup

STAGES = {
    "load": (IdCheck, "__call__"),
    "look": (SlotGroup, "look"),
    "plan": (SlotGroup, "plan"),
    "collect": (SlotGroup, "collect"),
    "exchange": (SlotGroup, "exchange"),
    "insert": (SlotGroup, "insert"),
}
NEXT = {
    "load": "plan",
    "plan": "collect",
    "collect": "exchange",
    "exchange": "insert",
    "insert": "train",
}

EXECUTORS = ("inline", "thread")


def _fit_and_fail(trained, planned, match="No space left: injected"):
    """Returns how many batches were trained."""
    before = trained.batches_trained()
    with pytest.raises(tf.errors.OpError, match=match):
        trained.model.fit(planned, verbose=0)
    assert_no_threads()
    return trained.batches_trained() - before


SOME = {
    ("load", "thread"),
    ("look", "inline"),
    ("collect", "inline"),
    ("insert", "thread"),
}


@pytest.mark.parametrize(("stage", "executor"), cases(SOME, STAGES, EXECUTORS))
def test_a_fault_in_the_first_batch_and_in_the_last(stage, executor, monkeypatch):
    trained = Trained("plain")
    planned = source("plain").apply(lookahead(trained.model, executor=executor))
    fail(monkeypatch, *STAGES[stage], 1)
    assert _fit_and_fail(trained, planned) == 0
    assert_trained_on(trained, 0)
    monkeypatch.undo()
    trained.model.fit(planned, verbose=0)
    fail(monkeypatch, *STAGES[stage], BATCHES)
    done = _fit_and_fail(trained, planned)
    # A look ahead holds those before it back.
    assert done == BATCHES - 1 if stage != "look" else done >= BATCHES - 4
    assert_trained_on(trained, 0, BATCHES, done)
    monkeypatch.undo()
    trained.model.fit(planned, verbose=0)
    assert_trained_on(trained, 0, BATCHES, done, BATCHES)
    assert trained.tables[0].stats().train_hits == trained.tables[0].stats().train_lookups


MIDST = {
    ("tight", "collect", "thread"),
    ("tight", "plan", "inline"),
    ("accumulating", "insert", "thread"),
    ("scaled", "exchange", "thread"),
    ("two", "insert", "inline"),
}


@pytest.mark.parametrize(
    ("case", "stage", "executor"),
    cases(MIDST, ("tight", "accumulating", "scaled", "two"), STAGES, EXECUTORS),
)
@pytest.mark.filterwarnings("ignore:Slots of layers")
def test_a_fault_in_the_middle(case, stage, executor, monkeypatch):
    """Of a period, between skipped steps, in a short window, after another table's success."""
    trained = Trained(case)
    planned = source(case).apply(lookahead(trained.model, executor=executor))
    fail(monkeypatch, *STAGES[stage], 8 * len(trained.tables))
    done = _fit_and_fail(trained, planned)
    assert done == 7 if stage != "look" else 7 >= done >= 4
    assert trained.tables[0].stats().shortened or case != "tight"
    assert_trained_on(trained, done)
    monkeypatch.undo()
    trained.model.fit(planned, verbose=0, epochs=2)
    assert_trained_on(trained, done, BATCHES, BATCHES)


INSIDE = {
    "read": (HostTable, "gather"),
    "write": (HostTable, "scatter"),
    "store": (storage, "scattered"),
}
PARTLY = {
    ("tight", "store", "thread"),
    ("shared", "store", "inline"),
    ("shared", "read", "thread"),
    ("two", "write", "thread"),
}


@pytest.mark.parametrize(
    ("case", "inside", "executor"), cases(PARTLY, ("tight", "shared", "two"), INSIDE, EXECUTORS)
)
@pytest.mark.filterwarnings("ignore:Slots of layers")
def test_a_fault_in_the_middle_of_a_stage(case, inside, executor, monkeypatch):
    """All is moved but the optimizer slots of the last table."""
    trained = Trained(case)
    planned = source(case).apply(lookahead(trained.model, executor=executor))
    fail(monkeypatch, *INSIDE[inside], 2 * len(trained.tables) * (3 if inside == "write" else 8))
    done = _fit_and_fail(trained, planned)
    assert 0 < done < BATCHES
    assert_trained_on(trained, done)
    assert trained.tables[0].stats().evictions
    monkeypatch.undo()
    trained.model.fit(planned, verbose=0)
    assert_trained_on(trained, done, BATCHES)


IN_STEP = {("tight", "inline"), ("accumulating", "thread"), ("two", "thread")}


@pytest.mark.parametrize(
    ("case", "executor"), cases(IN_STEP, ("plain", "tight", "accumulating", "two"), EXECUTORS)
)
@pytest.mark.filterwarnings("ignore:Slots of layers")
def test_a_fault_in_a_step(case, executor):
    trained, bad = Trained(case), []

    def spoilt():
        for number, (features, targets) in enumerate(source(case)):
            yield features, targets * np.nan if number in bad else targets

    data = tf.data.Dataset.from_generator(spoilt, output_signature=source(case).element_spec)
    planned = data.apply(lookahead(trained.model, executor=executor)).prefetch(2)
    bad.append(6)
    with pytest.raises(tf.errors.OpError, match="bad targets"):
        trained.model.fit(planned, verbose=0)
    assert_trained_on(trained, 6)
    bad.clear()
    trained.model.fit(planned, verbose=0)
    assert_trained_on(trained, 6, BATCHES)
    assert_no_threads()


SLOW = {("collect", "thread"), ("train", "thread"), ("insert", "inline")}


@pytest.mark.parametrize(("stage", "executor"), cases(SLOW, [*NEXT, "train"], EXECUTORS))
def test_a_slow_stage_makes_others_wait(stage, executor, monkeypatch):
    seconds = 0.04
    trained = Trained("plain")
    planned = source("plain").apply(lookahead(trained.model, executor=executor))
    trained.model.fit(planned, verbose=0)  # Tracing takes long, too.
    callbacks = []
    if stage == "train":
        slow = lambda *_, **__: time.sleep(seconds)  # noqa: E731
        callbacks = [keras.callbacks.LambdaCallback(on_train_batch_end=slow)]
    else:
        owner, name = STAGES[stage]
        original = getattr(owner, name)

        def slow(*arguments):
            time.sleep(seconds)
            return original(*arguments)

        monkeypatch.setattr(owner, name, slow)
    before = trained.tables[0].stats()
    trained.model.fit(planned, verbose=0, callbacks=callbacks)
    spent = trained.tables[0].stats().since(before)
    assert_trained_on(trained, BATCHES, BATCHES)
    if stage != "train":
        assert spent.stage_seconds[stage] >= BATCHES * seconds
    if executor == "thread":
        waiting = ("insert", "train") if stage == "train" else (NEXT[stage], stage)
        # The first batches fill the pipeline, and other stages are not without work.
        assert spent.wait_seconds[waiting] > (BATCHES - 4) * seconds / 2
    else:
        assert sum(spent.wait_seconds.values()) < seconds

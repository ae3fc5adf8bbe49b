"""What moves for a batch: one gather and one scatter for each variable and side, and no more."""

import collections

import numpy as np
import pytest

from tests.scratchpipe import uncached
from tf_scratchpipe import count_ids, lookahead
from tf_scratchpipe.host_table import HostTable
from tf_scratchpipe.slot_group import StagingBuffers
from tf_scratchpipe.storage import Storage

IDS, TARGETS = uncached.data(30)
TRAIN = uncached.dataset(IDS, TARGETS)


@pytest.mark.parametrize(
    ("optimizer", "variables"), [("sgd", 1), ("adagrad", 2), ("adam", 3), ("rowwise", 2)]
)
def test_one_gather_and_one_scatter_for_each_variable(optimizer, variables, monkeypatch):
    model, layer = uncached.cached_model(optimizer, num_slots=500)
    # The first pass traces the step, whose own gathers and scatters would count.
    model.fit(TRAIN.apply(lookahead(model)), verbose=0)
    calls, rows = collections.Counter(), collections.Counter()

    def counted(owner, name, size):
        original = getattr(owner, name)

        def call(self, *arguments, **named):
            calls[owner.__name__, name] += 1
            rows[owner.__name__, name] += size(arguments)
            return original(self, *arguments, **named)

        monkeypatch.setattr(owner, name, call)

    counted(HostTable, "gather", lambda a: a[0].size)
    counted(HostTable, "scatter", lambda a: a[0].size)
    counted(Storage, "gather", lambda a: a[0].size)
    counted(Storage, "scatter", lambda a: a[0].size)
    before = layer.stats()
    model.fit(TRAIN.apply(lookahead(model)), verbose=0)
    after = layer.stats()
    fills, evictions = after.fills - before.fills, after.evictions - before.evictions
    assert fills == evictions > 500
    assert calls == {
        ("HostTable", "gather"): 30 * variables,
        ("HostTable", "scatter"): 30 * variables,
        # A storage gathers and scatters all its variables in one call.
        ("Storage", "gather"): 30,
        ("Storage", "scatter"): 30,
    }
    assert rows["HostTable", "gather"] == rows["HostTable", "scatter"] == fills * variables
    assert rows["Storage", "gather"] == rows["Storage", "scatter"] == fills
    row = sum(layer.engine.rows.widths) * 4
    assert row == (uncached.DIM + 1 if optimizer == "rowwise" else uncached.DIM * variables) * 4
    assert after.bytes_to_device - before.bytes_to_device == fills * row
    assert after.bytes_to_host - before.bytes_to_host == evictions * row


def test_staging_buffers_are_used_again():
    made = []
    model, layer = uncached.cached_model("adagrad", num_slots=500)
    buffers = layer.engine.group._buffers
    take = buffers.take
    buffers.take = lambda *arguments: made.append(take(*arguments)) or made[-1]
    model.fit(TRAIN.apply(lookahead(model)), verbose=0, epochs=2)
    assert len(made) == 60 * 2
    assert len({id(buffer) for buffer in made}) <= 12


def test_a_buffer_fits_and_is_one_that_was_given_back():
    buffers = StagingBuffers()
    one = buffers.take(20, 4, "float32")
    assert one.shape == (32, 4)
    assert buffers.take(20, 4, "float32") is not one
    buffers.give_back([one])
    assert buffers.take(33, 4, "float32") is not one
    assert buffers.take(32, 8, "float32") is not one
    assert buffers.take(32, 4, "float64") is not one
    assert buffers.take(9, 4, "float32") is one


def test_nothing_moves_when_all_rows_are_cached():
    model, layer = uncached.cached_model("sgd", num_slots=uncached.ROWS)
    planned = TRAIN.apply(lookahead(model))
    model.fit(planned, verbose=0)
    before = layer.stats()
    model.fit(planned, verbose=0)
    after = layer.stats()
    assert (after.fills, after.bytes_to_device) == (before.fills, before.bytes_to_device)
    assert after.evictions == 0
    assert after.hit_rate > 0.5


def test_stats_say_who_worked_and_who_waited():
    model, layer = uncached.cached_model("sgd", num_slots=130)
    model.fit(TRAIN.apply(lookahead(model)), verbose=0)
    stats = layer.stats()
    assert all(seconds > 0 for seconds in stats.stage_seconds.values())
    # With slots for hardly more than one batch, Collect waits for the step before.
    assert stats.wait_seconds["collect", "train"] > 0
    assert stats.batches == 30
    assert stats.lookups == stats.hits + stats.misses == IDS.size
    assert 0 < stats.held <= stats.slots == 130
    for word in ("hits (", "100.0% of", "filled", "evicted", "shortened", "collect for train"):
        assert word in str(stats)


def test_count_ids():
    order = count_ids(TRAIN)
    ids, counts = np.unique(IDS, return_counts=True)
    assert sorted(order) == ids.tolist()
    found = dict(zip(ids, counts, strict=True))
    assert [found[one] for one in order] == sorted(counts.tolist(), reverse=True)
    np.testing.assert_array_equal(count_ids(TRAIN, most=7), order[:7])
    named = TRAIN.map(lambda ids, targets: ({"deep": {"ids": ids}}, targets))
    np.testing.assert_array_equal(count_ids(named, ("deep", "ids")), order)

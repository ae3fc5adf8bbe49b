"""`tf.train.Checkpoint` saves and restores tables with their optimizer slots."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_scratchpipe import ScratchPipeEmbedding, lookahead

ROWS, DIM, LOOKUPS, BATCH = 150, 4, 3, 8
RNG = np.random.default_rng(0)
IDS = RNG.integers(0, ROWS, (12 * BATCH, LOOKUPS)).astype("int32")
TARGETS = RNG.random((12 * BATCH, 1)).astype("float32")


class Recommender(keras.Model):
    """Builds its table when it is first called."""

    def __init__(self, own=None, dim=DIM, mode="pipelined"):
        super().__init__()
        self.table = ScratchPipeEmbedding(
            ROWS,
            dim,
            num_slots=70,
            combiner="sum",
            optimizer=own,
            embeddings_initializer=keras.initializers.RandomUniform(seed=1),
            mode=mode,
            name="table",
        )
        self.head = keras.layers.Dense(1, kernel_initializer=keras.initializers.Ones())

    def call(self, ids, training=None):
        return self.head(self.table(ids, training=training))


def _model(optimizer="adam", **settings):
    model = Recommender(**settings)
    model.compile(keras.optimizers.get(optimizer), "mse")
    return model


def _train(model, first, last):
    data = tf.data.Dataset.from_tensor_slices((IDS, TARGETS)).batch(BATCH)
    data = data.skip(first).take(last - first)
    model.fit(data.apply(lookahead({(): model.table})), verbose=0)


def _train_on(model):
    """Build as a custom loop would, then train."""
    model.table.follow(model.optimizer)
    _train(model, 6, 12)


def _checkpoint(model):
    return tf.train.Checkpoint(model=model, optimizer=model.optimizer)


def _state(model):
    dense = enumerate([*model.head.get_weights(), *map(np.asarray, model.optimizer.variables)])
    return {**model.table.engine.state(), **dict(dense)}


def _assert_same(one, other):
    mine, theirs = _state(one), _state(other)
    assert set(mine) == set(theirs)
    for key, values in mine.items():
        np.testing.assert_array_equal(values, theirs[key], err_msg=str(key))


@pytest.fixture(scope="module", params=["own", pytest.param("followed", marks=pytest.mark.slow)])
def trained(request, tmp_path_factory):
    """A model after 6 batches, its checkpoint, and the same after 12."""
    settings = {"own": "adagrad"} if request.param == "own" else {}
    half, whole = _model(**settings), _model(mode="host", **settings)
    half.table.follow(half.optimizer)
    whole.table.follow(whole.optimizer)
    _train(half, 0, 6)
    path = _checkpoint(half).save(str(tmp_path_factory.mktemp("half") / "c"))
    _train(whole, 0, 6)
    _train(whole, 6, 12)
    return settings, half, path, whole


def test_a_restored_model_trains_on_as_if_it_had_not_stopped(trained):
    settings, half, path, whole = trained
    model = _model(**settings)
    model(IDS[:1])
    model.optimizer.build(model.trainable_variables)
    model.table.follow(model.optimizer)
    _checkpoint(model).restore(path).assert_consumed()
    _assert_same(model, half)
    _train_on(model)
    _assert_same(model, whole)


@pytest.mark.parametrize("built", ["by_a_call", "in_a_step"])
def test_a_table_may_be_built_after_it_was_restored(trained, built):
    settings, half, path, _ = trained
    model = _model(**settings)
    status = tf.train.Checkpoint(model=model).restore(path)
    if built == "by_a_call":
        model(IDS[:1])
    else:
        tf.function(model).get_concrete_function(tf.constant(IDS[:1]))
    status.expect_partial()  # What Keras restores of its own layers is not ours.
    model.table.follow(model.optimizer)
    for key, values in half.table.engine.state().items():
        np.testing.assert_array_equal(model.table.engine.state()[key], values, err_msg=key)


def test_a_restored_table_goes_over_cached_rows(trained):
    settings, half, path, _ = trained
    model = _model(**settings)
    model.table.follow(model.optimizer)
    _train(model, 3, 12)
    _checkpoint(model).restore(path).assert_consumed()
    _assert_same(model, half)


def test_saving_between_two_steps_saves_what_is_trained(tmp_path):
    model, expected = _model(), _model(mode="host")
    for each in (model, expected):
        each.table.follow(each.optimizer)
    data = tf.data.Dataset.from_tensor_slices((IDS, TARGETS)).batch(BATCH)
    for number, batch in enumerate(data.apply(lookahead({(): model.table}))):
        model.train_on_batch(*batch)
        if number == 4:
            path = _checkpoint(model).save(str(tmp_path / "c"))
            break
    _train(expected, 0, 5)
    restored = _model()
    restored(IDS[:1])
    restored.optimizer.build(restored.trainable_variables)
    restored.table.follow(restored.optimizer)
    _checkpoint(restored).restore(path).assert_consumed()
    _assert_same(restored, expected)


def test_a_table_of_another_shape_changes_nothing(trained):
    settings, _, path, _ = trained
    model = _model(dim=DIM + 1, **settings)
    before = model.table.get_table()
    with pytest.raises(ValueError, match=r"has shape \(150, 5\).*Received: the saved '"):
        tf.train.Checkpoint(model=model).restore(path)
    np.testing.assert_array_equal(model.table.get_table(), before)


def test_asynchronous_saving_is_refused(tmp_path):
    model = _model(mode="host")
    model(IDS[:1])
    options = tf.train.CheckpointOptions(experimental_enable_async_checkpoint=True)
    checkpoint = tf.train.Checkpoint(model=model)
    with pytest.raises(ValueError, match="cannot be saved while it is trained"):
        checkpoint.save(str(tmp_path / "c"), options=options)

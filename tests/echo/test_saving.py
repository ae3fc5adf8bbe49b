"""What an `EchoOptimizer` or its inner optimizer saved, the other loads without a warning."""

import functools

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.echo import small
from tf_echo import EchoOptimizer

pytestmark = pytest.mark.filterwarnings("error::UserWarning")

# Keras saves no seeds of dropout.
compiled = functools.partial(small.compiled, dropout=0.0)


def plain() -> keras.optimizers.Optimizer:
    return keras.optimizers.AdamW(1e-2, use_ema=True)


def echo() -> EchoOptimizer:
    return EchoOptimizer(plain())


DIRECTIONS = {
    "plain to echo": (plain, echo),
    "echo to plain": (echo, plain),
    "echo to echo": (echo, echo),
}
directions = pytest.mark.parametrize(("writer", "reader"), DIRECTIONS.values(), ids=DIRECTIONS)


@pytest.fixture(scope="module")
def uninterrupted() -> list[np.ndarray]:
    """The state after three epochs in one go with the plain optimizer."""
    model = compiled(plain)
    for _ in range(3):
        _epoch(model)
    return small.state(model)


def _epoch(model: keras.Model) -> None:
    """Trains on every batch, without `fit`, which puts the averaged weights in place at the end."""
    for x, y in small.dataset():
        model.train_on_batch(x, y)


def _started(optimizer, epochs: int = 2) -> keras.Model:
    model = compiled(optimizer)
    for _ in range(epochs):
        _epoch(model)
    return model


def _checkpoint(model: keras.Model) -> tf.train.Checkpoint:
    return tf.train.Checkpoint(model=model, optimizer=model.optimizer)


@directions
@pytest.mark.parametrize("built", [True, False], ids=["built", "deferred"])
def test_a_checkpoint_goes_on_as_if_never_interrupted(
    writer, reader, built, tmp_path, uninterrupted
):
    path = _checkpoint(_started(writer)).write(str(tmp_path / "checkpoint"))
    model = compiled(reader, seed=1, build=built)
    status = _checkpoint(model).read(path)
    _epoch(model)
    status.assert_consumed()
    small.assert_equal(small.state(model), uninterrupted)


@directions
def test_a_checkpoint_of_the_optimizer_alone_is_interchangeable(writer, reader, tmp_path):
    written = _started(writer, 1).optimizer
    path = tf.train.Checkpoint(optimizer=written).write(str(tmp_path / "checkpoint"))
    read = compiled(reader).optimizer
    tf.train.Checkpoint(optimizer=read).read(path).assert_consumed()
    small.assert_equal(read.variables, written.variables)


def test_checkpoints_hold_the_same_keys(tmp_path):
    def keys(optimizer):
        path = _checkpoint(_started(optimizer, 0)).write(str(tmp_path / "checkpoint"))
        return tf.train.list_variables(path)

    assert keys(echo) == keys(plain)


@directions
def test_a_checkpoint_manager_restores_the_latest(writer, reader, tmp_path):
    model = _started(writer, 1)
    manager = tf.train.CheckpointManager(_checkpoint(model), str(tmp_path), max_to_keep=1)
    manager.save()
    other = compiled(reader, seed=1)
    restored = tf.train.CheckpointManager(_checkpoint(other), str(tmp_path), max_to_keep=1)
    restored.restore_or_initialize()
    small.assert_equal(small.state(other), small.state(model))


@directions
def test_weights_files_are_interchangeable(writer, reader, tmp_path, uninterrupted):
    path = str(tmp_path / "model.weights.h5")
    _started(writer).save_weights(path)
    model = compiled(reader, seed=1)
    model.load_weights(path)
    _epoch(model)
    small.assert_equal(small.state(model), uninterrupted)


@directions
def test_weights_are_loaded_from_a_whole_model_of_the_other(
    writer, reader, tmp_path, uninterrupted
):
    path = str(tmp_path / "model.keras")
    _started(writer).save(path)
    model = compiled(reader, seed=1)
    model.load_weights(path)
    _epoch(model)
    small.assert_equal(small.state(model), uninterrupted)


def test_a_loaded_model_trains_on_with_its_echo_optimizer(tmp_path, uninterrupted):
    path = str(tmp_path / "model.keras")
    _started(echo).save(path)
    model = keras.models.load_model(path)
    assert isinstance(model.optimizer, EchoOptimizer)
    _epoch(model)
    assert model.optimizer.plan.recomputed
    small.assert_equal(small.state(model), uninterrupted)


@pytest.mark.parametrize("wrapped_first", [True, False], ids=["unwrapped", "wrapped"])
def test_a_loaded_models_optimizer_may_be(wrapped_first, tmp_path, uninterrupted):
    path = str(tmp_path / "model.keras")
    _started(echo if wrapped_first else plain).save(path)
    model = keras.models.load_model(path)
    optimizer = model.optimizer.inner_optimizer if wrapped_first else EchoOptimizer(model.optimizer)
    model.compile(optimizer=optimizer, loss="mse")
    _epoch(model)
    small.assert_equal(small.state(model), uninterrupted)


def test_a_loaded_model_keeps_policy_and_settings(tmp_path):
    path = str(tmp_path / "model.keras")
    compiled(EchoOptimizer("adam", policy="none", nominal_batch_size=7, name="mine")).save(path)
    config = keras.models.load_model(path).optimizer.get_config()
    assert (config["policy"], config["nominal_batch_size"], config["name"]) == ("none", 7, "mine")


def test_an_optimizer_that_is_not_built_is_loaded_as_any_other(tmp_path):
    path = str(tmp_path / "model.keras")
    compiled(echo, build=False).save(path)
    with pytest.warns(UserWarning, match="Skipping variable loading"):  # as Keras always says
        assert isinstance(keras.models.load_model(path).optimizer, EchoOptimizer)


def test_weights_files_have_the_same_layout(tmp_path):
    def layout(optimizer):
        path = str(tmp_path / "model.weights.h5")
        _started(optimizer, 0).save_weights(path)
        found = {}
        with h5py.File(path) as file:
            file.visititems(
                lambda name, item: found.update(
                    {name: (getattr(item, "shape", None), dict(item.attrs))}
                )
            )
        return found

    assert layout(echo) == layout(plain)


def test_backup_and_restore_resumes(tmp_path):
    class Interrupt(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                raise KeyboardInterrupt

    def train(optimizer, path):
        for callbacks in ([Interrupt()], []):
            model = compiled(optimizer)
            backup = keras.callbacks.BackupAndRestore(str(path))
            try:
                small.fit(model, 2, callbacks=[backup, *callbacks])
            except KeyboardInterrupt:
                assert callbacks
        return small.state(model)

    small.assert_equal(train(echo, tmp_path / "echo"), train(plain, tmp_path / "plain"))


def test_model_checkpoint_saves_a_model_that_loads(tmp_path):
    path = str(tmp_path / "best.keras")
    model = compiled(EchoOptimizer("adam"))
    small.fit(model, callbacks=[keras.callbacks.ModelCheckpoint(path)])
    small.assert_equal(small.state(keras.models.load_model(path)), small.state(model))


def test_a_saved_model_exports(tmp_path):
    model = _started(echo, 1)
    model.export(str(tmp_path / "exported"), verbose=False)
    served = tf.saved_model.load(str(tmp_path / "exported"))
    x, _ = small.one_batch()
    np.testing.assert_allclose(served.serve(x), model(x), rtol=1e-4, atol=1e-6)  # fused differently


def test_a_scaled_model_is_saved_and_loaded(tmp_path):
    path = str(tmp_path / "model.keras")
    model = compiled(EchoOptimizer("adam", loss_scale="dynamic"))
    small.fit(model)
    model.save(path)
    loaded = keras.models.load_model(path)
    assert isinstance(loaded.optimizer, EchoOptimizer)
    assert isinstance(loaded.optimizer, keras.optimizers.LossScaleOptimizer)
    small.assert_equal(small.state(loaded), small.state(model))


@pytest.mark.parametrize("wrapped_first", [True, False], ids=["echo to plain", "plain to echo"])
def test_scaled_checkpoints_and_weights_files_are_interchangeable(wrapped_first, tmp_path):
    makers = [
        lambda: EchoOptimizer("adam", loss_scale="dynamic"),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()),
    ]
    writer, reader = makers if wrapped_first else reversed(makers)
    model = _started(writer, 1)
    model.save_weights(str(tmp_path / "model.weights.h5"))
    _checkpoint(model).write(str(tmp_path / "checkpoint"))
    by_file, by_checkpoint = (compiled(reader, seed=1) for _ in range(2))
    by_file.load_weights(str(tmp_path / "model.weights.h5"))
    _checkpoint(by_checkpoint).read(str(tmp_path / "checkpoint")).assert_consumed()
    small.assert_equal(small.state(by_file), small.state(model))
    small.assert_equal(small.state(by_checkpoint), small.state(model))

"""What happens to a model over its life, from `compile` to `export`, happens equally with Echo.

Each life is led twice, with the plain optimizer and with the wrapped one, and all that it leaves
behind is compared bit by bit. Grappler is off: what it fuses, and so rounds, depends on what else
is in the graph.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_echo
from tests import reference
from tests.echo import models, small


@pytest.fixture(autouse=True)
def _without_grappler() -> Iterator[None]:
    with reference.grappler(enabled=False):
        yield


@dataclasses.dataclass(frozen=True)
class Life:
    """What is at hand: a way to make optimizers, and a folder."""

    wrap: Callable[[keras.optimizers.Optimizer], keras.optimizers.Optimizer]
    folder: pathlib.Path

    def optimizer(self, rate: float = 1e-2, **settings: Any) -> keras.optimizers.Optimizer:
        return self.wrap(keras.optimizers.Adam(rate, **settings))

    def model(self, rate: float = 1e-2, **compiling: Any) -> keras.Model:
        return small.compiled(self.optimizer(rate), **compiling)

    def path(self, name: str) -> str:
        return str(self.folder / name)


Left = tuple[list[keras.Model], list[Any]]
"""Models that were trained, and other values to compare."""


def _validated(model: keras.Model, epochs: int, *callbacks: keras.callbacks.Callback) -> list[Any]:
    """Trains and evaluates; what the history holds."""
    history = model.fit(
        *small.arrays(),
        batch_size=small.BATCH,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        validation_data=small.one_batch(),
        callbacks=list(callbacks),
    ).history
    return [history[name] for name in sorted(history)]


# Callbacks.


def best_weights_are_saved(life: Life) -> Left:
    model, other = life.model(), life.model()
    path = life.path("best.weights.h5")
    save = keras.callbacks.ModelCheckpoint(
        path, "val_loss", save_best_only=True, save_weights_only=True
    )
    history = _validated(model, 3, save)
    other.load_weights(path)
    return [model], [*history, *small.state(other)]


def a_model_is_saved_every_third_batch(life: Life) -> Left:
    model = life.model()
    save = keras.callbacks.ModelCheckpoint(life.path("{epoch}-{batch}.keras"), save_freq=3)
    small.fit(model, 2, callbacks=[save])
    files = sorted(file.name for file in life.folder.glob("*.keras"))
    assert len(files) == 2
    loaded = [keras.models.load_model(life.path(file)) for file in files]
    return [model], [files, *(value for one in loaded for value in small.state(one))]


def training_stops_early(life: Life) -> Left:
    model = life.model(rate=0.5)
    stop = keras.callbacks.EarlyStopping("val_loss", restore_best_weights=True)
    history = _validated(model, 8, stop)
    assert 1 < len(history[0]) < 8
    return [model], history


def the_learning_rate_falls_on_a_plateau(life: Life) -> Left:
    model = life.model(rate=0.5)
    reduce = keras.callbacks.ReduceLROnPlateau("val_loss", 0.1, patience=1)
    history = _validated(model, 4, reduce)
    assert float(model.optimizer.learning_rate) < 0.5
    return [model], history


def averaged_weights_are_evaluated_and_saved(life: Life) -> Left:
    model = small.compiled(life.optimizer(use_ema=True, ema_momentum=0.9))
    swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    save = keras.callbacks.ModelCheckpoint(life.path("{epoch}.keras"))
    history = _validated(model, 2, swap, save)
    saved = [keras.models.load_model(life.path(f"{epoch}.keras")) for epoch in (1, 2)]
    return [model], [*history, *(value for one in saved for value in one.get_weights())]


def tensor_board_is_told(life: Life) -> Left:
    """What it would write; TensorBoard need not be installed."""
    found = []

    def note(tag, data, step, **_):
        if "steps_per_second" not in tag:
            found.append((tag, int(step), keras.ops.convert_to_numpy(data)))

    model = life.model()
    board = keras.callbacks.TensorBoard(life.path("logs"), histogram_freq=1, update_freq=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(board.summary, "scalar", note)
        patch.setattr(board.summary, "histogram", note)
        small.fit(model, 2, callbacks=[board])
    tags = {tag for tag, *_ in found}
    assert {"epoch_loss", "batch_loss", "epoch_learning_rate"} <= tags
    assert any(tag.endswith("kernel/histogram") for tag in tags)
    return [model], found


class KilledError(Exception):
    pass


@dataclasses.dataclass
class _KillAt(keras.callbacks.Callback):
    """Raises in the middle of an epoch."""

    epoch: int
    batch: int

    def __post_init__(self):
        super().__init__()

    def on_epoch_begin(self, epoch, logs=None):
        self.current = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.current, batch) == (self.epoch, self.batch):
            raise KilledError


def _killed_and_resumed(life: Life, save_freq: Any) -> Left:
    first, second = life.model(), life.model()
    with pytest.raises(KilledError):
        small.fit(first, 3, callbacks=[_backup(life, save_freq), _KillAt(1, 2)])
    begun = []
    seen = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: begun.append(epoch))
    losses = small.fit(second, 3, callbacks=[_backup(life, save_freq), seen])
    assert begun[0] == 1
    return [first, second], [begun, losses]


def _backup(life: Life, save_freq: Any) -> keras.callbacks.Callback:
    return keras.callbacks.BackupAndRestore(life.path("backup"), save_freq=save_freq)


def a_new_model_resumes_at_the_last_epoch(life: Life) -> Left:
    return _killed_and_resumed(life, "epoch")


def a_new_model_resumes_at_the_last_batch(life: Life) -> Left:
    return _killed_and_resumed(life, 3)


def the_same_model_goes_on_after_an_exception(life: Life) -> Left:
    model = life.model()
    with pytest.raises(KilledError):
        small.fit(model, 2, callbacks=[_KillAt(0, 2)])
    return [model], small.fit(model)


# Compiled, fitted and changed again.


def fitted_again_with_other_batches(life: Life) -> Left:
    model = life.model()
    return [model], [small.fit(model, batch_size=size) for size in (128, 64, 96)]


def compiled_with_without_and_with_echo(life: Life) -> Left:
    model = life.model()
    losses = [small.fit(model)]
    for optimizer in (keras.optimizers.SGD(1e-2), life.optimizer()):
        model.compile(optimizer=optimizer, loss="mse")
        losses.append(small.fit(model))
    return [model], losses


def compiled_with_another_loss(life: Life) -> Left:
    model = life.model()
    losses = [small.fit(model)]
    model.compile(optimizer=model.optimizer, loss="mae", metrics=["mse"])
    return [model], [*losses, small.fit(model)]


def two_models_take_turns(life: Life) -> Left:
    one, other = life.model(), life.model(rate=1e-3, seed=1)
    return [one, other], [small.fit(model) for model in (one, other, one, other)]


def a_layer_is_frozen_and_thawed(life: Life) -> Left:
    model = life.model()
    losses = [small.fit(model)]
    for trainable in (False, True):
        model.layers[2].trainable = trainable
        model.compile(optimizer=life.optimizer(), loss="mse")
        before = model.layers[2].get_weights()[0]
        losses.append(small.fit(model))
        assert np.array_equal(before, model.layers[2].get_weights()[0]) is not trainable
    return [model], losses


class Smoothed(models.TrainStep):
    """Also keeps a metric of its own, and evaluates in its own way."""

    def train_step(self, data):
        x, y = data
        logs = super().train_step((x, 0.9 * y))
        self.seen.update_state(logs["loss"])
        return {**logs, "seen": self.seen.result()}

    def test_step(self, data):
        x, y = data
        return {"distance": keras.ops.mean(keras.ops.abs(self(x, training=False) - y))}

    @property
    def metrics(self):
        return [self.seen]


def a_train_step_of_its_own(life: Life) -> Left:
    network = small.mlp()
    model = Smoothed(network.inputs, network.outputs)
    model.seen = keras.metrics.Sum(name="seen")
    model.compile(optimizer=life.optimizer(), loss="mse")
    return [model], _validated(model, 2)


def exported_and_served(life: Life) -> Left:
    model = life.model()
    small.fit(model)
    model.export(life.path("exported"), verbose=False)
    served = tf.saved_model.load(life.path("exported"))
    x, _ = small.one_batch()
    return [model], [served.serve(x).numpy(), served.serve(x[:3]).numpy()]


LIVES = [
    a_new_model_resumes_at_the_last_batch,
    the_same_model_goes_on_after_an_exception,
    fitted_again_with_other_batches,
    a_train_step_of_its_own,
]
LONGER_LIVES = [
    best_weights_are_saved,
    tensor_board_is_told,
    a_model_is_saved_every_third_batch,
    training_stops_early,
    the_learning_rate_falls_on_a_plateau,
    averaged_weights_are_evaluated_and_saved,
    a_new_model_resumes_at_the_last_epoch,
    compiled_with_without_and_with_echo,
    compiled_with_another_loss,
    a_layer_is_frozen_and_thawed,
    exported_and_served,
]


def _compare(life: Callable[[Life], Left], folder: pathlib.Path) -> list[keras.Model]:
    """Leads a life with and without Echo; the models with it."""
    for name in ("echo", "plain"):
        (folder / name).mkdir()
    wrapped, values = life(Life(tf_echo.EchoOptimizer, folder / "echo"))
    plain, expected = life(Life(lambda inner: inner, folder / "plain"))
    assert all(plan.recomputed for model in wrapped for plan in model.optimizer.plans)
    small.assert_equal(_flat(values), _flat(expected))
    for model, other in zip(wrapped, plain, strict=True):
        small.assert_equal(small.state(model), small.state(other))
    return wrapped


def _flat(values: list[Any]) -> list[Any]:
    return keras.tree.flatten(values)


@pytest.mark.parametrize(
    "life",
    [*LIVES, *(pytest.param(life, marks=pytest.mark.slow) for life in LONGER_LIVES)],
    ids=lambda life: life.__name__,
)
def test_a_life_is_the_same(life, tmp_path):
    for model in _compare(life, tmp_path):
        assert model.optimizer.plans


def test_two_models_have_plans_of_their_own(tmp_path):
    found = _compare(two_models_take_turns, tmp_path)
    assert [len(model.optimizer.plans) for model in found] == [1, 1]


@pytest.mark.parametrize(
    ("batches", "last"), [(6, 128), (5, 40), pytest.param(8, 128, marks=pytest.mark.slow)]
)
def test_four_steps_in_one_execution(batches, last, tmp_path):
    def life(life: Life) -> Left:
        x, y = (np.concatenate([a, a])[: (batches - 1) * 128 + last] for a in small.arrays())
        model = life.model(steps_per_execution=4)
        losses = model.fit(x, y, batch_size=128, epochs=2, shuffle=False, verbose=0).history
        return [model], [losses["loss"]]

    (model,) = _compare(life, tmp_path)
    assert int(model.optimizer.iterations) == 2 * batches

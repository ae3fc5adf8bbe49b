"""A training that is interrupted and resumed is the training that was not, bit by bit."""

import json
import os
import pathlib
import random
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.scratchpipe import resumable_run
from tests.scratchpipe.resumable_run import BATCH, LOOKUPS, ROWS, state
from tf_scratchpipe import ResumeTraining, ScratchPipeEmbedding, lookahead
from tf_scratchpipe.model_state import ModelState

ROOT = pathlib.Path(__file__).parents[2]

# ---- killed processes -------------------------------------------------------------------------


class Runner:
    """A process that forks for each training, so that none of them waits for TensorFlow."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(pathlib.Path(resumable_run.__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )

    def run(self, directory, out, **job):
        """Exit status of one training; negative if it was killed."""
        job = {"directory": str(directory), "save_freq": 7, "out": str(out), **job}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


@pytest.fixture(scope="module")
def runner():
    runner = Runner()
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def uninterrupted(runner, tmp_path_factory):
    directory = tmp_path_factory.mktemp("uninterrupted")
    assert runner.run(directory / "checkpoints", directory / "out") == 0
    return directory / "out"


def _assert_same_outcome(one, other):
    assert json.loads(one.read_text()) == json.loads(other.read_text())
    mine, theirs = np.load(one.with_suffix(".npz")), np.load(other.with_suffix(".npz"))
    assert sorted(mine) == sorted(theirs)
    assert {"items.optimizer.velocity", "users.optimizer.accumulator"} <= set(mine)
    for key in mine:
        np.testing.assert_array_equal(mine[key], theirs[key], err_msg=key)


def _kill_until_done(runner, directory, jobs):
    """Run into each death in turn, then to the end. Returns how many were killed."""
    killed = 0
    for job in jobs:
        status = runner.run(directory / "checkpoints", directory / "out", **job)
        assert status in (0, -9)
        killed += status == -9
        if job.get("in_save") and status:
            assert list((directory / "checkpoints").glob(".writing-*"))
    assert runner.run(directory / "checkpoints", directory / "out") == 0
    return killed


def test_a_killed_training_goes_on_as_if_it_had_not_been(runner, uninterrupted, tmp_path):
    deaths = [{"batch": 24, "seconds": 0.002}, {"in_save": 2, "seconds": 0.05}]
    assert _kill_until_done(runner, tmp_path, deaths) == 2
    _assert_same_outcome(tmp_path / "out", uninterrupted)


@pytest.mark.slow
def test_twenty_kills_at_random_change_nothing(runner, uninterrupted, tmp_path):
    rng = random.Random(1)
    killed = 0
    for number in range(5):  # So that each training is killed at several places.
        directory = tmp_path / str(number)
        directory.mkdir()
        deaths = [
            {"batch": rng.randint(2, 25), "seconds": rng.random() * 0.03, "save_freq": 3}
            for _ in range(4)
        ]
        killed += _kill_until_done(runner, directory, deaths)
        _assert_same_outcome(directory / "out", uninterrupted)
    assert killed == 20


@pytest.mark.slow
def test_kills_during_a_save_lose_nothing(runner, uninterrupted, tmp_path):
    rng = random.Random(2)
    deaths = [{"in_save": rng.randint(1, 3), "seconds": rng.random() * 0.15} for _ in range(6)]
    assert _kill_until_done(runner, tmp_path, deaths) >= 5
    _assert_same_outcome(tmp_path / "out", uninterrupted)


# ---- within a process -------------------------------------------------------------------------


class Interrupt(keras.callbacks.Callback):
    """Ends training by an error after some batches."""

    def __init__(self, after):
        super().__init__()
        self.left = after

    def on_train_batch_begin(self, batch, logs=None):
        if not self.left:
            raise KeyboardInterrupt
        self.left -= 1


BATCHES = 6
RNG = np.random.default_rng(3)
IDS = RNG.integers(0, ROWS, (BATCHES * BATCH, LOOKUPS)).astype("int32")
TARGETS = RNG.random((BATCHES * BATCH, 1)).astype("float32")


def _model(mode="pipelined", dim=4, optimizer=None, **compiling):
    layer = ScratchPipeEmbedding(
        ROWS,
        dim,
        num_slots=150,
        combiner="sum",
        optimizer=optimizer,
        mode=mode,
        embeddings_initializer=keras.initializers.RandomUniform(seed=3),
        name="table",
    )
    inputs = keras.Input((LOOKUPS,), dtype="int32", name="ids")
    kernel = keras.initializers.GlorotUniform(seed=1)
    model = keras.Model(inputs, keras.layers.Dense(1, kernel_initializer=kernel)(layer(inputs)))
    model.compile(keras.optimizers.Adagrad(0.1), "mse", **compiling)
    return model


def _data():
    return tf.data.Dataset.from_tensor_slices((IDS, TARGETS)).batch(BATCH)


def _shuffled():
    whole = tf.data.Dataset.from_tensor_slices((IDS, TARGETS))
    return whole.shuffle(100, seed=5).batch(BATCH)


def _fit(model, directory, data, interrupt=None, settings=None, before=(), after=(), **fitting):
    resume = ResumeTraining(directory, **{"save_freq": 2, **(settings or {})})
    train = data.apply(lookahead(model, resume=resume, executor="inline"))
    stop = [] if interrupt is None else [Interrupt(interrupt)]
    fitting = {"epochs": 2, "verbose": 0, **fitting}
    try:
        return model.fit(train, callbacks=[*stop, *before, resume, *after], **fitting).history
    except KeyboardInterrupt:
        return None


def _assert_same(one, other):
    mine, theirs = state(one), state(other)
    assert sorted(mine) == sorted(theirs)
    for key, values in mine.items():
        np.testing.assert_array_equal(values, theirs[key], err_msg=key)


CASES = {
    "shuffled_anew": {"interrupt": 9, "data": _shuffled, "mode": "pipelined"},
    "in_the_first_epoch": {"interrupt": 3},
    "at_the_end_of_an_epoch": {"interrupt": 6, "settings": {"save_freq": 6}},
    "after_an_epoch": {"interrupt": 8, "settings": {"save_freq": "epoch"}},
    "before_the_first_save": {"interrupt": 1},
    "endless": {
        "interrupt": 9,
        "data": lambda: _shuffled().repeat(),
        "fitting": {"steps_per_epoch": 4, "epochs": 3},
    },
    "several_steps_at_a_time": {
        "interrupt": 2,
        "compiling": {"steps_per_execution": 2},
        "settings": {"save_freq": 4},
    },
    "unknown_length": {"interrupt": 9, "data": lambda: _shuffled().filter(lambda *_: True)},
    "unknown_length_at_its_end": {
        "interrupt": 6,
        "data": lambda: _shuffled().filter(lambda *_: True),
        "settings": {"save_freq": 6},
    },
    "validation": {"interrupt": 9, "fitting": {"validation_data": _data()}},
    "eagerly": {"interrupt": 9, "compiling": {"run_eagerly": True}},
}
DEFAULT = ["endless", "unknown_length_at_its_end"]


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in DEFAULT else pytest.mark.slow) for c in CASES]
)
def test_an_interrupted_training_is_resumed(tmp_path, case):
    case = {"data": _data, "compiling": {}, "mode": "host", "fitting": {}, **CASES[case]}
    straight = _model("host", **case["compiling"])
    broken, resumed = (_model(case["mode"], **case["compiling"]) for _ in range(2))
    settings = {"settings": case.get("settings"), **case["fitting"]}
    expected = _fit(straight, tmp_path / "straight", case["data"](), **settings)
    assert _fit(broken, tmp_path / "cut", case["data"](), case["interrupt"], **settings) is None
    assert _fit(resumed, tmp_path / "cut", case["data"](), **settings) == expected
    _assert_same(resumed, straight)


def test_the_same_model_goes_back_to_its_checkpoint(tmp_path):
    straight, model = _model("host"), _model()
    expected = _fit(straight, tmp_path / "straight", _data())
    _fit(model, tmp_path / "cut", _data(), interrupt=9)
    model.get_layer("table").set_table(np.full((ROWS, 4), 7.0))
    model.fit(_data(), verbose=0)  # Fills the cache with other rows, and moves them.
    assert _fit(model, tmp_path / "cut", _data()) == expected
    _assert_same(model, straight)


def test_a_source_gives_the_rest_of_an_epoch(tmp_path):
    asked = []

    def source(epoch, batches):
        asked.append((epoch, batches))
        whole = tf.data.Dataset.from_tensor_slices((IDS, TARGETS)).shuffle(100, seed=epoch)
        return whole.batch(BATCH).skip(batches)

    settings = {"source": source, "save_freq": 2}
    straight, broken, resumed = _model("host"), _model("host"), _model("host")
    _fit(straight, tmp_path / "straight", source(0, 0), settings=settings)
    _fit(broken, tmp_path / "cut", source(0, 0), 10, settings=settings)
    asked.clear()
    _fit(resumed, tmp_path / "cut", _data(), settings=settings)
    assert asked == [(1, 4)]
    _assert_same(resumed, straight)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["before", "after"])
def test_callbacks_that_change_the_learning_rate_change_it_once(tmp_path, order):
    class Halved(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.optimizer.learning_rate = self.model.optimizer.learning_rate / 2

    def callbacks():
        by_epoch = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.75)
        return {order: [by_epoch, Halved()]}

    straight, broken, resumed = _model("host"), _model("host"), _model("host")
    _fit(straight, tmp_path / "straight", _data(), **callbacks())
    _fit(broken, tmp_path / "cut", _data(), 9, **callbacks())
    _fit(resumed, tmp_path / "cut", _data(), **callbacks())
    _assert_same(resumed, straight)
    assert float(resumed.optimizer.learning_rate) == pytest.approx(0.1 * (0.75 / 2) ** 2)


class Unbuilt(keras.Model):
    """A model of two outputs that nobody has called yet."""

    def __init__(self):
        super().__init__()
        start = keras.initializers.RandomUniform(seed=3)
        self.table = ScratchPipeEmbedding(
            ROWS, 4, combiner="sum", embeddings_initializer=start, mode="host", name="table"
        )
        self.heads = [keras.layers.Dense(1, kernel_initializer="ones") for _ in range(2)]

    def call(self, ids):
        rows = self.table(ids)
        return {"a": self.heads[0](rows), "b": self.heads[1](rows)}


@pytest.mark.slow
def test_what_keras_builds_with_the_first_batch_is_restored(tmp_path):
    def model():
        made = Unbuilt()
        metrics = {"a": [keras.metrics.AUC(name="auc")], "b": ["mae"]}
        made.compile("adam", {"a": "mse", "b": "mae"}, metrics=metrics)
        return made

    labels = {"a": (TARGETS > 0.5).astype("float32"), "b": TARGETS}
    data = tf.data.Dataset.from_tensor_slices((IDS, labels, TARGETS[:, 0])).batch(BATCH)

    def fit(model, directory, *stop):
        resume = ResumeTraining(directory, save_freq=2)
        train = data.apply(lookahead({(): model.table}, resume=resume))
        return model.fit(train, epochs=2, verbose=0, callbacks=[*stop, resume]).history

    straight, broken, resumed = model(), model(), model()
    expected = fit(straight, tmp_path / "straight")
    with pytest.raises(KeyboardInterrupt):
        fit(broken, tmp_path / "cut", Interrupt(9))
    assert fit(resumed, tmp_path / "cut") == expected
    assert {"auc", "a_auc"} & set(expected)
    _assert_same(resumed, straight)


def test_a_finished_training_is_restored_and_not_repeated(tmp_path):
    straight, resumed = _model("host"), _model("host")
    history = _fit(straight, tmp_path, _data())
    assert _fit(resumed, tmp_path, _data()) == history
    _assert_same(resumed, straight)


@pytest.mark.slow
def test_more_epochs_continue_a_finished_training(tmp_path):
    straight, resumed = _model("host"), _model("host")
    expected = _fit(straight, tmp_path / "straight", _shuffled(), epochs=3)
    _fit(_model("host"), tmp_path / "cut", _shuffled(), epochs=2)
    assert _fit(resumed, tmp_path / "cut", _shuffled(), epochs=3) == expected
    _assert_same(resumed, straight)


@pytest.mark.slow
def test_a_training_that_was_stopped_early_stays_stopped(tmp_path):
    stopping = keras.callbacks.EarlyStopping("loss", mode="max", patience=1)  # It goes down.
    first = _fit(_model("host"), tmp_path, _data(), before=[stopping], epochs=5)
    assert len(first["loss"]) == 2
    assert _fit(_model("host"), tmp_path, _data(), epochs=5) == first


def test_the_checkpoint_may_go_at_the_end(tmp_path):
    _fit(_model("host"), tmp_path / "run", _data(), settings={"delete_checkpoint": True})
    assert not (tmp_path / "run").exists()


# ---- what Keras' own callbacks save -----------------------------------------------------------


def test_model_checkpoints_in_mid_epoch_are_the_trained_state(tmp_path):
    model, expected = _model(), _model("host")
    path = str(tmp_path / "{epoch}-{batch}.weights.h5")
    saving = keras.callbacks.ModelCheckpoint(path, save_weights_only=True, save_freq=4)
    model.fit(_data().apply(lookahead(model)).prefetch(2), callbacks=[saving], verbose=0)
    expected.fit(_data().take(4), verbose=0)
    loaded = _model()
    loaded.optimizer.build(loaded.trainable_variables)
    loaded.load_weights(tmp_path / "1-4.weights.h5")
    loaded.get_layer("table").follow(loaded.optimizer)
    mine, theirs = loaded.get_layer("table").engine, expected.get_layer("table").engine
    for key, values in theirs.state().items():
        np.testing.assert_array_equal(mine.state()[key], values, err_msg=key)
    for one, other in zip(loaded.optimizer.variables, expected.optimizer.variables, strict=True):
        np.testing.assert_array_equal(one, other)


def test_backup_and_restore_gives_the_trained_state_back(tmp_path):
    def fit(model, *others):
        backup = keras.callbacks.BackupAndRestore(str(tmp_path / "backup"), save_freq=4)
        train = _data().apply(lookahead(model))
        model.fit(train, callbacks=[backup, *others], verbose=0)

    class Look(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.seen = self.model.get_layer("table").engine.state(), self.model.get_weights()[1:]
            raise KeyboardInterrupt

    model, expected, look = _model(), _model("host"), Look()
    with pytest.raises(KeyboardInterrupt):
        fit(model, Interrupt(5))
    expected.fit(_data().take(4), verbose=0)
    with pytest.raises(KeyboardInterrupt):
        fit(model, look)  # With a cache full of rows that were trained further.
    table, dense = look.seen
    for key, values in expected.get_layer("table").engine.state().items():
        np.testing.assert_array_equal(table[key], values, err_msg=key)
    for one, other in zip(dense, expected.get_weights()[1:], strict=True):
        np.testing.assert_array_equal(one, other)


# ---- what cannot be ---------------------------------------------------------------------------


def test_a_shuffle_without_a_seed_is_refused(tmp_path):
    tf.random.set_seed(None)  # Others may have seeded everything.
    data = tf.data.Dataset.from_tensor_slices((IDS, TARGETS)).shuffle(100).batch(BATCH)
    with pytest.raises(ValueError, match=r"shuffled without a seed.*Pass `seed=`"):
        data.apply(lookahead(_model(), resume=ResumeTraining(tmp_path)))
    data.apply(lookahead(_model(), resume=ResumeTraining(tmp_path, source=lambda *_: data)))


def test_a_callback_without_data_is_refused(tmp_path):
    model = _model("host")
    with pytest.raises(ValueError, match=r"Pass it to `lookahead\(model, resume=...\)`"):
        model.fit(_data(), callbacks=[ResumeTraining(tmp_path)], verbose=0)


def test_a_fit_on_other_data_is_refused(tmp_path):
    model, resume = _model("host"), ResumeTraining(tmp_path)
    _data().apply(lookahead(model, resume=resume))
    with pytest.raises(ValueError, match="`fit` on other data"):
        model.fit(_data(), callbacks=[resume], verbose=0)


@pytest.mark.parametrize("save_freq", [0, -1, True, "batch", 1.5])
def test_a_wrong_save_freq_is_refused(save_freq):
    with pytest.raises(ValueError, match="`save_freq` must be 'epoch' or a positive number"):
        ResumeTraining("anywhere", save_freq=save_freq)


def test_lookahead_takes_nothing_but_the_callback():
    with pytest.raises(TypeError, match="`resume` must be a ResumeTraining"):
        lookahead(_model("host"), resume="checkpoints")


def test_fixed_steps_of_finite_data_are_refused(tmp_path):
    with pytest.raises(ValueError, match="steps_per_epoch=3, and a dataset of 6 batches"):
        _fit(_model("host"), tmp_path, _data(), steps_per_epoch=3)


def test_a_last_call_of_fewer_steps_is_refused(tmp_path):
    with pytest.raises(ValueError, match="6 batches, steps_per_execution=4"):
        _fit(_model("host", steps_per_execution=4), tmp_path, _data())


def test_another_number_of_steps_at_a_time_is_refused(tmp_path):
    _fit(_model("host", steps_per_execution=2), tmp_path, _data(), interrupt=2)
    with pytest.raises(ValueError, match=r"steps_per_execution`. Received: 1. Expected: 2"):
        _fit(_model("host"), tmp_path, _data())


def test_data_that_cannot_go_back_are_refused(tmp_path):
    model, data = _model("host"), _shuffled()
    resume = ResumeTraining(tmp_path, save_freq=2)
    train = data.apply(lookahead(model, resume=resume))
    with pytest.raises(KeyboardInterrupt):
        model.fit(train, callbacks=[Interrupt(3), resume], verbose=0)
    with pytest.raises(tf.errors.OpError, match="cannot go back to pass 0"):
        model.fit(train, callbacks=[resume], verbose=0)


def test_a_source_of_other_elements_is_refused(tmp_path):
    settings = {"source": lambda epoch, batches: _data().unbatch()}
    with pytest.raises(tf.errors.OpError, match="must return a dataset with the elements"):
        _fit(_model("host"), tmp_path, _data(), settings=settings)


def _cut(path):
    path.write_bytes(path.read_bytes()[:-5])


def _flip(path):
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(bytes(data))


DAMAGES = {
    "cut_rows": (_cut, "tables/0/table.npy", "bytes. Expected:"),
    "changed_rows": (_flip, "tables/0/table.npy", "checksum"),
    "changed_slots": (_flip, "tables/0/optimizer.accumulator.npy", "checksum"),
    "no_slots": (os.remove, "tables/0/optimizer.accumulator.npy", "no such file"),
    "no_header": (lambda path: path.write_bytes(b"x" * 200), "tables/0/table.npy", "no numpy file"),
    "no_list": (os.remove, "tables/0/state.json", "no such file"),
    "cut_list": (_cut, "tables/0/state.json", "no JSON"),
    "changed_weights": (_flip, "variables.bin", "checksum"),
    "no_weights": (os.remove, "variables.bin", "no such file"),
    "cut_position": (_cut, "training.json", "no JSON"),
}


@pytest.fixture(scope="module")
def victim():
    """A model with a state of its own, which no failed load may change."""
    model = _model("host")
    model.fit(_data(), verbose=0)
    return model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint")
    _fit(_model("host"), directory, _data(), interrupt=3)
    return directory


def _copy(checkpoint, directory):
    for path in checkpoint.rglob("*"):
        if path.is_file():
            target = directory / path.relative_to(checkpoint)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    return next(directory.glob("checkpoint-*"))


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_changes_nothing(tmp_path, victim, checkpoint, damage):
    do, name, message = DAMAGES[damage]
    do(_copy(checkpoint, tmp_path) / name)
    before = state(victim)
    with pytest.raises(ValueError, match=f"(?s)is damaged.*{name}.*{message}"):
        _fit(victim, tmp_path, _data())
    after = state(victim)
    for key, values in before.items():
        np.testing.assert_array_equal(after[key], values, err_msg=key)


OTHERS = {
    "width": (lambda: _model("host", dim=5), "Received: the saved 'table'|another model's"),
    "optimizer": (lambda: _recompiled("adam"), "another model's"),
    "layers": (lambda: _wider(), "another model's"),
}


def _recompiled(optimizer):
    model = _model("host")
    model.compile(optimizer, "mse")
    return model


def _wider():
    model = _model("host")
    wide = keras.Model(model.input, keras.layers.Dense(1)(model.output))
    wide.compile(keras.optimizers.Adagrad(0.1), "mse")
    return wide


@pytest.mark.parametrize("other", OTHERS)
def test_the_checkpoint_of_another_model_changes_nothing(checkpoint, tmp_path, other):
    make, message = OTHERS[other]
    model = make()
    _copy(checkpoint, tmp_path)
    table = model.get_layer("table").get_table()
    with pytest.raises(ValueError, match=message):
        _fit(model, tmp_path, _data())
    np.testing.assert_array_equal(model.get_layer("table").get_table(), table)


def test_slots_of_another_row_optimizer_change_nothing(tmp_path):
    def own(optimizer):
        model = _model("host", optimizer=optimizer)
        model.compile("sgd", "mse")
        return model

    _fit(own("adagrad"), tmp_path, _data(), interrupt=3)
    model = own("sgd")
    before = state(model)
    with pytest.raises(ValueError, match=r"(?s)row optimizer. Received: .*accumulator.*: \[\]"):
        _fit(model, tmp_path, _data())
    for key, values in state(model).items():
        np.testing.assert_array_equal(values, before[key], err_msg=key)


def test_a_save_that_fails_leaves_the_one_before(tmp_path, monkeypatch):
    straight, model, resumed = _model("host"), _model("host"), _model("host")
    expected = _fit(straight, tmp_path / "straight", _data())
    save, saves = ModelState.save, []

    def full(self, directory):
        result = save(self, directory)
        saves.append(directory)
        if len(saves) == 4:
            raise OSError(28, "No space left on device")
        return result

    monkeypatch.setattr(ModelState, "save", full)
    with pytest.raises(OSError, match="No space left"):
        _fit(model, tmp_path / "cut", _data())
    assert [path.name for path in (tmp_path / "cut").iterdir()] == ["checkpoint-3"]
    monkeypatch.setattr(ModelState, "save", save)
    assert _fit(resumed, tmp_path / "cut", _data()) == expected
    _assert_same(resumed, straight)

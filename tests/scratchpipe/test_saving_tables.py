"""Saving and restoring: the table as it is trained with its optimizer slots, in every format of
Keras, in the middle of training, and the layer's arguments.
"""

import copy
import json
import shutil
import zipfile

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_scratchpipe import ScratchPipeEmbedding, layer_saving, lookahead

ROWS, DIM, BATCH, LOOKUPS, SLOTS = 200, 4, 8, 3, 60
OPTIMIZERS = {"adagrad": keras.optimizers.Adagrad, "adam": keras.optimizers.Adam}
MODES = ["pipelined", "host"]


def _model(mode="pipelined", optimizer="adagrad", own=False, rows=ROWS, layer=None, **settings):
    """Rows trained by the compiled optimizer, or by their own while the others have SGD."""
    layer = layer or ScratchPipeEmbedding(
        rows,
        DIM,
        num_slots=None if mode == "static" else SLOTS,
        combiner="sum",
        optimizer=OPTIMIZERS[optimizer](0.05) if own else None,
        embeddings_initializer=keras.initializers.RandomUniform(seed=3),
        mode=mode,
        name="table",
        **settings,
    )
    inputs = keras.Input((LOOKUPS,), dtype="int32", name="ids")
    kernel = keras.initializers.GlorotUniform(seed=1)
    model = keras.Model(inputs, keras.layers.Dense(1, kernel_initializer=kernel)(layer(inputs)))
    model.compile(keras.optimizers.SGD(0.05) if own else OPTIMIZERS[optimizer](0.05), "mse")
    return model


def _table(model):
    return model.get_layer("table")


def _data(batches, seed=0):
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, ROWS, (batches * BATCH, LOOKUPS)).astype("int32")
    ids[:, 0] = ids[:, 1]
    return ids, rng.random((batches * BATCH, 1)).astype("float32")


FIRST, SECOND = _data(8), _data(8, seed=1)


def _train(model, data, **fitting):
    train = tf.data.Dataset.from_tensor_slices(data).batch(BATCH).apply(lookahead(model))
    return model.fit(train, verbose=0, **fitting).history


def _state(model):
    """All that training changes, of the table and of the other layers."""
    return {**_table(model).engine.state(), **dict(enumerate(model.get_weights()[1:]))}


def _assert_same(one, other):
    mine, theirs = _state(one), _state(other)
    assert set(mine) == set(theirs)
    for key, values in mine.items():
        np.testing.assert_array_equal(values, theirs[key], err_msg=str(key))


@pytest.fixture(scope="module")
def straight():
    """Models that were trained on both parts of the data without a break."""
    trained = {}

    def model(optimizer, own):
        if (optimizer, own) not in trained:
            trained[optimizer, own] = _model("host", optimizer, own)
            _train(trained[optimizer, own], FIRST)
            _train(trained[optimizer, own], SECOND)
        return trained[optimizer, own]

    return model


# ---- formats ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("own", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_loaded_model_trains_on_as_if_it_had_not_stopped(
    tmp_path, straight, optimizer, own, mode
):
    model = _model(mode, optimizer, own)
    _train(model, FIRST)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert _table(loaded).mode == mode
    np.testing.assert_array_equal(_table(loaded).get_table(), _table(model).get_table())
    assert np.any(_table(loaded).get_table() != _table(straight(optimizer, own)).get_table())
    _train(loaded, SECOND)
    _assert_same(loaded, straight(optimizer, own))


@pytest.mark.parametrize(("saved", "into"), [("pipelined", "host"), ("host", "pipelined")])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_saved_weights_hold_the_slots_of_rows_in_any_mode(
    tmp_path, straight, optimizer, saved, into
):
    model = _model(saved, optimizer, own=True)
    _train(model, FIRST)
    model.save_weights(tmp_path / "model.weights.h5")
    loaded = _model(into, optimizer, own=True)
    loaded.load_weights(tmp_path / "model.weights.h5")
    _train(loaded, SECOND)
    _assert_same(loaded, straight(optimizer, True))


def test_weights_are_loaded_over_cached_rows(tmp_path, straight):
    model = _model(own=True)
    _train(model, FIRST)
    model.save_weights(tmp_path / "model.weights.h5")
    _train(model, _data(6, seed=2))
    model.load_weights(tmp_path / "model.weights.h5")
    _train(model, SECOND)
    _assert_same(model, straight("adagrad", True))


def test_slots_survive_a_second_save_without_training_in_between(tmp_path, straight):
    model = _model(optimizer="adam")
    _train(model, FIRST)
    for name in ("one.keras", "two.keras"):
        model.save(tmp_path / name)
        model = keras.models.load_model(tmp_path / name)
    _train(model, SECOND)
    _assert_same(model, straight("adam", False))


@pytest.mark.parametrize("name", ["model.keras", "model.weights.h5"])
@pytest.mark.parametrize("executor", ["thread", pytest.param("inline", marks=pytest.mark.slow)])
def test_saving_while_batches_are_in_flight(tmp_path, executor, name):
    model, expected = _model(), _model("host")
    train = tf.data.Dataset.from_tensor_slices(FIRST).batch(BATCH)
    planned = train.apply(lookahead(model, executor=executor))
    for number, (batch, plain) in enumerate(zip(planned, train, strict=True)):
        model.train_on_batch(*batch)
        expected.train_on_batch(*plain)
        if number == 6:
            saved = _table(expected).get_table()
            if name.endswith(".keras"):
                model.save(tmp_path / name)
            else:
                model.save_weights(tmp_path / name)
    _assert_same(model, expected)  # Saving did not disturb the training.
    assert _table(model).stats().evictions > 0
    if name.endswith(".keras"):
        loaded = keras.models.load_model(tmp_path / name)
    else:
        loaded = _model()
        loaded.load_weights(tmp_path / name)
    np.testing.assert_array_equal(_table(loaded).get_table(), saved)


@pytest.mark.parametrize("mode", MODES)
def test_a_model_that_was_never_called_is_saved(tmp_path, mode):
    model = _model(mode)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(_table(loaded).get_table(), _table(model).get_table())


def test_model_checkpoints_are_taken_at_each_epoch(tmp_path):
    model = _model()
    path = str(tmp_path / "{epoch}.weights.h5")
    saving = keras.callbacks.ModelCheckpoint(path, save_weights_only=True)
    _train(model, FIRST, epochs=2, callbacks=[saving])
    for epoch in (1, 2):
        expected, loaded = _model("host"), _model()
        _train(expected, FIRST, epochs=epoch)
        loaded.load_weights(tmp_path / f"{epoch}.weights.h5")
        np.testing.assert_array_equal(_table(loaded).get_table(), _table(expected).get_table())


# ---- tables beside the variables -------------------------------------------------------------


@pytest.fixture
def beside(monkeypatch):
    """Tables of any size are files of their own in a `.keras` archive."""
    monkeypatch.setattr(layer_saving, "SIDECAR_BYTES", 0)


def _members(path):
    with zipfile.ZipFile(path) as archive:
        return {name.rpartition("/")[2]: archive.read(name) for name in archive.namelist()}


@pytest.mark.parametrize(
    ("own", "mode"),
    [
        (True, "pipelined"),
        (False, "static"),
        pytest.param(False, "pipelined", marks=pytest.mark.slow),
        pytest.param(True, "host", marks=pytest.mark.slow),
    ],
)
def test_a_table_beside_the_variables_is_loaded(tmp_path, beside, own, mode):
    hot = {"hot_ids": np.arange(40, 80)} if mode == "static" else {}
    model = _model(mode, "adam", own, **hot)
    _train(model, FIRST)
    model.save(tmp_path / "model.keras")
    assert "optimizer.velocity.npy" in _members(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for each in (loaded, model):
        _train(each, SECOND)
    _assert_same(loaded, model)


def test_numpy_opens_a_table_beside_the_variables(tmp_path, beside):
    model = _model("host")
    model.save(tmp_path / "model.keras")
    with zipfile.ZipFile(tmp_path / "model.keras") as archive:
        table = np.load(archive.open("assets/layers/scratch_pipe_embedding/table.npy"))
    np.testing.assert_array_equal(table, _table(model).get_table())


def test_small_tables_are_among_the_variables(tmp_path):
    _model("host").save(tmp_path / "model.keras")
    assert "table.npy" not in _members(tmp_path / "model.keras")


def test_weights_are_loaded_from_an_archive_with_the_table_beside(archive):
    model, other = keras.models.load_model(archive[0]), _model(own=True)
    _train(other, SECOND)  # A cache full of other rows.
    other.load_weights(archive[0])
    _assert_same(other, model)


def test_weights_alone_have_the_table_among_them(tmp_path, beside, archive):
    model, loaded = archive[1], _model("host", own=True)
    model.save_weights(tmp_path / "model.weights.h5")
    loaded.load_weights(tmp_path / "model.weights.h5")
    _assert_same(loaded, model)


def test_an_unzipped_model_has_the_table_among_its_variables(tmp_path, beside, archive):
    # Keras loses the assets of those.
    model = archive[1]
    model.save(tmp_path / "model", zipped=False)
    loaded = keras.models.load_model(tmp_path / "model")
    _assert_same(loaded, model)


def test_a_copied_model_has_the_table(beside, archive):
    _assert_same(copy.deepcopy(archive[1]), archive[1])


def test_rows_that_were_never_needed_take_no_memory_by_saving(tmp_path, beside):
    layer = ScratchPipeEmbedding(ROWS, DIM, initialize_by_row=True, mode="host", name="table")
    model = _model(layer=layer)
    model.save(tmp_path / "model.keras")
    assert layer.engine.rows.host[0]._values is None
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(_table(loaded).get_table(), layer.get_table())


def _rewritten(path, change):
    """The archive with some members changed or left out."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            if (new := change(name.rpartition("/")[2], data)) is not None:
                archive.writestr(name, new)


WRONG = {
    "cut": (lambda n, d: d[:-4] if n == "table.npy" else d, "bytes. Expected"),
    "changed": (lambda n, d: d[:-1] + b"x" if n == "table.npy" else d, "checksum"),
    "no_slots": (lambda n, d: d if "accumulator" not in n else None, "accumulator.*no such file"),
    "no_table": (lambda n, d: d if n != "table.npy" else None, "table.npy.*no such file"),
    "no_list": (lambda n, d: d if n != "state.json" else None, "state.json.*no such file"),
    "no_files": (
        lambda n, d: None if n.endswith(".npy") or n == "state.json" else d,
        "is not among the saved variables|is damaged",
    ),
    "no_json": (lambda n, d: d[:-9] if n == "state.json" else d, "no JSON of ours"),
    "later": (
        lambda n, d: d.replace(b'"format": 1', b'"format": 2') if n == "state.json" else d,
        "written by another version",
    ),
    "dtype": (
        lambda n, d: d.replace(b'"float32"', b'"float64"') if n == "state.json" else d,
        "Received: the saved '.*', float64",
    ),
}


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """A trained model with its table beside its variables, and another model."""
    saved, other = _model("host", own=True), _model("host", own=True)
    _train(saved, FIRST)
    _train(other, SECOND)
    path = tmp_path_factory.mktemp("archive") / "model.keras"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_saving, "SIDECAR_BYTES", 0)
        saved.save(path)
    return path, other


@pytest.mark.parametrize("wrong", WRONG)
def test_a_damaged_table_beside_the_variables_changes_nothing(tmp_path, archive, wrong):
    change, message = WRONG[wrong]
    path, model = tmp_path / "model.keras", archive[1]
    shutil.copy(archive[0], path)
    _rewritten(path, change)
    before = _table(model).engine.state()
    for load in (keras.models.load_model, model.load_weights):
        with pytest.raises(ValueError, match=f"(?s){message}"):
            load(path)
    after = _table(model).engine.state()
    for key, values in before.items():
        np.testing.assert_array_equal(after[key], values, err_msg=key)


def test_a_table_beside_the_variables_of_another_shape_changes_nothing(archive):
    model = _model("host", own=True, rows=ROWS + 1)
    before = _table(model).get_table()
    with pytest.raises(ValueError, match=r"\(201, 4\).*Received: the saved.*\(200, 4\)"):
        model.load_weights(archive[0])
    np.testing.assert_array_equal(_table(model).get_table(), before)


# ---- weights of keras.layers.Embedding --------------------------------------------------------


def _keras_embedding():
    inputs = keras.Input((LOOKUPS,), dtype="int32", name="ids")
    start = keras.initializers.RandomUniform(seed=9)
    return keras.Model(inputs, keras.layers.Embedding(ROWS, DIM, start, name="table")(inputs))


def _unpooled(mode):
    inputs = keras.Input((LOOKUPS,), dtype="int32", name="ids")
    return keras.Model(inputs, ScratchPipeEmbedding(ROWS, DIM, mode=mode, name="table")(inputs))


@pytest.mark.parametrize("mode", MODES)
def test_a_keras_embedding_gives_its_weights(mode):
    plain, model = _keras_embedding(), _unpooled(mode)
    model.predict(FIRST[0], verbose=0)
    model.set_weights(plain.get_weights())
    np.testing.assert_array_equal(
        model.predict(FIRST[0], verbose=0), plain.predict(FIRST[0], verbose=0)
    )
    plain.set_weights([weight + 1 for weight in model.get_weights()])
    np.testing.assert_array_equal(
        plain.layers[-1].embeddings, model.layers[-1].get_table() + np.float32(1)
    )


@pytest.mark.parametrize("mode", MODES)
def test_the_variables_of_a_keras_embedding_are_the_table(mode):
    store = {}
    plain = keras.layers.Embedding(ROWS, DIM)
    plain.build()
    plain.save_own_variables(store)
    layer = ScratchPipeEmbedding(ROWS, DIM, mode=mode)
    layer.load_own_variables({key: np.asarray(values) for key, values in store.items()})
    np.testing.assert_array_equal(layer.get_table(), plain.embeddings)


# ---- what does not fit ------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_weights_of_another_shape_change_nothing(tmp_path, mode):
    other = _model(mode, own=True, rows=ROWS + 1)
    _train(other, FIRST)
    other.save_weights(tmp_path / "other.weights.h5")
    model = _model(mode, own=True)
    _train(model, FIRST)
    before = _table(model).engine.state()
    with pytest.raises(
        ValueError, match=r"has shape \(200, 4\). Received: the saved table of shape"
    ):
        model.load_weights(tmp_path / "other.weights.h5")
    after = _table(model).engine.state()
    for key, values in before.items():
        np.testing.assert_array_equal(after[key], values)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wrong", ["table", "optimizer.accumulator", None])
def test_a_state_that_fits_in_parts_changes_nothing(wrong, mode):
    model = _model(mode, own=True)
    _train(model, FIRST)
    before = _table(model).engine.state()
    state = {key: np.asarray(values) + 1 for key, values in before.items()}
    if wrong:
        state[wrong] = state[wrong][:-1]
    else:
        del state["table"]
    with pytest.raises(ValueError, match=r"Received: the saved|There is no table saved"):
        _table(model).load_own_variables(state)
    after = _table(model).engine.state()
    for key, values in before.items():
        np.testing.assert_array_equal(after[key], values, err_msg=key)


def test_slots_of_another_optimizer_are_left_alone():
    saved, model = _model(optimizer="adam", own=True), _model(optimizer="adagrad", own=True)
    fresh = _model("host", optimizer="adagrad", own=True)
    _train(saved, FIRST)
    with pytest.warns(UserWarning, match="slots of layer 'table' were not loaded.*velocity"):
        _table(model).load_own_variables(_table(saved).engine.state())
    fresh.set_weights([_table(saved).get_table(), *fresh.get_weights()[1:]])
    for each in (model, fresh):
        _train(each, SECOND)
    np.testing.assert_array_equal(_table(model).get_table(), _table(fresh).get_table())


def test_slots_that_are_missing_are_reported():
    model = _model("host", optimizer="adam", own=True)
    state = _table(model).engine.state()
    del state["optimizer.velocity"]
    with pytest.warns(
        UserWarning, match=r"Received: slots \['momentum'\]. Expected: \['momentum',"
    ):
        _table(model).load_own_variables(state)


# ---- arguments --------------------------------------------------------------------------------

ARGUMENTS = {
    "defaults": {},
    "pooled": {"combiner": "sqrtn", "num_slots": 50, "replacement": "lfu", "oov_id": 7},
    "masked": {"mask_zero": True, "trainable": False, "dtype": "mixed_bfloat16"},
    "optimizer": {"optimizer": keras.optimizers.Adam(0.02, beta_1=0.8, amsgrad=True)},
    "named_optimizer": {"optimizer": "adagrad"},
    "schedule": {
        "optimizer": keras.optimizers.SGD(
            keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.5), momentum=0.9
        )
    },
    "initializer": {
        "embeddings_initializer": keras.initializers.TruncatedNormal(0.1, 0.2, seed=5),
        "initialize_by_row": True,
    },
    "static": {"mode": "static", "hot_ids": np.array([5, 3, 100]), "num_slots": 2},
    "synchronous": {"mode": "synchronous", "storage_device": "/device:CPU:0"},
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_the_config_makes_the_same_layer(case):
    layer = ScratchPipeEmbedding(ROWS, DIM, name="table", **ARGUMENTS[case])
    config = layer.get_config()
    assert json.loads(json.dumps(config)) == config
    again = ScratchPipeEmbedding.from_config(copy.deepcopy(config))  # Keras writes into it.
    assert again.get_config() == config
    # Through Keras' registry, as in a saved model.
    stored = json.loads(json.dumps(keras.saving.serialize_keras_object(layer)))
    loaded = keras.saving.deserialize_keras_object(stored)
    assert type(loaded) is ScratchPipeEmbedding
    assert loaded.get_config() == config


def test_the_config_knows_each_argument():
    settings = {**ARGUMENTS["pooled"], **ARGUMENTS["optimizer"], **ARGUMENTS["initializer"]}
    again = ScratchPipeEmbedding.from_config(
        ScratchPipeEmbedding(ROWS, DIM, **settings, trainable=False).get_config()
    )
    assert (again.input_dim, again.output_dim, again.num_slots) == (ROWS, DIM, 50)
    assert (again.combiner, again.replacement, again.oov_id) == ("sqrtn", "lfu", 7)
    assert (again.initialize_by_row, again.trainable) == (True, False)
    assert again.embeddings_initializer.seed == 5
    optimizer = again.get_config()["optimizer"]
    assert optimizer["class_name"] == "Adam"
    assert (optimizer["config"]["amsgrad"], optimizer["config"]["beta_1"]) == (True, 0.8)
    assert optimizer["config"]["learning_rate"] == pytest.approx(0.02)


def test_hot_ids_are_cut_at_num_slots_and_kept():
    layer = ScratchPipeEmbedding(ROWS, DIM, **ARGUMENTS["static"])
    again = ScratchPipeEmbedding.from_config(layer.get_config())
    np.testing.assert_array_equal(again.hot_ids, [5, 3])


@pytest.mark.parametrize("mode", MODES)
def test_a_cloned_model_starts_anew(mode):
    model = _model(mode, own=True)
    start = _table(model).get_table()
    _train(model, FIRST)
    clone = keras.models.clone_model(model)
    clone.compile(keras.optimizers.SGD(0.05), "mse")
    assert _table(clone) is not _table(model)
    np.testing.assert_array_equal(_table(clone).get_table(), start)
    trained = _table(model).get_table()
    _train(clone, FIRST)
    _assert_same(clone, model)
    np.testing.assert_array_equal(_table(model).get_table(), trained)


# ---- within a process -------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_early_stopping_restores_the_best_table(mode):
    model, best = _model(mode), _model("host")
    _train(best, FIRST, epochs=1)
    # The loss goes down, so the worst epoch is the first.
    stopping = keras.callbacks.EarlyStopping(
        "loss", mode="max", patience=2, restore_best_weights=True
    )
    history = _train(model, FIRST, epochs=10, callbacks=[stopping])
    assert len(history["loss"]) == 3
    for mine, theirs in zip(model.get_weights(), best.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("mode", MODES)
def test_a_recompiled_model_has_fresh_slots(mode):
    model, fresh = _model(mode, "adam"), _model("host", "adam")
    _train(model, FIRST)
    fresh.set_weights(model.get_weights())
    model.compile(OPTIMIZERS["adam"](0.05), "mse")
    for each in (model, fresh):
        _train(each, SECOND)
    _assert_same(model, fresh)


def test_a_recompiled_model_may_have_another_optimizer():
    model, fresh = _model("pipelined", "adam"), _model("host", "adagrad")
    _train(model, FIRST)
    fresh.set_weights(model.get_weights())
    model.compile(OPTIMIZERS["adagrad"](0.05), "mse")
    for each in (model, fresh):
        _train(each, SECOND)
    _assert_same(model, fresh)


@pytest.mark.parametrize("mode", MODES)
def test_the_layers_own_optimizer_goes_on_when_the_model_is_recompiled(mode, straight):
    model = _model(mode, "adam", own=True)
    _train(model, FIRST)
    model.compile(keras.optimizers.SGD(0.05), "mse")
    _train(model, SECOND)
    _assert_same(model, straight("adam", True))

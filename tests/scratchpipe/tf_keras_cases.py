"""The layer for tf_keras, with TF_USE_LEGACY_KERAS=1. `test_tfrs.py` runs this in a process."""

import importlib
import inspect
import pathlib

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_recommenders as tfrs

import tf_scratchpipe
from tests import made_up_movies
from tests.scratchpipe import uncached
from tf_scratchpipe.for_tf_keras import ScratchPipeEmbedding, lookahead
from tf_scratchpipe.row_optimizers import row_optimizer
from tf_scratchpipe.tf_keras_optimizers import twin

K = tf.keras
EXAMPLES = pathlib.Path(__file__).parent.parent.parent / "examples"
ROWS, DIM, LOOKUPS, BATCH = uncached.ROWS, uncached.DIM, uncached.LOOKUPS, uncached.BATCH
EPOCHS, SLOTS = 2, 300
IDS, TARGETS = uncached.data(40)
FEW = IDS[: 6 * BATCH], TARGETS[: 6 * BATCH]

OPTIMIZERS = {
    "sgd": lambda: K.optimizers.SGD(0.5),
    "momentum": lambda: K.optimizers.SGD(0.05, momentum=0.9),
    "nesterov": lambda: K.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "adagrad": lambda: K.optimizers.Adagrad(0.1),
    "adam": lambda: K.optimizers.Adam(0.01, epsilon=1e-4),
    "amsgrad": lambda: K.optimizers.Adam(0.01, epsilon=1e-4, amsgrad=True),
    "schedule": lambda: K.optimizers.Adagrad(K.optimizers.schedules.ExponentialDecay(0.1, 50, 0.5)),
    "clipnorm": lambda: K.optimizers.SGD(0.5, clipnorm=0.05),
    "clipvalue": lambda: K.optimizers.SGD(0.5, clipvalue=0.002),
    "global_clipnorm": lambda: K.optimizers.Adagrad(0.1, global_clipnorm=0.05),
}


def _layer(**settings):
    start = K.initializers.RandomUniform(seed=3)
    settings = {"num_slots": SLOTS, "embeddings_initializer": start, "name": "table", **settings}
    return ScratchPipeEmbedding(ROWS, DIM, **settings)


def _plain():
    start = K.initializers.RandomUniform(seed=3)
    return K.layers.Embedding(ROWS, DIM, embeddings_initializer=start, name="table")


def _model(layer, optimizer=None, **compiling):
    inputs = K.Input((LOOKUPS,), dtype="int32", name="ids")
    rows = layer(inputs)
    pooled = K.layers.Lambda(lambda rows: tf.reduce_sum(rows, axis=-2))(rows)
    kernel = K.initializers.GlorotUniform(seed=1)
    model = K.Model(inputs, K.layers.Dense(1, kernel_initializer=kernel)(pooled))
    model.compile(optimizer or K.optimizers.Adagrad(0.1), "mse", **compiling)
    return model


def _dataset(ids, targets):
    return tf.data.Dataset.from_tensor_slices((ids, targets)).batch(BATCH)


def _outcome(model, **fitting):
    model.optimizer.build(model.trainable_variables)  # Or the step is traced twice.
    history = model.fit(epochs=EPOCHS, shuffle=False, verbose=0, **fitting).history
    return [*model.get_weights(), *history.values()]


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


def _assert_same(one, other):
    for mine, theirs in zip(one, other, strict=True):
        np.testing.assert_array_equal(mine, theirs)


# ---- the same as without a cache --------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "drive"),
    [
        ("sgd", {}),
        ("adagrad", {"steps_per_execution": 4}),
        slow("clipvalue", {"run_eagerly": True}),
        slow("adagrad", {"run_eagerly": True}),
        slow("schedule", {}),
        slow("clipnorm", {}),
        slow("global_clipnorm", {}),
    ],
)
def test_the_same_bits_as_an_embedding_of_tf_keras(optimizer, drive):
    count = 8 * BATCH if "run_eagerly" in drive else len(IDS)
    data = _dataset(IDS[:count], TARGETS[:count])
    found = []
    for layer in (_layer(), _plain()):
        model = _model(layer, OPTIMIZERS[optimizer](), **drive)
        cached = isinstance(layer, ScratchPipeEmbedding)
        debug = optimizer == "sgd"
        train = data.apply(lookahead(model, debug=debug)) if cached else data
        found.append(_outcome(model, x=train, validation_data=data.take(3)))
        if cached:
            stats = layer.stats()
            assert stats.train_hits == stats.train_lookups == EPOCHS * count * LOOKUPS
            assert stats.evictions > (300 if "run_eagerly" in drive else 3_000)
    _assert_same(*found)


class Lazy(K.Model):
    """A whole table as a variable, whose rows move by the row formulas, each once a step."""

    def train_step(self, data):
        ids, targets = data
        with tf.GradientTape() as tape:
            outputs = self(ids, training=True)
            loss = self.compute_loss(ids, targets, outputs)
        table, *dense = self.trainable_variables
        sliced, *gradients = tape.gradient(loss, [table, *dense])
        rows, place = tf.unique(sliced.indices)
        summed = tf.math.unsorted_segment_sum(sliced.values, place, tf.size(rows))
        values = [table, *self.slots()]
        rate = tf.constant(self.rate)
        number = tf.cast(self.optimizer.iterations + 1, tf.float32)
        new = self.formula.step([tf.gather(value, rows) for value in values], summed, rate, number)
        for variable, moved in zip(values, new, strict=True):
            variable.scatter_update(tf.IndexedSlices(moved, rows))
        self.optimizer.apply_gradients(zip(gradients, dense, strict=True))
        return self.compute_metrics(ids, targets, outputs, None)


@pytest.mark.parametrize("optimizer", ["amsgrad", slow("nesterov"), slow("momentum"), slow("adam")])
def test_the_same_bits_as_lazy_training_of_a_whole_table(optimizer):
    layer = _layer()
    model = _model(layer, OPTIMIZERS[optimizer]())
    mine = _outcome(model, x=_dataset(IDS, TARGETS).apply(lookahead(model)))
    functional = _model(_plain(), OPTIMIZERS[optimizer]())
    whole = Lazy(functional.inputs, functional.outputs)
    whole.compile(functional.optimizer, "mse")
    whole.formula = row_optimizer(twin(whole.optimizer, of_model=True))
    whole.rate = float(whole.optimizer.learning_rate)
    initial = [slot.initial for slot in whole.formula.slots]
    slots = [tf.Variable(tf.fill((ROWS, DIM), value)) for value in initial]
    whole.slots = lambda: slots  # Not among the model's weights.
    _assert_same(mine, _outcome(whole, x=_dataset(IDS, TARGETS)))
    for number, slot in enumerate(slots, start=1):
        np.testing.assert_array_equal(layer.engine.get(number), slot)
    assert layer.stats().evictions > 3_000


@pytest.mark.parametrize("optimizer", [slow("adagrad"), slow("nesterov"), slow("amsgrad")])
def test_the_same_as_numpy(optimizer):
    ids, targets = IDS[: 30 * BATCH], TARGETS[: 30 * BATCH]
    layer = _layer()
    model = _model(layer, OPTIMIZERS[optimizer]())
    start = model.get_weights()
    model.fit(_dataset(ids, targets).apply(lookahead(model)), epochs=EPOCHS, verbose=0)
    expected = uncached.train_numpy(optimizer, ids, targets, EPOCHS, start)
    slots = [layer.engine.get(n + 1) for n in range(len(uncached.FIRST_SLOTS[optimizer]))]
    done = [layer.get_table(), *slots, *model.get_weights()[1:]]
    for mine, theirs in zip(done, expected, strict=True):
        # Float32 against float64 over 60 steps.
        np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=2e-6)


class Twice(K.Model):
    """Looks two features up in one layer, and trains in a loop of its own."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.dense = layer, K.layers.Dense(1, kernel_initializer="ones")

    def call(self, features):
        rows = [tf.reduce_sum(self.layer(features[key]), axis=1) for key in ("seen", "next")]
        return self.dense(rows[0] * rows[1])


def _pairs():
    seen, following = IDS[:, :2], IDS[::-1, 2:]
    return tf.data.Dataset.from_tensor_slices(({"seen": seen, "next": following}, TARGETS)).batch(
        BATCH
    )


@pytest.mark.parametrize("mode", ["pipelined", slow("synchronous"), slow("host")])
def test_a_layer_called_twice_in_a_step_of_a_custom_loop(mode):
    found = []
    for layer in (_layer(mode=mode, optimizer=None), _plain()):
        model, optimizer = Twice(layer), K.optimizers.Adagrad(0.1)
        data = _pairs()
        if isinstance(layer, ScratchPipeEmbedding) and mode == "pipelined":
            layer.follow(optimizer)
            data = data.apply(lookahead({"seen": layer, "next": layer}))

        @tf.function
        def step(features, targets, model=model, optimizer=optimizer):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(features, training=True) - targets))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        losses = [step(*batch).numpy() for batch in data]
        assert optimizer.iterations.numpy() == len(losses)
        found.append([*model.get_weights(), losses])
    _assert_same(*found)


@pytest.mark.parametrize("pooling", ["ragged", "weighted"])
def test_pooled_lookups_train_as_those_of_numpy(pooling):
    layer = ScratchPipeEmbedding(20, 2, combiner="mean", mode="synchronous", mask_zero=True)
    optimizer = K.optimizers.SGD(1.0)
    start = layer.get_table()
    ids = tf.constant([[3, 5, 0], [3, 3, 7]])
    weights = tf.constant([[1.0, 3.0, 9.0], [2.0, 1.0, 1.0]]) if pooling == "weighted" else None
    given = tf.RaggedTensor.from_tensor(ids) if pooling == "ragged" else ids
    with tf.GradientTape() as tape:
        pooled = layer(given, weights=weights)
        loss = tf.reduce_sum(pooled)
    optimizer.minimize(loss, layer.trainable_variables, tape=tape)
    shares = {
        "ragged": [1 / 2 + 2 / 3, 1 / 2, 1 / 3],
        "weighted": [1 / 4 + 3 / 4, 3 / 4, 1 / 4],
    }[pooling]
    moved = np.zeros_like(start)
    moved[[3, 5, 7]] = np.array(shares)[:, None]
    np.testing.assert_allclose(layer.get_table(), start - moved, atol=1e-6)


def test_the_arguments_are_those_of_the_layer_for_keras_3():
    mine, theirs = (
        [(p.name, p.default) for p in inspect.signature(kind.__init__).parameters.values()]
        for kind in (ScratchPipeEmbedding, tf_scratchpipe.ScratchPipeEmbedding)
    )
    assert mine == theirs
    described = inspect.getdoc(ScratchPipeEmbedding)
    assert [name for name, _ in mine if f"{name}: " not in described] == ["self", "name"]


# ---- optimizers -------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [slow(True), False])
def test_the_learning_rate_is_live(own):
    optimizer = K.optimizers.SGD(0.5)
    layer = _layer(optimizer=optimizer if own else None)
    model = _model(layer, K.optimizers.SGD(0.5) if own else optimizer)
    train = _dataset(*FEW).apply(lookahead(model))
    model.fit(train, verbose=0)
    before = layer.get_table()
    optimizer.learning_rate = 0.0
    model.fit(train, verbose=0)
    np.testing.assert_array_equal(layer.get_table(), before)
    optimizer.learning_rate = 0.1
    model.fit(train, verbose=0)
    assert np.any(layer.get_table() != before)
    assert layer.row_optimizer() is optimizer


def test_rows_with_an_optimizer_of_their_own_leave_the_models_alone():
    layer = _layer(optimizer="adagrad")
    model = _model(layer, K.optimizers.AdamW(0.01, weight_decay=0.5))
    start = model.get_weights()
    train = _dataset(*FEW).apply(lookahead(model))
    model.fit(train, verbose=0)
    table, kernel, _ = model.get_weights()
    untouched = np.setdiff1d(np.arange(ROWS), FEW[0])
    np.testing.assert_array_equal(table[untouched], start[0][untouched])
    assert np.all(kernel != start[1])
    # Two moments of the kernel and the bias, and scalars that stand for none of the table.
    assert sum(v.shape.num_elements() for v in model.optimizer.variables) < 20


def test_the_optimizer_of_another_model_takes_over():
    layer = _layer()
    for optimizer in (K.optimizers.SGD(0.5), K.optimizers.Adagrad(0.1)):
        model = _model(layer, optimizer)
        model.fit(_dataset(*FEW).apply(lookahead(model)), verbose=0)
        assert layer.row_optimizer() is optimizer
    assert layer.engine.rows.slot_names == ["accumulator"]


def test_one_of_the_parts_of_a_composite_optimizer_moves_the_rows():
    layer, parts = _composite(K.optimizers)
    assert layer.row_optimizer() is parts[0][0]
    assert np.any(layer.get_table() != _layer().get_table())


def test_nothing_moves_in_a_frozen_layer():
    layer = _layer()
    model = _model(layer)
    layer.trainable = False
    model.compile("adagrad", "mse")
    start = model.get_weights()
    model.fit(_dataset(*FEW).apply(lookahead(model)), verbose=0)
    table, kernel = model.get_layer("table").get_table(), model.layers[-1].kernel.numpy()
    np.testing.assert_array_equal(table, start[-1] if start[-1].shape == table.shape else start[0])
    assert any(np.any(kernel != value) for value in start if value.shape == kernel.shape)


# ---- what is refused --------------------------------------------------------------------------


def _train(optimizer=None, layer=None, **compiling):
    _model(layer or _layer(mode="synchronous"), optimizer, **compiling).fit(*FEW, verbose=0)


def _legacy():
    _train(K.optimizers.legacy.Adagrad(0.1))


def _composite(optimizers=K.optimizers.legacy):
    layer = _layer(mode="synchronous")
    model = _model(layer)
    parts = [
        (optimizers.SGD(0.1), lambda: layer.trainable_variables),
        (optimizers.Adam(0.1), lambda: model.layers[-1].trainable_variables),
    ]
    model.compile(tfrs.experimental.optimizers.CompositeOptimizer(parts), "mse")
    model.fit(*FEW, verbose=0)
    return layer, parts


def _densified():
    layer, optimizer = _layer(mode="synchronous"), K.optimizers.SGD(0.1)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(tf.constant([1])))
    gradient = tape.gradient(loss, layer.embeddings)
    optimizer.apply_gradients([(gradient.values, layer.embeddings)])


def _applied_twice():
    layer, optimizer = _layer(mode="synchronous"), K.optimizers.SGD(0.1)
    with tf.GradientTape(persistent=True) as tape:
        loss = tf.reduce_sum(layer(tf.constant([1])))
    for _ in range(2):
        optimizer.minimize(loss, layer.trainable_variables, tape=tape)


def _skipped():
    layer = _layer(optimizer="sgd")
    dense = K.layers.Dense(1)
    optimizer = K.optimizers.SGD(0.1)
    data = tf.data.Dataset.from_tensor_slices(IDS[:99]).batch(33)
    for ids in data.apply(lookahead(layer)):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(dense(tf.reduce_sum(layer(ids, training=True), axis=1)))
        optimizer.minimize(loss, dense.trainable_variables, tape=tape)


def _untrained():
    layer, optimizer = _layer(mode="synchronous"), K.optimizers.SGD(0.1)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(tf.constant([1]), training=False))
    optimizer.minimize(loss, layer.trainable_variables, tape=tape)


def _distributed():
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        _model(_layer())


def _called_in_replicas():
    layer = _layer(mode="synchronous")
    layer(tf.constant([1]))
    tf.distribute.MirroredStrategy(["CPU:0"]).run(layer, [tf.constant([1])])


def _half():
    scaled = K.mixed_precision.LossScaleOptimizer(K.optimizers.SGD(0.1))
    model = _model(_layer(dtype="mixed_float16"), scaled)
    model.fit(_dataset(IDS[:BATCH], TARGETS[:BATCH]), verbose=0)


def _computed_with():
    layer = _layer()
    layer(tf.constant([1]))
    return layer.embeddings


REFUSALS = {
    "legacy optimizer": (_legacy, "legacy optimizer 'Adagrad'"),
    "legacy parts": (_composite, "legacy optimizer 'SGD'"),
    "loss scaling": (
        lambda: _train(K.mixed_precision.LossScaleOptimizer(K.optimizers.SGD(0.1))),
        "under a LossScaleOptimizer",
    ),
    "moving averages": (lambda: _train(K.optimizers.SGD(0.1, use_ema=True)), "use_ema=True"),
    "no row optimizer": (
        lambda: _train(K.optimizers.Nadam()),
        "can be trained by 'SGD', 'Adagrad'.*optimizer=Nadam",
    ),
    "adaptive epsilon": (
        lambda: _train(K.optimizers.Adam(adaptive_epsilon=True)),
        "adaptive_epsilon=True",
    ),
    "own optimizer with averages": (
        lambda: _layer(optimizer=K.optimizers.SGD(0.1, use_ema=True)),
        "use_ema=True",
    ),
    "XLA": (lambda: _train(jit_compile=True), "compiled with jit_compile=True"),
    "densified gradient": (_densified, "as tf.IndexedSlices"),
    "persistent tape": (_applied_twice, "applied twice for one lookup"),
    "gradient that skips the layer": (_skipped, "got a batch out of order"),
    "training=False": (_untrained, "with `training=False`"),
    "strategy scope": (_distributed, "MirroredStrategy"),
    "replicas": (_called_in_replicas, "MirroredStrategy"),
    "float16": (_half, "LossScaleOptimizer"),
    "regularizer": (lambda: _layer(embeddings_regularizer="l2"), "embeddings_regularizer"),
    "initializer of Keras 3": (
        lambda: _layer(embeddings_initializer=__import__("keras").initializers.Zeros()),
        "must be an initializer of tf_keras",
    ),
    "matmul": (lambda: tf.matmul([[1.0]], _computed_with()), "not a tensor"),
    "gather": (lambda: tf.gather(_computed_with(), [1]), "not a tensor"),
    "sum": (lambda: _computed_with() + 1.0, "not a tensor"),
    "slice": (lambda: _computed_with()[:1], "not a tensor"),
    "lookup of the weight": (
        lambda: tf.nn.embedding_lookup(_computed_with(), [1]),
        "not a tensor",
    ),
    "added to": (lambda: _computed_with().assign_add(1.0), "not a tensor"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_it_is_refused(case):
    action, text = REFUSALS[case]
    with pytest.raises(
        (ValueError, TypeError, tf.errors.InvalidArgumentError), match=f"(?s){text}"
    ):
        action()


@pytest.mark.slow
def test_xla_in_a_custom_loop_is_an_error():
    layer = _layer(mode="synchronous")
    with pytest.raises(tf.errors.InvalidArgumentError, match="EagerPyFunc"):
        tf.function(lambda ids: layer(ids), jit_compile=True)(tf.constant([1]))


# ---- look-ahead -------------------------------------------------------------------------------


def _two_readers():
    inputs = K.Input((LOOKUPS,), dtype="int32", name="ids")
    rows = K.layers.Flatten()(_layer()(inputs))
    other = K.layers.Flatten()(K.layers.Embedding(ROWS, 1, name="bias")(inputs))
    model = K.Model(inputs, K.layers.Dense(1)(K.layers.Concatenate()([rows, other])))
    model.compile("sgd", "mse")
    return model


def _floats():
    inputs = K.Input((LOOKUPS,), name="ids")
    model = K.Model(inputs, K.layers.Dense(1)(K.layers.Flatten()(_layer()(inputs))))
    model.compile("sgd", "mse")
    return model


def _computed_ids():
    inputs = K.Input((LOOKUPS,), dtype="int32", name="ids")
    model = K.Model(inputs, K.layers.Dense(1)(K.layers.Flatten()(_layer()(inputs + 1))))
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        (_two_readers, "'bias' reads input 'ids'"),
        (lambda: {"ids": _two_readers().get_layer("table")}, "'bias' reads input 'ids'"),
        (_floats, "would round them.*Declare it as tf_keras.Input"),
        (_computed_ids, "do not read an input as it is.*Pass the mapping"),
        (lambda: Twice(_layer()), "its inputs cannot be seen.*'<feature>': <layer 'table'>"),
        (lambda: {"ids": _layer()}, "does not know its row optimizer.*model=model"),
        (lambda: {"ids": _plain()}, "must be mapped to layers of tf_scratchpipe.for_tf_keras"),
        (lambda: 3, "needs a mapping from features"),
        (lambda: {"other": _layer(optimizer="sgd")}, "has no feature 'other'"),
    ],
)
def test_lookahead_refuses(layers, text):
    data = tf.data.Dataset.from_tensors(({"ids": FEW[0]}, FEW[1]))
    with pytest.raises((TypeError, ValueError), match=f"(?s){text}"):
        data.apply(lookahead(layers()))


def test_training_on_plain_ids_is_warned_of():
    with pytest.warns(UserWarning, match=r"for_tf_keras.lookahead\(layers, model=model\)"):
        _train(layer=_layer())


def test_lookahead_follows_a_functional_model_with_several_inputs():
    inputs = {key: K.Input((2,), dtype="int32", name=key) for key in ("seen", "next")}
    tables = {key: ScratchPipeEmbedding(ROWS, 2, name=f"{key}_table") for key in inputs}
    rows = [K.layers.Flatten()(tables[key](inputs[key])) for key in inputs]
    model = K.Model(inputs, K.layers.Dense(1)(K.layers.Concatenate()(rows)))
    model.compile("adagrad", "mse")
    model.fit(_pairs().apply(lookahead(model)), verbose=0)
    for layer in tables.values():
        assert layer.stats().train_hit_rate == 1.0
        assert layer.stats().batches == len(_pairs())


# ---- saving -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained():
    model = _model(_layer())
    model.fit(_dataset(*FEW).apply(lookahead(model)), verbose=0)
    return model


@pytest.mark.parametrize(
    ("file", "slots"), [("a.h5", False), ("a.weights.h5", True), ("a", True), ("a.keras", True)]
)
def test_what_is_saved_is_loaded(tmp_path, trained, file, slots):
    model = trained
    if file.endswith(".keras"):
        model.save(tmp_path / file, save_format="keras")
        custom = {"ScratchPipeEmbedding": ScratchPipeEmbedding}
        loaded = K.models.load_model(tmp_path / file, custom_objects=custom, safe_mode=False)
    else:
        model.save_weights(tmp_path / file)
        loaded = _model(_layer())
        loaded.load_weights(tmp_path / file)
    _assert_same(loaded.get_weights(), model.get_weights())
    if slots:
        rows = loaded.get_layer("table").engine
        loaded.get_layer("table").follow(loaded.optimizer)
        np.testing.assert_array_equal(rows.get(1), model.get_layer("table").engine.get(1))


def test_training_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(tmp_path):
    whole, first, second = _model(_layer()), _model(_layer()), _model(_layer())
    data = _dataset(*FEW)
    for model, epochs in ((whole, 2), (first, 1)):
        model.fit(data.apply(lookahead(model)), epochs=epochs, verbose=0)
    path = tf.train.Checkpoint(model=first, optimizer=first.optimizer).save(tmp_path / "a")
    status = tf.train.Checkpoint(model=second, optimizer=second.optimizer).restore(path)
    second.fit(data.apply(lookahead(second)), verbose=0)
    status.assert_existing_objects_matched()
    _assert_same(second.get_weights(), whole.get_weights())
    for number in range(2):
        engines = [model.get_layer("table").engine for model in (second, whole)]
        np.testing.assert_array_equal(engines[0].get(number), engines[1].get(number))


def test_the_best_weights_come_back():
    model = _model(_layer(), K.optimizers.SGD(10.0))
    best = K.callbacks.EarlyStopping("loss", patience=1, mode="max", restore_best_weights=True)
    seen = []
    record = K.callbacks.LambdaCallback(on_epoch_end=lambda *_: seen.append(model.get_weights()))
    train = _dataset(*FEW).apply(lookahead(model))
    losses = model.fit(train, epochs=4, verbose=0, callbacks=[record, best]).history["loss"]
    _assert_same(model.get_weights(), seen[int(np.argmax(losses))])


def test_the_config_makes_the_same_layer():
    schedule = K.optimizers.schedules.ExponentialDecay(0.1, 50, 0.5)
    layer = _layer(optimizer=K.optimizers.Adagrad(schedule), combiner="sum", mask_zero=True)
    again = ScratchPipeEmbedding.from_config(layer.get_config())
    assert again.get_config() == layer.get_config()
    assert isinstance(again.row_optimizer(), K.optimizers.Adagrad)
    np.testing.assert_array_equal(again.get_table(), layer.get_table())


@pytest.mark.parametrize("start", ["uniform", K.initializers.GlorotNormal(seed=2)])
def test_rows_are_drawn_one_by_one(start):
    layers = [
        _layer(embeddings_initializer=start, initialize_by_row=by_row) for by_row in (True, False)
    ]
    assert layers[0].engine.rows.host[0].gather(np.array([3])).any()
    drawn, whole = (layer.get_table() for layer in layers)
    assert np.any(drawn != whole)
    # The same distribution: 20,000 values.
    np.testing.assert_allclose(drawn.std(), whole.std(), rtol=0.03)
    again = ScratchPipeEmbedding.from_config(layers[1].get_config())
    if not isinstance(start, str):
        np.testing.assert_array_equal(again.get_table(), whole)


def test_a_plain_embedding_serves_the_table():
    layer = _layer()
    plain = layer.to_embedding()
    np.testing.assert_array_equal(plain(IDS[:5]), layer(IDS[:5]))


def test_a_saved_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot be saved in a SavedModel"):
        _model(_layer()).save(tmp_path / "model")


# ---- TensorFlow Recommenders ------------------------------------------------------------------


class Towers(tfrs.Model):
    def __init__(self, make):
        super().__init__()
        self.seen, self.next = make("seen"), make("next")
        candidates = tf.data.Dataset.range(400).batch(100).map(self.next)
        self.task = tfrs.tasks.Retrieval(metrics=tfrs.metrics.FactorizedTopK(candidates, ks=(10,)))

    def compute_loss(self, features, training=False):
        seen, following = self.seen(features["seen"]), self.next(features["next"])
        return self.task(seen, following, compute_metrics=not training)


def _interactions():
    ids = IDS[:, :2] % 400
    return {"seen": ids[:, 0], "next": ids[:, 1]}


def _maker(cached):
    def make(name):
        start = K.initializers.RandomUniform(-0.5, 0.5, seed=len(name) + ord(name[0]))
        if not cached:
            return K.layers.Embedding(400, 4, embeddings_initializer=start, name=name)
        return ScratchPipeEmbedding(400, 4, num_slots=160, embeddings_initializer=start, name=name)

    return make


@pytest.mark.slow
def test_the_retrieval_task_has_the_metric_of_its_twin():
    data, found = tf.data.Dataset.from_tensor_slices(_interactions()).batch(BATCH), []
    for cached in (True, False):
        model = Towers(_maker(cached))
        model.seen(tf.constant([1])), model.next(tf.constant([1]))  # Or the step is traced twice.
        model.compile(K.optimizers.Adagrad(0.1))
        layers = {"seen": model.seen, "next": model.next}
        train = data.apply(lookahead(layers, model=model)) if cached else data
        losses = model.fit(train, epochs=EPOCHS, verbose=0).history["loss"]
        metrics = model.evaluate(data.take(10), return_dict=True, verbose=0)
        found.append([*model.get_weights(), losses, *metrics.values()])
        assert not cached or model.next.stats().evictions > 500
    _assert_same(*found)


def test_the_example_trains_a_model_to_the_metric_of_its_twin(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(EXAMPLES)
    example = importlib.import_module("tfrs_ranking")
    folder = made_up_movies.write(tmp_path)
    options = "--epochs 1 --batch-size 16 --slots 60 --width 4 --only tasks.Retrieval".split()
    ((name, found),) = example.main(["--data", str(folder), *options]).items()
    assert name == "tasks.Retrieval"
    assert found["plain"] == found["cached"]
    assert found["train_hit_rate"] == 1.0
    assert found["evictions"] > 200
    assert "factorized_top_k/top_100" in capsys.readouterr().out

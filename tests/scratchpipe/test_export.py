"""Trained tables in other hands: SavedModels, and `keras.layers.Embedding`."""

import json
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_scratchpipe import ScratchPipeEmbedding, lookahead

ROWS, DIM, LOOKUPS, BATCH = 120, 4, 3, 8
RNG = np.random.default_rng(0)
IDS = RNG.integers(0, ROWS, (8 * BATCH, LOOKUPS)).astype("int32")
TARGETS = RNG.random((8 * BATCH, 1)).astype("float32")


def _layer(**settings):
    start = keras.initializers.RandomUniform(seed=1)
    settings = {"num_slots": 60, "optimizer": "adagrad", "name": "items", **settings}
    return ScratchPipeEmbedding(ROWS, DIM, embeddings_initializer=start, **settings)


def _trained(layer, shape=(LOOKUPS,)):
    """A model around the layer, in the middle of an epoch."""
    inputs = keras.Input(shape, dtype="int32", name="ids")
    rows = layer(inputs)
    pooled = rows if layer.combiner else keras.layers.GlobalAveragePooling1D()(rows)
    model = keras.Model(inputs, keras.layers.Dense(1, kernel_initializer="ones")(pooled))
    model.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensor_slices((IDS, TARGETS)).batch(BATCH)
    for number, batch in enumerate(data.apply(lookahead(model))):
        model.train_on_batch(*batch)
        if number == 5:
            return model
    return model


# ---- SavedModel -------------------------------------------------------------------------------

_SERVE = """
import json, sys
sys.modules["keras"] = sys.modules["tf_scratchpipe"] = None  # Neither can be imported.
import numpy as np
import tensorflow as tf
answers = {}
for path, ids in json.loads(sys.stdin.read()):
    served = tf.saved_model.load(path)
    try:
        outputs = served.serve(tf.constant(ids["values"], ids["dtype"], ids["shape"]))
        answers.setdefault(path, []).append(np.asarray(outputs).tolist())
    except tf.errors.InvalidArgumentError as error:
        answers.setdefault(path, []).append(str(error.message))
assert "keras.src" not in sys.modules
print(json.dumps(answers))
"""


def _serve(*requests):
    """What a process without Keras answers: for each path and ids, rows or a message."""
    asked = [
        (str(path), {"values": ids.ravel().tolist(), "dtype": ids.dtype.name, "shape": ids.shape})
        for path, ids in requests
    ]
    done = subprocess.run(
        [sys.executable, "-c", _SERVE], input=json.dumps(asked), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def _layer_model(layer, shape=(None,), dtype="int32"):
    inputs = keras.Input(shape, dtype=dtype, name="ids")
    return keras.Model(inputs, layer(inputs))


def test_exported_models_are_served_without_keras(tmp_path):
    pooled = _trained(_layer(combiner="mean", mask_zero=True))
    other = IDS[:5].copy()
    other[:, 0] = 0
    layer = _trained(_layer(mask_zero=True)).get_layer("items")
    rows = _layer_model(layer)
    known = _layer_model(_layer(oov_id=7, mode="host"))
    floats = _layer_model(_layer(mode="host"), dtype="float32")
    wrong = np.array([[3, ROWS], [-1, 5]], "int32")
    fractions = np.array([[0.5, 1.0]], "float32")
    requests = []
    for name, model, *batches in [
        ("pooled", pooled, IDS[:1], other),
        ("rows", rows, IDS[:4], IDS[:2, :1], np.zeros((0, 2), "int32"), wrong),
        ("known", known, wrong),
        ("floats", floats, IDS[:2].astype("float32"), fractions),
    ]:
        model.export(tmp_path / name, verbose=False)
        requests += [(tmp_path / name, ids) for ids in batches]
    served = {path.rpartition("/")[2]: answers for path, answers in _serve(*requests).items()}

    for ids, answer in zip((IDS[:1], other), served["pooled"], strict=True):
        np.testing.assert_allclose(answer, pooled(ids), rtol=1e-6)  # Another compiled product.
    table = layer.get_table()
    for ids, answer in zip((IDS[:4], IDS[:2, :1]), served["rows"], strict=False):
        np.testing.assert_array_equal(np.array(answer, "float32"), table[ids])
    assert served["rows"][2] == []
    assert "Layer items got an id that it has no row for" in served["rows"][3]
    assert "from 0 to 119" in served["rows"][3]
    table = known.get_layer("items").get_table()
    np.testing.assert_array_equal(np.array(served["known"][0], "float32"), table[[[3, 7], [7, 5]]])
    table = floats.get_layer("items").get_table()
    np.testing.assert_array_equal(np.array(served["floats"][0], "float32"), table[IDS[:2]])
    assert "has no row for" in served["floats"][1]


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("weighted", [False, True])
def test_an_exported_layer_pools_as_the_layer_does(tmp_path, combiner, weighted):
    layer = _layer(combiner=combiner, mode="host")
    inputs = [keras.Input((LOOKUPS,), dtype="int32")]
    if weighted:
        inputs.append(keras.Input((LOOKUPS,)))
    model = keras.Model(inputs, layer(*inputs))
    model.export(tmp_path, verbose=False)
    values = [IDS[:6], RNG.random((6, LOOKUPS)).astype("float32")][: len(inputs)]
    served = tf.saved_model.load(tmp_path)
    np.testing.assert_array_equal(served.serve(values), model(values))


def test_ragged_ids_are_exported(tmp_path):
    layer = _layer(combiner="sum", mode="host")
    ragged = tf.ragged.constant([[1, 2, 3], [], [4]], dtype=tf.int32)
    expected = layer(ragged)

    archive = keras.export.ExportArchive()
    archive.track(layer)

    def serve(values, splits):
        return layer(tf.RaggedTensor.from_row_splits(values, splits))

    signature = [tf.TensorSpec([None], tf.int32), tf.TensorSpec([None], tf.int64)]
    archive.add_endpoint("serve", serve, signature)
    archive.write_out(tmp_path, verbose=False)
    served = tf.saved_model.load(tmp_path)
    np.testing.assert_array_equal(served.serve(ragged.values, ragged.row_splits), expected)


def test_an_export_holds_the_table_once_and_calls_no_python(tmp_path):
    layer = _layer(optimizer="adam", mode="host")
    model = _layer_model(layer)
    model.export(tmp_path, verbose=False)
    reader = tf.train.load_checkpoint(str(tmp_path / "variables" / "variables"))
    shapes = [shape for shape in reader.get_variable_to_shape_map().values() if ROWS in shape]
    assert shapes == [[ROWS, DIM]]
    graph = tf.saved_model.load(tmp_path).signatures["serve"].graph.as_graph_def()
    ops = {node.op for f in graph.library.function for node in f.node_def}
    assert not ops & {"PyFunc", "EagerPyFunc", "PyFuncStateless", "ReadVariableOp"}
    assert "ResourceGather" in ops


def test_training_goes_on_after_an_export(tmp_path):
    model, expected = (
        _trained(_layer(mode=mode, combiner="sum")) for mode in ("pipelined", "host")
    )
    before = model(IDS[:4])
    model.export(tmp_path, verbose=False)
    for each in (model, expected):
        data = tf.data.Dataset.from_tensor_slices((IDS, TARGETS)).batch(BATCH)
        each.fit(data.apply(lookahead(each)), verbose=0)
    for one, other in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    served = tf.saved_model.load(tmp_path)  # As it was.
    np.testing.assert_allclose(served.serve(IDS[:4]), before, rtol=1e-6)


# ---- keras.layers.Embedding -------------------------------------------------------------------


@pytest.mark.parametrize("mask_zero", [False, True])
def test_a_keras_embedding_takes_the_table_over(mask_zero):
    layer = _trained(_layer(mask_zero=mask_zero)).get_layer("items")
    plain = layer.to_keras_embedding()
    assert type(plain) is keras.layers.Embedding
    assert (plain.name, plain.mask_zero, plain.trainable) == ("items", mask_zero, True)
    np.testing.assert_array_equal(plain(IDS), layer(IDS))
    np.testing.assert_array_equal(plain.embeddings, layer.get_table())


def test_a_whole_model_becomes_plain():
    model = _trained(_layer())

    def clone(layer):
        if isinstance(layer, ScratchPipeEmbedding):
            return layer.to_keras_embedding()
        return layer.__class__.from_config(layer.get_config())

    plain = keras.models.clone_model(model, clone_function=clone)
    np.testing.assert_array_equal(plain.get_layer("items").embeddings, model.get_weights()[0])
    plain.set_weights(model.get_weights())
    np.testing.assert_allclose(plain(IDS), model(IDS), rtol=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"combiner": "sum"}, "does not pool.*combiner='sum'.*model.export"),
        ({"oov_id": 3}, "out of range.*oov_id=3"),
    ],
)
def test_what_a_keras_embedding_cannot_do_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        _layer(**settings).to_keras_embedding()


@pytest.mark.parametrize("mode", ["pipelined", "host"])
def test_a_layer_takes_the_table_of_a_keras_embedding(mode):
    plain = keras.layers.Embedding(ROWS, DIM, mask_zero=True, name="items", trainable=False)
    plain.build()
    layer = ScratchPipeEmbedding.from_keras_embedding(plain, num_slots=50, mode=mode)
    assert (layer.num_slots, layer.mode, layer.name) == (50, mode, "items")
    assert (layer.mask_zero, layer.trainable) == (True, False)
    np.testing.assert_array_equal(layer.get_table(), plain.embeddings)
    np.testing.assert_array_equal(layer(IDS), plain(IDS))


def test_a_layer_takes_the_arguments_of_an_unbuilt_keras_embedding():
    start = keras.initializers.RandomNormal(seed=4)
    plain = keras.layers.Embedding(ROWS, DIM, start, dtype="mixed_bfloat16")
    layer = ScratchPipeEmbedding.from_keras_embedding(plain, name="other", combiner="sum")
    assert (layer.name, layer.combiner, layer.compute_dtype) == ("other", "sum", "bfloat16")
    plain.build()
    np.testing.assert_array_equal(layer.get_table(), plain.embeddings)


@pytest.mark.parametrize(
    "argument",
    [
        {"embeddings_regularizer": "l2"},
        {"embeddings_constraint": "non_neg"},
        {"lora_rank": 2},
    ],
)
def test_what_a_layer_cannot_do_is_refused(argument):
    plain = keras.layers.Embedding(ROWS, DIM, **argument)
    with pytest.raises(ValueError, match=f"does not support `{next(iter(argument))}`"):
        ScratchPipeEmbedding.from_keras_embedding(plain)


def test_only_a_keras_embedding_is_taken():
    with pytest.raises(TypeError, match=r"must be a keras\.layers\.Embedding"):
        ScratchPipeEmbedding.from_keras_embedding(keras.layers.Dense(2))

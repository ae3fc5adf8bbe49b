"""Which features are replaced, in which structures, and who else may read them."""

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_scratchpipe import ScratchPipeEmbedding, lookahead

RNG = np.random.default_rng(0)
N, ROWS = 40, 60


def _embedding(name, **settings):
    settings = {"num_slots": 50, "optimizer": "adagrad", "combiner": "sum", **settings}
    settings.setdefault("embeddings_initializer", keras.initializers.RandomUniform(seed=len(name)))
    return ScratchPipeEmbedding(ROWS, 3, name=name, **settings)


def _ids(*shape):
    return RNG.integers(0, ROWS, (N, *shape)).astype("int32")


def _input(name, *shape, dtype="int32"):
    return keras.Input(shape, dtype=dtype, name=name)


def _model(inputs, rows, seed=5):
    joined = keras.layers.concatenate(rows) if len(rows) > 1 else rows[0]
    kernel = keras.initializers.GlorotUniform(seed=seed)
    model = keras.Model(inputs, keras.layers.Dense(1, kernel_initializer=kernel)(joined))
    model.compile("sgd", "mse")
    return model


def _agree(build, element, apply=lambda model: lookahead(model, debug=True), **fitting):
    """Training through look-ahead gives what training on the host gives."""
    tables = []
    for mode in ("pipelined", "host"):
        model = build(mode)
        data = tf.data.Dataset.from_tensor_slices(element).batch(8)
        model.fit(data.apply(apply(model)), verbose=0, **{"epochs": 2, **fitting})
        layers = [one for one in model._flatten_layers() if isinstance(one, ScratchPipeEmbedding)]
        tables.append([layer.get_table() for layer in layers])
        if mode == "pipelined":
            stats = layers[0].stats()
            assert stats.batches > 0
            assert stats.train_hits == stats.train_lookups
    for one, other in zip(*tables, strict=True):
        np.testing.assert_array_equal(one, other)


TARGETS = RNG.random((N, 1)).astype("float32")


def _two(mode):
    a, b = _input("a", 2), _input("b", 3)
    rows = [_embedding("one", mode=mode)(a), _embedding("two", mode=mode)(b)]
    return [a, b], rows


@pytest.mark.parametrize("kind", ["dict", "list", "dict for list", "weights"])
def test_two_features_two_tables(kind):
    a, b = _ids(2), _ids(3)

    def build(mode):
        inputs, rows = _two(mode)
        # Keys of a dictionary need not be the names of the inputs.
        return _model({"x": inputs[0], "y": inputs[1]} if kind == "dict" else inputs, rows)

    element = {
        "dict": ({"y": b, "x": a}, TARGETS),
        "list": ((a, b), TARGETS),
        "dict for list": ({"b": b, "a": a}, TARGETS),
        "weights": ((a, b), TARGETS, RNG.random((N, 1)).astype("float32")),
    }[kind]
    _agree(build, element)


def test_an_ordered_dictionary_with_unsorted_keys_is_refused():
    def build(mode):
        inputs, rows = _two(mode)
        return _model({"z": inputs[0], "a": inputs[1]}, rows)

    unsorted = (collections.OrderedDict([("z", _ids(2)), ("a", _ids(3))]), TARGETS)
    _refused(build("pipelined"), unsorted, r"sorted keys.*Received: keys \['z', 'a'\]")
    _agree(build, (collections.OrderedDict(sorted(unsorted[0].items())), TARGETS))
    advised = tf.data.Dataset.from_tensor_slices(unsorted).batch(8)
    advised = advised.map(lambda x, *rest: (dict(x), *rest))
    model = build("pipelined")
    model.fit(advised.apply(lookahead(model, debug=True)), verbose=0)


def test_other_parts_of_an_element_stay():
    element = ({"id": _ids(2), "price": RNG.random((N, 1)).astype("float32")}, TARGETS)

    def build(mode):
        ids, price = _input("id", 2), _input("price", 1, dtype="float32")
        rows = [_embedding("one", mode=mode)(ids), price]
        return _model({"id": ids, "price": price}, rows)

    _agree(build, element)
    model = build("pipelined")
    source = tf.data.Dataset.from_tensor_slices(element).batch(8)
    planned = source.apply(lookahead(model))
    assert planned.element_spec == source.element_spec
    assert planned.cardinality() == source.cardinality()
    for (inputs, targets), (coded, same) in zip(source, planned.take(2), strict=False):
        np.testing.assert_array_equal(targets, same)
        np.testing.assert_array_equal(inputs["price"], coded["price"])
        assert coded["id"].numpy().max() < -(2**30)


def test_one_layer_for_several_features():
    def build(mode):
        a, b = _input("a", 2), _input("b", 3)
        shared = _embedding("shared", mode=mode)
        return _model([a, b], [shared(a), shared(b)])

    _agree(build, ((_ids(2), _ids(3)), TARGETS))


def test_several_layers_on_one_feature():
    def build(mode):
        a, b = _input("a", 2), _input("b", 3)
        rows = [_embedding(name, mode=mode) for name in ("factors", "bias", "other")]
        return _model([a, b], [rows[0](a), rows[1](a), rows[2](b)])

    _agree(build, ((_ids(2), _ids(3)), TARGETS))


def test_layers_and_features_all_connected():
    def build(mode):
        a, b = _input("a", 2), _input("b", 3)
        one, two = _embedding("one", mode=mode), _embedding("two", mode=mode)
        return _model([a, b], [one(a), two(a), two(b)])

    _agree(build, ((_ids(2), _ids(3)), TARGETS))


def test_a_mapping_in_a_subclassed_model():
    class Model(keras.Model):
        def __init__(self, mode):
            super().__init__()
            self.rows = _embedding("rows", mode=mode)
            self.top = keras.layers.Dense(1, kernel_initializer="ones")

        def call(self, inputs):
            return self.top(self.rows(inputs["deep"]["ids"]))

    def build(mode):
        model = Model(mode)
        model.compile("sgd", "mse")
        return model

    element = ({"deep": {"ids": _ids(2)}, "also": _ids(1)}, TARGETS)
    _agree(build, element, lambda model: lookahead({("deep", "ids"): model.rows}, debug=True))


def test_a_single_tensor_and_a_sequential_model():
    def build(mode):
        model = keras.Sequential(
            [_input("a", 2), _embedding("one", mode=mode), keras.layers.Dense(1, "tanh")]
        )
        keras.utils.set_random_seed(1)
        model.layers[-1].kernel.assign(keras.initializers.GlorotUniform(seed=1)((3, 1)))
        model.compile("sgd", "mse")
        return model

    _agree(build, (_ids(2), TARGETS))
    _agree(build, (_ids(2), TARGETS), lambda model: lookahead(model.layers[0]))
    _agree(build, (_ids(2), TARGETS), lambda model: lookahead({"a": model.layers[0]}))


def test_nested_models_casts_slices_and_reshapes_are_followed():
    def build(mode):
        inner = _input("inner", 2, dtype="int64")
        tower = keras.Model(inner, _embedding("in", mode=mode)(inner))
        whole = _input("whole", 6)
        rows = [
            tower(keras.ops.cast(whole[:, :2], "int64")),
            _embedding("column", mode=mode)(keras.ops.expand_dims(whole[:, 2], -1)),
            _embedding("others", mode=mode)(whole[:, 4:]),
        ]
        # A column that nobody plans may be read by anybody.
        plain = keras.layers.Embedding(ROWS, 2, embeddings_initializer="ones")(whole[:, 3])
        return _model(whole, [*rows, plain])

    _agree(build, (_ids(6), TARGETS))


@pytest.mark.parametrize("kind", ["ragged", "sparse"])
def test_ragged_and_sparse_features(kind):
    lengths = RNG.integers(0, 4, N)
    ragged = tf.RaggedTensor.from_row_lengths(
        RNG.integers(0, ROWS, lengths.sum()).astype("int32"), lengths
    )
    ids = ragged if kind == "ragged" else (ragged + 0).to_sparse()

    def build(mode):
        inputs = keras.Input((None,), dtype="int32", name="a", **{kind: True})
        return _model(inputs, [_embedding("one", mode=mode)(inputs)])

    _agree(build, (ids, TARGETS))


def test_class_weights_and_steps_per_epoch():
    def build(mode):
        a = _input("a", 2)
        return _model(a, [_embedding("one", mode=mode)(a)])

    labels = RNG.integers(0, 2, (N, 1))
    _agree(build, (_ids(2), labels), class_weight={0: 1.0, 1: 3.0})

    def apply(model):
        planned = lookahead(model, debug=True)
        return lambda data: data.repeat().apply(planned)

    _agree(build, (_ids(2), labels), apply, steps_per_epoch=3, epochs=4)


def test_repeat_and_prefetch_may_come_after():
    def build(mode):
        a = _input("a", 2)
        return _model(a, [_embedding("one", mode=mode)(a)])

    def apply(model):
        planned = lookahead(model, debug=True)
        return lambda data: data.apply(planned).repeat(3).prefetch(4)

    _agree(build, (_ids(2), TARGETS), apply)


def test_unknown_cardinality_stays_unknown():
    a = _input("a", 2)
    model = _model(a, [_embedding("one")(a)])
    data = tf.data.Dataset.from_tensor_slices((_ids(2), TARGETS)).batch(8).filter(lambda *_: True)
    planned = data.apply(lookahead(model))
    assert planned.cardinality() == tf.data.UNKNOWN_CARDINALITY
    model.fit(planned, epochs=2, verbose=0)
    assert model.layers[1].stats().batches == 10


def test_the_model_may_be_compiled_anew():
    a = _input("a", 2)
    model = _model(a, [_embedding("one", optimizer=None)(a)])
    data = tf.data.Dataset.from_tensor_slices((_ids(2), TARGETS)).batch(8).apply(lookahead(model))
    model.fit(data, verbose=0)
    model.compile(keras.optimizers.Adam(0.1), "mse")
    model.fit(data, verbose=0)
    assert model.layers[1].row_optimizer() is model.optimizer
    assert model.layers[1].stats().batches == 10


# ---- refusals ---------------------------------------------------------------------------------


def _refused(layers, element, message, error=ValueError):
    data = tf.data.Dataset.from_tensor_slices(element).batch(8)
    with pytest.raises(error, match=message):
        data.apply(lookahead(layers))


@pytest.mark.parametrize(
    "read",
    [
        keras.layers.Embedding(ROWS, 3, name="reader"),
        keras.layers.Lambda(lambda ids: keras.ops.cast(ids != 0, "float32"), name="reader"),
        keras.layers.CategoryEncoding(ROWS, name="reader"),
    ],
)
@pytest.mark.parametrize("how", ["model", "mapping"])
def test_another_reader_of_a_planned_feature_is_refused(read, how):
    a = _input("a", 2)
    other = keras.layers.Flatten()(read(a))
    rows = _embedding("one")
    model = _model(a, [rows(a), other])
    told = model if how == "model" else {"a": rows}
    _refused(told, (_ids(2), TARGETS), "'reader' reads input 'a'.*copy of the feature")


def test_a_reader_behind_a_cast_or_a_nested_model_is_refused():
    a = _input("a", 2)
    inner = _input("inner", 2)
    tower = keras.Model(inner, keras.layers.Embedding(ROWS, 3, name="deep")(inner))
    flat = keras.layers.Flatten()(tower(keras.ops.cast(a, "int64")))
    model = _model(a, [_embedding("one")(a), flat])
    _refused(model, (_ids(2), TARGETS), "'deep' reads input 'a'")


def test_a_layer_that_a_mapping_leaves_out_is_refused():
    a = _input("a", 2)
    one, two = _embedding("one"), _embedding("two")
    _model(a, [one(a), two(a)])
    _refused({"a": one}, (_ids(2), TARGETS), "'two' reads input 'a'")


def test_overlapping_slices_are_refused():
    a = _input("a", 4)
    plain = keras.layers.Flatten()(keras.layers.Embedding(ROWS, 2, name="reader")(a[:, 1:3]))
    model = _model(a, [_embedding("one")(a[:, :2]), plain])
    _refused(model, (_ids(4), TARGETS), "'reader' reads input 'a'")


def test_float_inputs_and_features_are_refused():
    a = keras.Input((2,), name="a")
    model = _model(a, [_embedding("one")(a)])
    _refused(model, (_ids(2), TARGETS), r'keras.Input\(..., dtype="int32"')
    b = _input("b", 2)
    model = _model(b, [_embedding("one")(b)])
    _refused(model, (_ids(2).astype("float32"), TARGETS), "must be int32 or int64.*float32")
    _refused(model, (_ids(2).astype("uint8"), TARGETS), "must be int32 or int64.*uint8")


def test_computed_ids_show_the_mapping():
    a = _input("a", 2)
    model = _model(a, [_embedding("one")(keras.ops.mod(a, 7))])
    message = r"'one' look computed.*lookahead\({'<feature>': model.get_layer\('one'\)}\)"
    _refused(model, (_ids(2), TARGETS), message)


def test_a_subclassed_model_shows_the_mapping():
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.rows = _embedding("rows")

        def call(self, inputs):
            return self.rows(inputs)

    _refused(Model(), (_ids(2), TARGETS), r"lookahead\({'<feature>': model.get_layer\('rows'\)}\)")


def test_missing_features_and_wrong_arguments():
    one = _embedding("one")
    element = ({"a": _ids(2), "b": _ids(2)}, TARGETS)
    _refused({"c": one}, element, "no feature 'c' for layer 'one'. Its features are 'a', 'b'")
    _refused({}, element, "mapping", error=TypeError)
    _refused({"a": keras.layers.Dense(1)}, element, "must be mapped", error=TypeError)
    with pytest.raises(ValueError, match="`executor`"):
        lookahead({"a": one}, executor="process")
    with pytest.raises(ValueError, match="`past`"):
        lookahead({"a": one}, past=-1)


def test_layers_on_one_feature_must_agree():
    a = _input("a", 2)
    model = _model(a, [_embedding("one")(a), _embedding("two", num_slots=40)(a)])
    _refused(model, (_ids(2), TARGETS), "'one' and 'two' read the same feature.*num_slots")


def test_a_model_without_the_layer_is_refused():
    a = _input("a", 2, dtype="float32")
    _refused(_model(a, [a]), (_ids(2), TARGETS), "no ScratchPipeEmbedding")


def test_an_unknown_optimizer_is_asked_for():
    rows = _embedding("one", optimizer=None)
    _refused({"a": rows}, ({"a": _ids(2)}, TARGETS), "does not know its row optimizer")
    a = _input("a", 2)
    model = keras.Model(a, _embedding("two", optimizer=None)(a))
    _refused(model, (_ids(2), TARGETS), "does not know its row optimizer")

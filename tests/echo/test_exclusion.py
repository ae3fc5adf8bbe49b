"""Layers that a user excludes are never recomputed."""

import keras
import numpy as np
import pytest

import tf_echo
from tests.echo import small
from tf_echo import exclusion
from tf_echo.graph_view import parse_view

NAME = "functional_1/decoder_1/dense_2_1/Gelu/mul"


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("decoder", True),
        ("decoder/*", True),
        ("dec*", True),
        ("dense_2", True),
        ("decoder/dense_2", True),
        ("functional/decoder", True),
        ("dense_?", True),
        ("dense", False),
        ("dense_2_1", False),
        ("code", False),
        ("decoder/dense_3", False),
        ("Decoder", False),
    ],
)
def test_patterns_match_whole_names_of_layers(pattern, expected):
    assert exclusion.matches(NAME, [pattern]) is expected


def test_backward_nodes_are_not_excluded():
    view = parse_view("""
        m_1/a_1/x = Placeholder
        m_1/a_1/y = Tanh m_1/a_1/x
        backward:
        m_1/a_1/z = TanhGrad m_1/a_1/y m_1/a_1/x
    """)
    assert exclusion.excluded_nodes(view, ["a"]) == {0, 1}


def _recomputed(model: keras.Model) -> set[str]:
    """The layers of which anything is recomputed."""
    plan = model.optimizer.plan
    found = [*plan.recomputed] + [d for loop in plan.loops for d in loop.recomputed]
    return {part for d in found for node in d.nodes for part in exclusion.layers_of(node)}


def _stack() -> keras.Model:
    layers = [keras.layers.Dense(32, activation="gelu", name=name) for name in "abc"]
    return keras.Sequential([keras.Input((32,)), *layers, keras.layers.Dense(1)])


def _fit(model: keras.Model, **arguments) -> keras.Model:
    model.compile(tf_echo.EchoOptimizer("sgd", **arguments), "mse")
    small.fit(model)
    return model


def test_an_excluded_layer_is_left_alone():
    assert {"a", "b"} <= _recomputed(_fit(_stack()))
    without = _recomputed(_fit(_stack(), exclude=("a",)))
    assert "a" not in without
    assert "b" in without


def test_excluding_everything_recomputes_nothing():
    assert _recomputed(_fit(_stack(), exclude=("*",))) == set()


def test_an_excluded_loop_is_left_alone():
    x = np.zeros((8, 6, 4), "float32")
    layers = [
        keras.layers.LSTM(8, name=n, return_sequences=True, recurrent_dropout=0.1) for n in "ab"
    ]
    model = keras.Sequential([keras.Input((6, 4), batch_size=8), *layers])
    model.compile(tf_echo.EchoOptimizer("sgd", exclude=("a",)), "mse")
    model.fit(x, np.zeros((8, 6, 8)), batch_size=8, verbose=0)
    first, second = model.optimizer.plan.loops
    assert (first.reason, first.recompute, first.in_order) == ("excluded", False, False)
    assert (second.recompute, second.in_order) == (True, True)


def test_a_pattern_that_matches_nothing_is_an_error():
    with pytest.raises(
        ValueError, match=r"Received: exclude='decoder/\*'.*Layers of this step: a, b, c"
    ):
        _fit(_stack(), exclude=("a", "decoder/*"))


@pytest.mark.parametrize("exclude", [3, [3], {"a": 1}, [""]])
def test_patterns_must_be_strings(exclude):
    with pytest.raises(TypeError, match="`exclude` must be a sequence of patterns"):
        tf_echo.EchoOptimizer("sgd", exclude=exclude)


def test_patterns_survive_serialization():
    optimizer = tf_echo.EchoOptimizer("sgd", exclude="a*")
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(optimizer))
    assert again.get_config()["exclude"] == ["a*"]


def test_explain_excludes_what_the_optimizer_excludes_or_what_it_is_told():
    model = _stack()
    model.compile(tf_echo.EchoOptimizer("sgd", exclude=("*",)), "mse")
    x, y = small.one_batch()
    assert not tf_echo.explain(model, x, y).recomputed
    assert tf_echo.explain(model, x, y, exclude=()).recomputed


def test_only_included_layers_are_touched_and_of_these_not_the_excluded():
    found = _recomputed(_fit(_stack(), include=("a", "b")))
    assert {"a", "b"} <= found
    assert "c" not in found
    found = _recomputed(_fit(_stack(), include=("a", "b"), exclude=("a",)))
    assert "b" in found
    assert found.isdisjoint(("a", "c"))


def test_a_loop_that_is_not_included_is_left_alone():
    recurrent = keras.layers.LSTM(16, recurrent_dropout=0.2, name="recurrent")
    model = keras.Sequential(
        [keras.Input((8, 32)), keras.layers.Dense(64, "gelu", name="wide"), recurrent]
    )
    model.compile(tf_echo.EchoOptimizer("sgd", include=("wide",)), "mse", jit_compile=False)
    model.fit(np.ones((64, 8, 32)), np.ones((64, 16)), batch_size=64, verbose=0)
    (loop,) = model.optimizer.plan.loops
    assert (loop.recompute, loop.in_order, loop.reason) == (False, False, "not included")


def test_a_pattern_to_include_that_matches_nothing_is_an_error():
    with pytest.raises(ValueError, match=r"in `include` must match.*include='z', which matches"):
        _fit(_stack(), include=("z",))

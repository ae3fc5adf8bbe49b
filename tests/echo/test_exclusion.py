"""Layers that a user excludes, or does not include, are never recomputed."""

import keras
import numpy as np
import pytest

import tf_echo
from tests.echo import loop_models, small
from tf_echo import exclusion
from tf_echo.graph_view import parse_view
from tf_echo.plan import LoopPlan

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


def test_what_is_not_included_or_is_excluded_is_left_alone():
    view = parse_view("""
        m_1/a_1/x = Placeholder
        m_1/b_1/y = Tanh m_1/a_1/x
        m_1/c_1/z = Tanh m_1/b_1/y
        backward:
        m_1/a_1/dz = TanhGrad m_1/c_1/z m_1/b_1/y
    """)
    assert exclusion.excluded_nodes(view, [], []) == set()
    assert exclusion.excluded_nodes(view, [], ["b"]) == {0, 2}
    assert exclusion.excluded_nodes(view, ["b"], ["b", "c"]) == {0, 1}
    assert exclusion.excluded_nodes(view, ["a"], ["m"]) == {0}


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


def test_a_pattern_may_include_several_layers():
    found = _recomputed(_fit(_stack(), include="[ab]"))
    assert found & set("abc") == {"a", "b"}


def test_including_everything_changes_nothing():
    model = _stack()
    model.compile("sgd", "mse")
    plans = [tf_echo.explain(model, *small.one_batch(), include=i) for i in ((), ("*",))]
    assert plans[0].recomputed
    assert plans[0].decisions == plans[1].decisions


def _two_loops(**arguments) -> list[LoopPlan]:
    """The plans of layers "a" and "b"."""
    layers = [
        keras.layers.LSTM(8, name=n, return_sequences=True, recurrent_dropout=0.1) for n in "ab"
    ]
    model = keras.Sequential([keras.Input((6, 4), batch_size=8), *layers])
    model.compile(tf_echo.EchoOptimizer("sgd", **arguments), "mse")
    x = np.zeros((8, 6, 4), "float32")
    model.fit(x, np.zeros((8, 6, 8)), batch_size=8, verbose=0)
    return list(model.optimizer.plan.loops)


LOOPS_LEFT_ALONE = {
    "excluded": {"exclude": ("a",)},
    "not included": {"include": ("b",)},
}


@pytest.mark.parametrize(("reason", "arguments"), LOOPS_LEFT_ALONE.items(), ids=LOOPS_LEFT_ALONE)
def test_a_loop_is_left_alone_if_it_is(reason, arguments):
    first, second = _two_loops(**arguments)
    assert (first.reason, first.recompute, first.in_order) == (reason, False, False)
    assert not first.recomputed
    assert (second.recompute, second.in_order) == (True, True)


def test_of_a_loop_only_the_layer_that_is_included_is_recomputed():
    x = np.zeros((64, 10, 8), "float32")
    inputs = keras.Input((10, 8)), keras.Input((5, 12))
    outputs = loop_models.AttentionDecoder(12, name="decoder")(*inputs)
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    batch = (x, np.zeros((64, 5, 12), "float32")), np.zeros((64, 10, 12), "float32")
    (whole,) = tf_echo.explain(model, *batch, include=("decoder",)).loops
    (part,) = tf_echo.explain(model, *batch, include=("gru_cell",)).loops
    assert whole.recompute
    assert {n for d in part.recomputed for n in d.nodes if "gru_cell" not in n} == set()
    assert {n for d in whole.recomputed for n in d.nodes if "gru_cell" not in n}
    assert part.reason != "not included"


def test_a_pattern_that_matches_nothing_is_an_error():
    with pytest.raises(
        ValueError, match=r"Received: exclude='decoder/\*'.*Layers of this step: a, b, c"
    ):
        _fit(_stack(), exclude=("a", "decoder/*"))


def test_a_pattern_that_matches_only_the_backward_pass_is_an_error():
    with pytest.raises(ValueError, match="include='gradient_tape'"):
        _fit(_stack(), include=("gradient_tape",))


@pytest.mark.parametrize("argument", ["exclude", "include"])
@pytest.mark.parametrize("patterns", [3, [3], {"a": 1}, [""]])
def test_patterns_must_be_strings(argument, patterns):
    with pytest.raises(TypeError, match=f"`{argument}` must be a sequence of patterns"):
        tf_echo.EchoOptimizer("sgd", **{argument: patterns})


@pytest.mark.parametrize("argument", ["exclude", "include"])
def test_patterns_survive_serialization(argument):
    optimizer = tf_echo.EchoOptimizer("sgd", **{argument: "a*"})
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(optimizer))
    for copy in (again, tf_echo.EchoOptimizer.from_config(optimizer.get_config())):
        assert copy.get_config()[argument] == ["a*"]
        assert copy.get_config() == optimizer.get_config()


def test_a_model_that_is_saved_includes_what_it_did(tmp_path):
    _fit(_stack(), include=("b",)).save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    small.fit(again)
    assert _recomputed(again) & set("abc") == {"b"}


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


def test_a_loop_is_left_alone_if_only_a_layer_outside_is_included():
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


def test_explain_includes_what_the_optimizer_includes_or_what_it_is_told():
    model = _stack()
    model.compile(tf_echo.EchoOptimizer("sgd", include=("b",)), "mse")

    def layers(**told) -> set[str]:
        plan = tf_echo.explain(model, *small.one_batch(), **told)
        names = [name for d in plan.recomputed for name in d.nodes]
        return {part for name in names for part in exclusion.layers_of(name)} & set("abc")

    assert layers() == {"b"}
    assert layers(include=("a",)) == {"a"}
    assert {"a", "b"} <= layers(include=())


def _replayed(*without: str) -> list[str]:
    model = small.compiled(tf_echo.EchoOptimizer("sgd", without=without))
    plan = tf_echo.explain(model, *small.one_batch())
    return [name for decision in plan.recomputed for name in decision.nodes]


def test_without_looking_past_heavy_ops_what_their_gradients_read_is_kept():
    assert any("SelectV2" in name for name in _replayed())
    kept = _replayed("heavy")
    assert kept
    assert not any("SelectV2" in name for name in kept)


def test_masks_need_not_be_drawn_again():
    assert any("StatelessRandom" in name for name in _replayed("bits"))
    assert not any("StatelessRandom" in name for name in _replayed("bits", "masks"))

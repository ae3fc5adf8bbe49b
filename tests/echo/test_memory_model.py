"""Exact bytes of small steps."""

import dataclasses

import pytest

from tf_echo.graph_view import parse_view
from tf_echo.memory_model import simulate


def peak_kib(text: str, scale: float = 1.0, weight_bytes: int = 0) -> float:
    return simulate(parse_view(text, weight_bytes), scale).peak_bytes / 1024


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("inputs are resident", "x = Placeholder [4KiB]\ny = MatMul x x [1KiB]", 5),
        ("constants are resident", "c = Const [4KiB fixed]\ny = MatMul c c [1KiB]", 5),
        (
            "a tensor dies with its last reader",
            "x = Placeholder [1KiB]\na = MatMul x x [8KiB]\n"
            "b = MatMul a x [1KiB]\nc = MatMul b x [8KiB]",
            1 + 9,
        ),
        (
            "an elementwise op writes over an input that dies",
            "x = Placeholder [1KiB]\na = MatMul x x [8KiB]\nb = Exp a [8KiB]\nc = Exp b [8KiB]",
            1 + 8,
        ),
        (
            "but not over one that somebody else reads",
            "x = Placeholder [1KiB]\na = MatMul x x [8KiB]\nb = Exp a [8KiB]\nc = Mul b a [8KiB]",
            1 + 16,
        ),
        (
            "nor over its own second reading",
            "x = Placeholder [1KiB]\na = MatMul x x [8KiB]\nb = Mul a a [8KiB]",
            1 + 16,
        ),
        (
            "nor over one of another dtype",
            "x = Placeholder [1KiB]\na = MatMul x x [8KiB int32]\nb = Exp a [8KiB]",
            1 + 16,
        ),
        (
            "views share memory and keep it alive",
            "x = Placeholder [1KiB]\na = MatMul x x [8KiB]\nv = Reshape a x [8KiB]\n"
            "b = Exp a [8KiB]\nc = MatMul b v [1KiB]",
            1 + 17,
        ),
        (
            "a loss writes the gradient over its logits",
            "x = Placeholder [1KiB]\na = MatMul x x [8KiB]\n"
            "b = SparseSoftmaxCrossEntropyWithLogits a x [1KiB, 8KiB]\nc = Mul b:1 b:1 [8KiB]",
            1 + 8 + 8,
        ),
        (
            "a loop replaces the items of a list that nobody else reads",
            "x = Placeholder [1KiB]\nl = ZerosLike x [8KiB variant]\nn = Neg x [1KiB]\n"
            "w = While n l [1KiB, 8KiB variant]",
            1 + 1 + 1 + 8,
        ),
        (
            "but not those of a list that is read once more",
            "x = Placeholder [1KiB]\nl = ZerosLike x [8KiB variant]\nn = Neg x [1KiB]\n"
            "w = While n l [1KiB, 8KiB variant]\nm = While w l [1KiB, 8KiB variant]",
            1 + 1 + 1 + 8 + 8,
        ),
        (
            "nor in the place of another list",
            "x = Placeholder [1KiB]\nl = ZerosLike x [8KiB variant]\nn = Neg x [1KiB]\n"
            "w = While n l [8KiB variant, 1KiB]",
            1 + 1 + 1 + 8 + 8,
        ),
        (
            "nor do other functions",
            "x = Placeholder [1KiB]\nl = ZerosLike x [8KiB variant]\nn = Neg x [1KiB]\n"
            "w = If n l [1KiB, 8KiB variant]",
            1 + 1 + 1 + 8 + 8,
        ),
        (
            "all terms of a sum are there at once",
            "x = Placeholder [1KiB]\n"
            + "\n".join(f"m{i} = MatMul x x [4KiB]" for i in range(5))
            + "\ns = AddN m0 m1 m2 m3 m4 [4KiB]",
            1 + 20,
        ),
    ],
)
def test_peak(name, text, expected):
    assert peak_kib(text) == expected


def test_weights_are_resident_and_reads_of_them_are_free():
    text = """
        w = VarHandleOp [0B resource fixed]
        r = ReadVariableOp w [8KiB fixed]
        y = MatMul r r [1KiB]
    """
    assert peak_kib(text, weight_bytes=8 * 1024) == 9


def test_an_update_copies_a_variable_that_is_still_being_read():
    text = """
        w = VarHandleOp [0B resource fixed]
        r = ReadVariableOp w [8KiB fixed]
        loss = MatMul r r [1KiB]
        backward:
        g = MatMul loss loss [8KiB fixed]
        u = AssignSubVariableOp w g []
        late = MatMul r loss ^u [1KiB]
    """
    assert peak_kib(text) == 1 + 8 + 8
    assert peak_kib(text.replace("late = MatMul r loss ^u", "late = MatMul loss loss ^u")) == 1 + 8


def test_only_what_grows_with_the_batch_is_scaled():
    text = "x = Placeholder [1KiB]\na = MatMul x x [2KiB fixed]\nb = MatMul x a [4KiB]"
    assert peak_kib(text, scale=3.0) == 3 * 1 + 2 + 3 * 4


def test_the_timeline_names_what_is_live_at_the_peak():
    view = parse_view(
        "x = Placeholder [1KiB]\na = MatMul x x [8KiB]\n"
        "b = MatMul a x [2KiB]\nc = MatMul b x [1KiB]"
    )
    timeline = simulate(view)
    live = [view.tensor_name(t) for t in timeline.live_at(timeline.peak_step)]
    assert live == ["a", "b"]
    assert max(timeline.usage) == 10 * 1024
    assert timeline.resident_bytes == 1024


def test_of_what_is_ready_the_deepest_runs_first_then_what_was_created_first():
    view = parse_view("""
        x = Placeholder [1KiB]
        c1 = Exp x [1KiB]
        c2 = Exp c1 [1KiB]
        s = MatMul x x [1KiB]
        flat1 = MatMul s s [1KiB]
        flat2 = MatMul s s [1KiB]
        deep = Mul s c2 [1KiB]
    """)
    ran = [view.nodes[number].name for number in simulate(view).order]
    assert ran == ["x", "c1", "c2", "s", "deep", "flat1", "flat2"]


def test_a_view_may_be_in_another_order_than_its_operations_were_created_in():
    view = parse_view("""
        x = Placeholder [1KiB]
        first = Exp x [1KiB]
        second = Exp x [1KiB]
    """)
    created = {"first": 2, "second": 1}
    nodes = tuple(node._replace(created=created.get(node.name, 0)) for node in view.nodes)
    timeline = simulate(dataclasses.replace(view, nodes=nodes))
    assert [view.nodes[number].name for number in timeline.order] == ["x", "second", "first"]


def test_a_gradient_that_nothing_else_needs_is_put_off():
    view = parse_view("""
        x = Placeholder [1KiB]
        loss = MatMul x x [4B]
        backward:
        g = Mul loss x [1KiB]
        db = BiasAddGrad g [4B]
        dw = MatMul g x [4B]
        dx = MatMul g x [1KiB]
        dx2 = MatMul dx x [1KiB]
        dx3 = MatMul dx2 x [1KiB]
    """)
    ran = [view.nodes[number].name for number in simulate(view).order]
    assert ran == ["x", "loss", "g", "dx", "dx2", "dx3", "db", "dw"]

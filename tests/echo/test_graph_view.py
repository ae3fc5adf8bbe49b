"""Views as text, and what makes one consistent."""

import dataclasses

import pytest

from tf_echo.graph_view import parse_view

TEXT = """
w = VarHandleOp [0B resource fixed]
r = ReadVariableOp w [4KiB fixed]
x = Placeholder [1MiB]
h = MatMul x r [1MiB]
s = Split h [512KiB, 512KiB]
m = Greater s s:1 [128KiB bool]
u = NoSuchOp m ^s [?]
loss = Mean s:1 [4B fixed]
backward:
d = Neg loss ^h [1MiB float16]
loss: loss
""".strip()


def test_text_round_trip():
    view = parse_view(TEXT)
    assert str(view) == TEXT
    assert parse_view(str(view)) == view


def test_sizes_dtypes_and_flags_are_read():
    view = parse_view(TEXT)
    mask, unknown = (view.tensors[view.node(n).outputs[0]] for n in ("m", "u"))
    assert (mask.nbytes, mask.dtype, mask.scales, mask.known) == (128 * 1024, "bool", True, True)
    assert not unknown.known
    assert not view.tensors[view.node("r").outputs[0]].scales


def test_views_of_a_tensor_share_its_buffer():
    view = parse_view("""
        x = Placeholder [1KiB]
        y = Exp x [1KiB]
        a = Reshape y x [1KiB]
        b = Identity a [1KiB]
    """)
    y, a, b = (view.node(n).outputs[0] for n in "yab")
    assert view.buffers[a] == view.buffers[b] == y


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x Placeholder", "A node must read like"),
        ("x = Exp y [1KiB]", "Nothing above is called"),
        ("x = Placeholder [1KiB]\ny = Exp x:1 [1KiB]", "Nothing above is called"),
        ("x = Placeholder [one]", "A size must read like"),
        ("backward:\nx = Placeholder [1KiB]", "at least one forward node"),
    ],
)
def test_text_that_cannot_be_read_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_view(text)


def test_verify_refuses_a_node_before_what_it_needs():
    view = parse_view(TEXT)
    early = dataclasses.replace(
        view, nodes=(view.nodes[0]._replace(control_inputs=(3,)), *view.nodes[1:])
    )
    with pytest.raises(ValueError, match="comes before something that it needs"):
        early.verify()


def test_verify_refuses_a_forward_node_that_needs_a_backward_node():
    view = parse_view(TEXT)
    last = view.nodes[-1]._replace(backward=False)
    middle = view.nodes[-2]._replace(backward=True)
    with pytest.raises(ValueError, match="needs a backward node"):
        dataclasses.replace(view, nodes=(*view.nodes[:-2], middle, last)).verify()


def test_verify_refuses_two_nodes_of_one_name():
    view = parse_view(TEXT)
    twin = view.nodes[1]._replace(name=view.nodes[0].name)
    with pytest.raises(ValueError, match="Two nodes are called"):
        dataclasses.replace(view, nodes=(view.nodes[0], twin, *view.nodes[2:])).verify()

"""What CPU kernels need while they run."""

import os
import subprocess
import sys

import pytest
import tensorflow as tf

from tf_echo.graph_view import parse_view
from tf_echo.memory_model import simulate
from tf_echo.workspaces import Shape, workspace

MIB = 2**20


def _measured(function, *inputs: tf.Tensor) -> int:
    """Bytes that the allocator hands out while a function runs, less its result."""
    traced = tf.function(function)
    needed = []
    for _ in range(3):
        traced(*inputs)
        tf.config.experimental.reset_memory_stats("CPU:0")
        before = tf.config.experimental.get_memory_info("CPU:0")["current"]
        result = traced(*inputs)
        peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
        needed.append(peak - before - result.shape.num_elements() * result.dtype.size)
    return min(needed)


def _measured_gradient(
    kind: str, images: Shape, kernel: Shape, strides: Shape
) -> tuple[int, Shape]:
    """The same of a gradient of a convolution, and the shape of the gradients that it reads."""
    x, w = tf.ones(images), tf.ones(kernel)
    settings = {"strides": [1, *strides, 1], "padding": "SAME"}
    dy = tf.raw_ops.Conv2D(input=x, filter=w, **settings)

    def gradient(x, w, dy):
        if kind == "Filter":
            return tf.raw_ops.Conv2DBackpropFilter(
                input=x, filter_sizes=w.shape, out_backprop=dy, **settings
            )
        return tf.raw_ops.Conv2DBackpropInput(
            input_sizes=x.shape, filter=w, out_backprop=dy, **settings
        )

    return _measured(gradient, x, w, dy), tuple(dy.shape)


@pytest.mark.parametrize(
    ("images", "kernel", "strides"),
    [
        ((32, 24, 24, 64), (3, 3, 64, 64), (1, 1)),
        ((16, 200, 80, 1), (11, 21, 1, 32), (2, 2)),
        ((32, 24, 24, 64), (1, 1, 64, 256), (1, 1)),
        ((64, 32, 32, 8), (3, 3, 8, 8), (1, 1)),
    ],
)
@pytest.mark.parametrize("kind", ["Filter", "Input"])
def test_gradients_of_convolutions_unfold_images(images, kernel, strides, kind):
    measured, gradients = _measured_gradient(kind, images, kernel, strides)
    if kind == "Filter":
        inputs, made = [images, (4,), gradients], kernel
    else:
        inputs, made = [(4,), kernel, gradients], images
    # The tests give TensorFlow one thread.
    expected = workspace(f"Conv2DBackprop{kind}", inputs, [made], threads=1).total
    if kind == "Input" and measured < MIB:
        return  # done without unfolding
    # The allocator may hand out up to twice what is asked for.
    assert expected <= measured + MIB
    assert measured <= 2 * expected + 8 * MIB


@pytest.mark.parametrize("on", [False, True])
def test_onednn_unfolds_no_images(on):
    """By default it depends on the processor whether oneDNN is on, so a process of its own says."""
    code = """
from tests.echo.test_workspaces import MIB, _measured_gradient
from tf_echo import tf_internals
measured, _ = _measured_gradient("Filter", (32, 24, 24, 64), (3, 3, 64, 64), (1, 1))
print("found", tf_internals.uses_onednn(), measured < MIB)
"""
    environment = {**os.environ, "TF_ENABLE_ONEDNN_OPTS": str(int(on))}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert f"found {on} {on}" in done.stdout


@pytest.mark.parametrize(("kind", "first"), [("Filter", (8, 16, 16, 4)), ("Input", (4,))])
def test_gradients_of_convolutions_need_nothing_under_onednn(kind, first):
    second = (4,) if kind == "Filter" else (3, 3, 4, 4)
    arguments = f"Conv2DBackprop{kind}", [first, second, (8, 16, 16, 4)]
    assert workspace(*arguments, [(3, 3, 4, 4)], threads=1).total > 0
    assert workspace(*arguments, [(3, 3, 4, 4)], threads=1, onednn=True).total == 0


def test_pooling_gradients_find_the_largest_again():
    x = tf.random.normal((32, 48, 48, 16))
    settings = {"ksize": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "padding": "VALID"}
    y = tf.raw_ops.MaxPool(input=x, **settings)
    expected = workspace("MaxPoolGrad", [x.shape, y.shape, y.shape], [x.shape], threads=1).total

    def gradient(x, y):
        return tf.raw_ops.MaxPoolGrad(orig_input=x, orig_output=y, grad=y, **settings)

    assert expected <= _measured(gradient, x, y) <= 2 * expected + MIB


EINSUMS = {
    "as it is": ("ab,bc->ac", (256, 512), (512, 256)),
    "batches": ("xab,xbc->xac", (4, 256, 256), (4, 256, 256)),
    "swapped": ("ba,cb->ac", (512, 256), (256, 512)),
    "turned result": ("ab,bc->ca", (256, 512), (512, 256)),
    "attention": ("abcd,aecd->aceb", (8, 64, 4, 64), (8, 96, 4, 64)),
    "values": ("acbe,aecd->abcd", (8, 4, 64, 96), (8, 96, 4, 64)),
    "projection": ("btw,whd->bthd", (8, 64, 128), (128, 4, 64)),
    "its gradient": ("btw,bthd->whd", (8, 64, 128), (8, 64, 4, 64)),
    "experts": ("btef,efw->btew", (8, 64, 4, 128), (4, 128, 128)),
    "ellipsis": ("...ab,...bc->...ac", (4, 256, 256), (4, 256, 256)),
    "broadcast": ("...ab,bc->...ca", (4, 256, 256), (256, 256)),
    "summed": ("abx,bc->ac", (256, 256, 8), (256, 512)),
    "outer": ("a,b->ba", (512,), (512,)),
    "transposed": ("abc->cab", (64, 64, 64), None),
    "sum": ("abc->a", (64, 64, 64), None),
}


@pytest.mark.parametrize(("equation", "first", "second"), EINSUMS.values(), ids=EINSUMS)
def test_an_einsum_transposes_what_is_in_another_order(equation, first, second):
    shapes = [first] if second is None else [first, second]
    inputs = [tf.ones(shape) for shape in shapes]

    def product(*values):
        return tf.raw_ops.Einsum(inputs=values, equation=equation)

    result = product(*inputs).shape
    expected = workspace("Einsum", shapes, [result], threads=1, equation=equation).total
    measured = _measured(product, *inputs)
    assert expected <= measured + MIB // 16
    assert measured <= 2 * expected + MIB // 16


def test_an_einsum_of_halves_needs_half():
    arguments = "Einsum", [(8, 4), (4, 2)], [(2, 8)], 1
    whole, half = (
        workspace(*arguments, equation="ab,bc->ca", width=width).total for width in (4, 2)
    )
    assert whole == 2 * half == 64


@pytest.mark.parametrize(
    ("op", "inputs"), [("MatMul", [(4, 4), (4, 4)]), ("MaxPoolGrad", [(1, 8, 8, 1), None, None])]
)
def test_ops_without_a_rule_and_unknown_shapes_count_nothing(op, inputs):
    assert workspace(op, inputs, [(4, 4)], threads=2) == (0, 0)


def test_a_view_tells_what_a_node_needs_and_the_peak_holds_it():
    text = """
        x = Placeholder [1MiB]
        h = Conv2D x [2MiB] +1MiB +2MiB fixed
        loss = Mean h [4B]
    """
    view = parse_view(text)
    assert view.node("h").workspace == (MIB, 2 * MIB)
    assert str(parse_view(str(view))) == str(view)
    assert simulate(view).peak_bytes == 6 * MIB
    assert simulate(view, 2.0).peak_bytes == 10 * MIB

"""Memory that TensorFlow's CPU kernels need while they run, besides their inputs and outputs.

Most need none. The gradients of a convolution unfold images into columns, of as many images at once
as about fill the processor's cache, but not oneDNN's; the gradient of max pooling finds the largest
values again.
"""

import math
from collections.abc import Callable, Sequence

from tf_echo.graph_view import NOTHING, Amount

Shape = tuple[int, ...]

_CACHE_ELEMENTS = (30 << 20) // 4
"""What the kernels of convolutions take for the size of the cache, in elements."""
_THREAD_ELEMENTS = (256 << 10) // 4
"""The share of one thread from which a convolution's gradient handles one image after the other."""


def workspace(
    op: str,
    inputs: Sequence[Shape | None],
    outputs: Sequence[Shape | None],
    threads: int,
    onednn: bool = False,
) -> Amount:
    """Bytes that an op needs while it runs.

    Args:
        op: its type.
        inputs: shapes of its inputs; None where unknown.
        outputs: shapes of its outputs.
        threads: how many threads one op may use.
        onednn: whether convolutions are oneDNN's.
    """
    rule = _RULES.get(op)
    if rule is None or None in (*inputs, *outputs) or (onednn and op in _ONEDNN):
        return NOTHING
    known = [shape for shape in (*inputs, *outputs) if shape is not None]
    return rule(known, threads)


def _filter_gradient(shapes: Sequence[Shape], threads: int) -> Amount:
    """Reads images, the filter's shape and gradients; makes a filter."""
    _, _, gradients, weights = shapes
    columns, work = _unfolded(gradients, weights)
    return Amount(0, 4 * columns * _rounded_up(_CACHE_ELEMENTS, work))


def _input_gradient(shapes: Sequence[Shape], threads: int) -> Amount:
    """Reads the images' shape, a filter and gradients; makes images."""
    _, weights, gradients, images = shapes
    columns, work = _unfolded(gradients, weights)
    one_by_one = images[0] == 1 or work // threads >= _THREAD_ELEMENTS
    return Amount(0, 4 * columns * (1 if one_by_one else _rounded_up(_CACHE_ELEMENTS, work)))


def _unfolded(gradients: Shape, weights: Shape) -> tuple[int, int]:
    """Elements of one image's columns, and of all that its product with the filter needs."""
    places, channels = math.prod(gradients[1:-1]), gradients[-1]
    patch = math.prod(weights[:-1])
    columns = places * patch
    return columns, max(columns + places * channels + patch * channels, 1)


def _rounded_up(over: int, under: int) -> int:
    return -(-over // under)


def _pooling_gradient(shapes: Sequence[Shape], threads: int) -> Amount:
    """Makes the pooled values again, and the place of each as a 64-bit number."""
    return Amount((4 + 8) * math.prod(shapes[1]), 0)


_ONEDNN = ("Conv2DBackpropFilter", "Conv2DBackpropInput")
"""Ops that need nothing where oneDNN has the kernel."""

_RULES: dict[str, Callable[[Sequence[Shape], int], Amount]] = {
    "Conv2DBackpropFilter": _filter_gradient,
    "Conv2DBackpropInput": _input_gradient,
    "MaxPoolGrad": _pooling_gradient,
}

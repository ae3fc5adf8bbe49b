"""Memory that TensorFlow's CPU kernels need while they run, besides their inputs and outputs.

Most need none. The gradients of a convolution unfold images into columns, of as many images at once
as about fill the processor's cache, but not oneDNN's; the gradient of max pooling finds the largest
values again; an Einsum is a product of matrices, for which it may transpose its inputs and result.
"""

import itertools
import math
from collections import Counter
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
    equation: str = "",
    width: int = 4,
) -> Amount:
    """Bytes that an op needs while it runs.

    Args:
        op: its type.
        inputs: shapes of its inputs; None where unknown.
        outputs: shapes of its outputs.
        threads: how many threads one op may use.
        onednn: whether convolutions are oneDNN's.
        equation: of an Einsum.
        width: bytes of an element of an Einsum's result.
    """
    if op == "Einsum" and None not in (*inputs, *outputs):
        shapes = [shape for shape in inputs if shape is not None]
        return Amount(width * _transposed(equation, shapes), 0)
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


def _transposed(equation: str, shapes: Sequence[Shape]) -> int:
    """Elements of the copies that an Einsum makes: of an input whose dimensions are not in the
    order of the product (those that broadcast, batch, free, contracted), nor in that with the last
    two kinds swapped; of what is left of an input when dimensions of its own are summed up; and of
    the product where the result has another order.
    """
    left, _, result = equation.replace(" ", "").partition("->")
    terms = [_labels(term, len(shape)) for term, shape in zip(left.split(","), shapes, strict=True)]
    hidden = -min(label for term in [*terms, [0]] for label in term)
    made = _labels(result, len(result.replace("...", "")) + hidden)
    named = list(dict.fromkeys(label for term in terms for label in term))
    seen = Counter(label for term in terms for label in set(term))

    def order(label: int) -> tuple[int, int]:
        kind = 2 * (label not in made) + (seen[label] == 1)
        # Batch, free, contracted, of one input alone.
        return (-1 if label < 0 else kind), named.index(label)

    def swapped(label: int) -> tuple[int, int]:
        kind, place = order(label)
        return {1: 2, 2: 1}.get(kind, kind), place

    sides = zip(itertools.chain(*terms), itertools.chain(*shapes), strict=True)
    sizes: dict[int, int] = {}
    for label, side in sides:
        sizes[label] = max(side, sizes.get(label, 1))
    total = 0
    for term, shape in zip(terms, shapes, strict=True):
        rest = [label for label in term if order(label)[0] < 3]
        if len(rest) < len(term):
            total += math.prod(sizes[label] for label in rest)
        elif sorted(term, key=order) != term and sorted(term, key=swapped) != term:
            total += math.prod(shape)
    if len(terms) == 1:
        return total
    product = sorted((n for n in named if n in made and order(n)[0] < 1), key=order)
    product += [n for term in terms for n in sorted(term, key=order) if order(n)[0] == 1]
    return total + (math.prod(sizes[n] for n in made) if product != made else 0)


def _labels(term: str, rank: int) -> list[int]:
    """A number for each dimension of a term, negative for those of an ellipsis."""
    before, _, after = term.partition("...")
    hidden = rank - len(before) - len(after)
    return [*map(ord, before), *range(-hidden, 0), *map(ord, after)]


_ONEDNN = ("Conv2DBackpropFilter", "Conv2DBackpropInput")
"""Ops that need nothing where oneDNN has the kernel."""

_RULES: dict[str, Callable[[Sequence[Shape], int], Amount]] = {
    "Conv2DBackpropFilter": _filter_gradient,
    "Conv2DBackpropInput": _input_gradient,
    "MaxPoolGrad": _pooling_gradient,
}

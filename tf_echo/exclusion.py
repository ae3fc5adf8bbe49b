"""Layers that the user wants left alone, and those that alone may be touched, by patterns of their
names.

A node's name is the path of name scopes in which Keras called the layers, such as
`functional_1/decoder_1/dense_2/MatMul`. TensorFlow appends a number to each scope, which is not
part of the layer's name.
"""

import fnmatch
import functools
import itertools
import re
from collections.abc import Iterable, Sequence

from tf_echo.graph_view import GraphView, Loop

_NUMBER = re.compile(r"_\d+$")
_LISTED = 20


class UnmatchedPatternError(ValueError):
    """A pattern that no layer of the step matches."""


def excluded_nodes(
    view: GraphView, exclude: Sequence[str], include: Sequence[str] = ()
) -> frozenset[int]:
    """Ids of the forward nodes in layers that are left alone.

    Args:
        view: the step.
        exclude: patterns of layers to be left alone.
        include: if there are any, patterns of the layers that alone may be touched.
    """
    if not exclude and not include:
        return frozenset()
    return frozenset(
        node.id
        for node in view.nodes
        if not node.backward
        and (matches(node.name, exclude) or (include and not matches(node.name, include)))
    )


def untouched_loop(name: str, loop: Loop, exclude: Sequence[str], include: Sequence[str]) -> str:
    """Why a loop is left alone with all in it, or nothing."""
    if matches(name, exclude):
        return "excluded"
    if include and not any(matches(n, include) for n in _forward_names(loop.body)):
        return "not included"
    return ""


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether any pattern matches the name, or any run of whole parts of it."""
    return any(_matches_one(name, pattern) for pattern in patterns)


@functools.lru_cache(maxsize=1 << 16)
def _matches_one(name: str, pattern: str) -> bool:
    parts = layers_of(name)
    return any(
        fnmatch.fnmatchcase("/".join(parts[start:end]), pattern)
        for start in range(len(parts))
        for end in range(start + 1, len(parts) + 1)
    )


def layers_of(name: str) -> list[str]:
    """The names of the layers in whose scopes a node was made, outermost first, and its own."""
    return [_NUMBER.sub("", part) for part in name.split("/")]


def _layers_in(name: str) -> list[str]:
    """The same without the model and without scopes of ops, which begin with a capital."""
    inside = layers_of(name)[1:-1]
    return list(itertools.takewhile(lambda part: not part[:1].isupper(), inside))


def check(view: GraphView, patterns: Iterable[str], argument: str = "exclude") -> None:
    """Raises `UnmatchedPatternError` for a pattern that matches nothing in a step."""
    names = _forward_names(view)
    for pattern in patterns:
        if not any(_matches_one(name, pattern) for name in names):
            known = list(dict.fromkeys(part for name in names for part in _layers_in(name)))
            listed = ", ".join(known[:_LISTED]) + (", ..." if len(known) > _LISTED else "")
            raise UnmatchedPatternError(
                f"Each pattern in `{argument}` must match the name of a layer of the model, or the "
                "names of nested layers joined by '/'. Received: "
                f"{argument}={pattern!r}, which matches nothing. Layers of this step: {listed}"
            )


def _forward_names(view: GraphView) -> list[str]:
    names = [node.name for node in view.nodes if not node.backward]
    for loop in view.loops:
        names += _forward_names(loop.body)
    return names

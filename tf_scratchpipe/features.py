"""Which layer reads which feature, as told by the user or as seen in a functional model.

A model is followed from its inputs down, through whatever hands ids on unchanged: casts between
integers, slices, reshapes, nested models. Whatever else reads a feature would read codes in the
place of ids and is refused. In a subclassed model nobody can see who else reads a feature.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np
import numpy.typing as npt

from tf_scratchpipe import keras_internals
from tf_scratchpipe.embedding import ScratchPipeEmbedding
from tf_scratchpipe.masks import Unmasked

Path: TypeAlias = tuple[str | int, ...]
"""Keys that lead from the inputs of a model to one of them; empty if that is all there is."""

Keys: TypeAlias = tuple[Any, ...]
"""Keys of the slices, one after the other, that lead from a feature to the ids that a layer
reads."""


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """One layer reads one feature.

    Args:
        path: The feature.
        layer: The layer.
        keys: The slices of the feature that it reads.
        input_name: Name of the model's input, if it was seen.
    """

    path: Path
    layer: ScratchPipeEmbedding
    keys: Keys = ()
    input_name: str | None = None

    @property
    def select(self) -> Callable[[npt.NDArray[np.generic]], npt.NDArray[np.generic]]:
        """From the feature's array to the view that the layer reads."""
        return lambda array: _sliced(array, self.keys)


def told(layers: Any) -> list[Reading]:
    """Readings from `{feature: layer}`, `{feature: [layer, ...]}` or a single layer.

    Raises:
        TypeError: It is something else.
        ValueError: In the functional model around a layer, something else reads its feature.
    """
    if isinstance(layers, ScratchPipeEmbedding):
        layers = {(): layers}
    if not isinstance(layers, Mapping) or not layers:
        raise TypeError(
            "`lookahead` needs a model, or a mapping from features to layers such as "
            f"{{'item_id': items}}. Received: {layers!r}"
        )
    readings = []
    for feature, readers in layers.items():
        path = feature if isinstance(feature, tuple) else (feature,)
        for layer in readers if isinstance(readers, list | tuple) else [readers]:
            if not isinstance(layer, ScratchPipeEmbedding):
                raise TypeError(
                    f"Feature {feature!r} must be mapped to ScratchPipeEmbedding layers. Received: "
                    f"{layer!r}"
                )
            readings.append(Reading(path, layer))
    mapped = [reading.layer for reading in readings]
    for root in {id(root): root for layer in mapped for root in _roots(layer)}.values():
        readers = list(_follow(root, _Seen((), str(root.name)), None))
        # Another layer of ours that is not mapped would read codes too.
        _refuse_others(readers, lambda operation: any(operation is layer for layer in mapped))
    return readings


def found(model: keras.Model) -> list[Reading]:
    """Readings of all ScratchPipeEmbedding layers of a model, traced from its inputs.

    Raises:
        ValueError: A layer cannot be traced, or something else reads its feature.
    """
    layers = [
        layer
        for layer in keras_internals.sublayers(model)
        if isinstance(layer, ScratchPipeEmbedding)
    ]
    if not layers:
        raise ValueError(
            f"Model '{model.name}' has no ScratchPipeEmbedding layer for `lookahead` to serve."
        )
    functional = keras_internals.functional(model)
    if functional is None:
        raise ValueError(_untraceable(model, layers, "its inputs cannot be seen"))
    nodes = keras_internals.model_nodes(functional)
    readers = [
        reader
        for path, tensor in _with_paths(functional.input)
        for reader in _follow(tensor, _Seen(path, str(tensor.name)), nodes)
    ]
    traced = [reader.operation for reader in readers]
    missing = [layer for layer in layers if not any(layer is other for other in traced)]
    if missing:
        names = ", ".join(f"'{layer.name}'" for layer in missing)
        raise ValueError(_untraceable(model, layers, f"layers {names} look computed ids up"))
    _refuse_others(readers, lambda operation: isinstance(operation, ScratchPipeEmbedding))
    return [
        Reading(reader.seen.path, reader.operation, reader.seen.keys, reader.seen.input_name)
        for reader in readers
        if isinstance(reader.operation, ScratchPipeEmbedding)
    ]


# ---- following symbolic tensors ---------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class _Seen:
    """What a symbolic tensor is of the data."""

    path: Path
    input_name: str
    keys: Keys = ()
    reshaped: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class _Reader:
    """Something that reads a feature as it is in the data."""

    operation: Any
    seen: _Seen
    shape: tuple[int | None, ...]
    float_dtype: str | None


class _Weights:
    """What a layer reads beside its ids."""

    def __init__(self, layer: ScratchPipeEmbedding) -> None:
        self.name = f"weights of {layer.name}"


def _follow(
    tensor: Any, seen: _Seen, nodes: set[int] | None, root: Any = None, floats: str | None = None
) -> Iterator[_Reader]:
    """All readers of a symbolic tensor, through what hands it on.

    Args:
        tensor: The tensor.
        seen: What it is of the data.
        nodes: Calls to look at; None for all.
        root: The input that it comes from.
        floats: A float dtype that it went through, if any.
    """
    root = tensor if root is None else root
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    floats = floats or (dtype if "float" in dtype else None)
    operation, _ = keras_internals.producer(tensor)
    for node in keras_internals.outbound_nodes(operation):
        positions = [i for i, read in enumerate(node.input_tensors) if read is tensor]
        if not positions or (nodes is not None and id(node) not in nodes):
            continue
        reader = node.operation
        inner = keras_internals.functional(reader) if isinstance(reader, keras.Model) else None
        if inner is not None:
            within = keras_internals.model_nodes(inner)
            for position in positions:
                yield from _follow(inner.inputs[position], seen, within, root, floats)
        elif isinstance(reader, Unmasked):
            continue  # It knows codes.
        elif isinstance(reader, ScratchPipeEmbedding) and 0 not in positions:
            yield _Reader(_Weights(reader), seen, tuple(root.shape), floats)
        elif (passed := _passed_on(node, seen)) is not None:
            for output in node.outputs:
                yield from _follow(output, passed, nodes, root, floats)
        else:
            yield _Reader(reader, seen, tuple(root.shape), floats)


_UNCHANGED = ("Cast", "Identity")
_RESHAPES = ("Reshape", "Squeeze", "ExpandDims", "Flatten")


def _passed_on(node: Any, seen: _Seen) -> _Seen | None:
    """What the output of a call is of the data; None if that is not just ids handed on."""
    kind = type(node.operation).__name__
    if kind in _UNCHANGED:
        return seen
    if kind in _RESHAPES:
        return dataclasses.replace(seen, reshaped=True)
    if kind == "GetItem" and not seen.reshaped:
        key = [*node.arguments.args[1:], *node.arguments.kwargs.values()][0]
        return dataclasses.replace(seen, keys=(*seen.keys, key))
    return None


def _roots(layer: ScratchPipeEmbedding) -> list[Any]:
    """The inputs from which a layer's ids come, in the functional models around it."""
    pending = [node.input_tensors[0] for node in keras_internals.inbound_nodes(layer)]
    roots = []
    while pending:
        tensor = pending.pop()
        operation, number = keras_internals.producer(tensor)
        if isinstance(operation, keras.layers.InputLayer):
            roots.append(tensor)
            continue
        node = keras_internals.inbound_nodes(operation)[number]
        if _passed_on(node, _Seen((), "")) is not None:
            pending.append(node.input_tensors[0])
    return roots


def _with_paths(structure: Any, path: Path = ()) -> list[tuple[Path, Any]]:
    """The leaves of nested inputs with their keys."""
    if isinstance(structure, Mapping):
        pairs: list[tuple[str | int, Any]] = list(structure.items())
    elif isinstance(structure, list | tuple):
        pairs = list(enumerate(structure))
    else:
        return [(path, structure)]
    return [found for key, part in pairs for found in _with_paths(part, (*path, key))]


# ---- refusals ---------------------------------------------------------------------------------


def _refuse_others(readers: Sequence[_Reader], ours: Callable[[Any], bool]) -> None:
    """Raise if codes would be read by anybody who does not know them, or rounded on the way."""
    planned = [reader for reader in readers if ours(reader.operation)]
    for reader in planned:
        if reader.float_dtype is not None:
            name = reader.seen.input_name
            raise ValueError(
                f"Layer '{reader.operation.name}' gets planned ids through dtype "
                f"'{reader.float_dtype}', which would round them. Received: input '{name}'. "
                f'Declare it as keras.Input(..., dtype="int32", name="{name}").'
            )
    for other in readers:
        if ours(other.operation):
            continue
        for reader in planned:
            if reader.seen.input_name == other.seen.input_name and _overlap(reader, other):
                raise ValueError(
                    f"'{other.operation.name}' reads input '{other.seen.input_name}', whose ids "
                    f"`lookahead` replaces by slots for layer '{reader.operation.name}'. Give it "
                    "a copy of the feature under another name, or look all of it up with "
                    "ScratchPipeEmbedding layers that share the feature."
                )


def _overlap(one: _Reader, other: _Reader) -> bool:
    """Whether two slices of a feature have anything in common, as far as shapes tell."""
    if None in one.shape[1:]:
        return True
    shape = (2, *(size or 0 for size in one.shape[1:]))
    marks = np.zeros(shape, bool)
    _sliced(marks, one.seen.keys)[...] = True
    return bool(_sliced(marks, other.seen.keys).any())


def _sliced(array: npt.NDArray[Any], keys: Keys) -> npt.NDArray[Any]:
    for key in keys:
        array = array[key]
    return array


def _untraceable(model: keras.Model, layers: Sequence[ScratchPipeEmbedding], reason: str) -> str:
    mapping = ", ".join(f"'<feature>': model.get_layer('{layer.name}')" for layer in layers)
    return (
        f"`lookahead` cannot tell which features model '{model.name}' looks up: {reason}. Pass the "
        f"mapping from features of the dataset to layers: lookahead({{{mapping}}})."
    )

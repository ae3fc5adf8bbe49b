"""`lookahead` for tf_keras: from features to layers, by what the user or the model's graph says."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
import tf_keras

from tf_scratchpipe import tf_keras_internals
from tf_scratchpipe.features import Path
from tf_scratchpipe.lookahead import lookahead as keras_lookahead
from tf_scratchpipe.tf_keras_embedding import ScratchPipeEmbedding

Layers = dict[Path, list[ScratchPipeEmbedding]]


def lookahead(
    layers: Any, model: Any = None, **settings: Any
) -> Callable[[tf.data.Dataset], tf.data.Dataset]:
    """`tf_scratchpipe.lookahead` for layers and models of tf_keras.

    ```python
    layers = {"user_id": users, "movie_id": movies}
    train = train.apply(for_tf_keras.lookahead(layers, model=model))
    model.fit(train, validation_data=plain)
    ```

    In a subclassed model, as those of TensorFlow Recommenders are, nobody can see who else reads a
    feature. Whatever is not one of `layers` would read slots in the place of ids: give it a copy of
    the feature under another name.

    Args:
        layers: A mapping from features to layers, several of which may be in a list, or one layer,
            if the model's input is a single tensor. A feature is a key of the dictionary of inputs,
            or a tuple of keys that lead to it in nested inputs. Or a compiled functional or
            Sequential model, whose layers read its inputs as they are.
        model: The compiled model whose optimizer moves the rows of those layers that have none of
            their own. None if all have, or have been told by `layer.follow(optimizer)`.
        **settings: `past`, `future`, `executor`, `debug`, `stall_seconds` and `num_slots` of
            `tf_scratchpipe.lookahead`.

    Returns:
        A function from dataset to dataset, for `dataset.apply`.

    Raises:
        TypeError, ValueError: When applied: for layers and features that do not go together, and
            for anything else that is seen to read a planned feature.
    """

    def apply(dataset: tf.data.Dataset) -> tf.data.Dataset:
        whole = layers if isinstance(layers, tf_keras.Model) else None
        found = _told(layers) if whole is None else _found(whole, dataset.element_spec)
        _follow(found, whole or model)
        cores = {path: [layer.core for layer in readers] for path, readers in found.items()}
        return dataset.apply(keras_lookahead(cores, **settings))

    return apply


def _follow(found: Layers, model: Any) -> None:
    optimizer = getattr(model, "optimizer", None)
    for layer in [layer for readers in found.values() for layer in readers]:
        if optimizer is not None:
            layer.follow(optimizer)
        elif layer.row_optimizer() is None:
            raise ValueError(
                f"Layer '{layer.name}' does not know its row optimizer. Received: optimizer=None, "
                'and no compiled model to take it from. Pass `optimizer="adagrad"` or the like to '
                "the layer, or the compiled model to `lookahead(..., model=model)`."
            )


# ---- features and layers ----------------------------------------------------------------------


def _told(layers: Any) -> Layers:
    if isinstance(layers, ScratchPipeEmbedding):
        layers = {(): layers}
    if not isinstance(layers, Mapping) or not layers:
        raise TypeError(
            "`lookahead` needs a mapping from features to layers such as {'item_id': items}, or a "
            f"model. Received: {layers!r}"
        )
    found: Layers = {}
    for feature, readers in layers.items():
        path = feature if isinstance(feature, tuple) else (feature,)
        found[path] = list(readers) if isinstance(readers, list | tuple) else [readers]
        for layer in found[path]:
            if not isinstance(layer, ScratchPipeEmbedding):
                raise TypeError(
                    f"Feature {feature!r} must be mapped to layers of tf_scratchpipe.for_tf_keras. "
                    f"Received: {layer!r}"
                )
    mapped = [layer for readers in found.values() for layer in readers]
    for layer in mapped:
        for tensor in tf_keras_internals.inputs_of(layer):
            _refuse_others(tensor, mapped, None)
    return found


def _found(model: Any, spec: Any) -> Layers:
    """The layers of a functional model, by the inputs that they read."""
    within = tf_keras_internals.nodes(model)
    layers = [m for m in model.submodules if isinstance(m, ScratchPipeEmbedding)]
    if not layers:
        raise ValueError(
            f"Model '{model.name}' has no ScratchPipeEmbedding layer for `lookahead` to serve."
        )
    if within is None:
        raise ValueError(_untraceable(model, layers, "its inputs cannot be seen"))
    found: Layers = {}
    for path, tensor in _inputs(model, spec):
        readers = [
            node.layer
            for node in tf_keras_internals.readers_of(tensor)
            if id(node) in within and isinstance(node.layer, ScratchPipeEmbedding)
        ]
        if readers:
            _refuse_others(tensor, readers, within)
            found[path] = readers
    served = [layer for readers in found.values() for layer in readers]
    missing = [layer for layer in layers if not any(layer is one for one in served)]
    if missing:
        names = ", ".join(f"'{layer.name}'" for layer in missing)
        raise ValueError(
            _untraceable(model, layers, f"layers {names} do not read an input as it is")
        )
    return found


def _inputs(model: Any, spec: Any) -> Iterator[tuple[Path, Any]]:
    """The inputs of a functional model, by where they are in a dataset's elements."""
    inputs = spec[0] if isinstance(spec, tuple) else spec
    if isinstance(model.input, Mapping):
        yield from (((key,), tensor) for key, tensor in model.input.items())
        return
    for number, tensor in enumerate(model.inputs):
        if isinstance(inputs, Mapping):
            yield (str(tf_keras_internals.input_name(tensor)),), tensor
        else:
            yield (number,) if isinstance(inputs, list | tuple) else (), tensor


def _refuse_others(tensor: Any, ours: Sequence[Any], within: set[int] | None) -> None:
    """Raise if an input's codes would be rounded, or be read by anybody who does not know them."""
    name = tf_keras_internals.input_name(tensor)
    if name is None:
        return
    if not tensor.dtype.is_integer:
        raise ValueError(
            f"Layer '{ours[0].name}' gets planned ids through dtype '{tensor.dtype.name}', which "
            f"would round them. Received: input '{name}'. Declare it as "
            f'tf_keras.Input(..., dtype="int32", name="{name}").'
        )
    for node in tf_keras_internals.readers_of(tensor):
        known = any(node.layer is layer for layer in ours)
        if not known and (within is None or id(node) in within):
            raise ValueError(
                f"'{node.layer.name}' reads input '{name}', whose ids `lookahead` replaces "
                f"by slots for layer '{ours[0].name}'. Give it a copy of the feature under another "
                "name, or look all of it up with ScratchPipeEmbedding layers that share the "
                "feature."
            )


def _untraceable(model: Any, layers: Sequence[Any], reason: str) -> str:
    mapping = ", ".join(f"'<feature>': <layer '{layer.name}'>" for layer in layers)
    return (
        f"`lookahead` cannot tell which features model '{model.name}' looks up: {reason}. Pass the "
        f"mapping from features of the dataset to layers: lookahead({{{mapping}}}, model=model)."
    )

"""The `tf.data` transformation: from features to layers, and one pipeline for each iterator."""

import collections
import dataclasses
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Literal

import keras
import tensorflow as tf

from tf_scratchpipe import features
from tf_scratchpipe.engine import Engine
from tf_scratchpipe.executor import EXECUTORS
from tf_scratchpipe.features import Path, Reading
from tf_scratchpipe.pipeline import Feature, Feed, PipelineRun, PipelineSettings
from tf_scratchpipe.planner import FUTURE, PAST
from tf_scratchpipe.resume import ResumeTraining
from tf_scratchpipe.slot_budget import SlotBudget
from tf_scratchpipe.slot_group import SlotGroup

_POOL = 16
"""Threads of the dataset's own.

Its generator waits for the training, whose ops must not wait for it.
"""


def lookahead(
    layers: Any,
    past: int = PAST,
    future: int = FUTURE,
    executor: Literal["thread", "inline"] = "thread",
    debug: bool = False,
    stall_seconds: float | None = 600.0,
    resume: ResumeTraining | None = None,
    num_slots: int | None = None,
) -> Callable[[tf.data.Dataset], tf.data.Dataset]:
    """Bring the rows of each batch to the device before its step begins.

    The returned function goes into `dataset.apply` as the last transformation, but for `prefetch`.
    It replaces the ids of the layers' features by the slots of their rows, in the same structure,
    shape and dtype, and moves rows while earlier batches are trained. Layers in another mode than
    `"pipelined"` get the data as they are.

    ```python
    train = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(10_000).batch(1024)
    model.fit(train.apply(tf_scratchpipe.lookahead(model)), validation_data=plain)
    ```

    Batches must be trained in their order, each once. Iterators may be started, abandoned and
    started again; starting one ends the one before.

    Args:
        layers: A functional or Sequential model, all of whose ScratchPipeEmbedding layers are
            served; or a mapping from features to layers, several of which may be in a list; or one
            layer, if the model's input is a single tensor. A feature is a key of the dictionary of
            inputs, a number in a tuple of inputs, or a tuple of such keys.
        past: Batches before the current one whose rows are held in their slots.
        future: Batches after it whose rows are held.
        executor: `"thread"` runs each stage in a thread; `"inline"` runs all of them when a batch
            is asked for, for debugging.
        debug: Check every plan and every row that a step reads against an uncached copy of the
            table, for as long as the layers live. Slow, and takes another table's memory. Must be
            set before the train step is traced.
        stall_seconds: After so long a wait for the training, raise `StallError` instead of waiting
            on. None waits for ever.
        resume: The callback of `fit` that finds the place in the data again where training was
            interrupted.
        num_slots: Slots of all tables together. Layers with `num_slots` of their own get these; the
            others share what is left in proportion to the distinct rows that their batches look up,
            and a table that gets a slot for each row is pinned: its rows never move. If that turns
            out too few for a table, they are divided anew when the next pass begins. None: each
            table has as many slots as its batches need.

    Returns:
        A function from dataset to dataset, for `dataset.apply`. Elements are `x`, `(x, y)` or
        `(x, y, sample_weight)`.

    Raises:
        TypeError, ValueError: When applied: for layers and features that do not go together, and
            for anything else that reads a planned feature. While iterating, errors of the pipeline
            become TensorFlow errors with the same text, among them `BadIdError`, `TooFewSlotsError`
            and `StallError`.
    """
    if not all(_is_count(size) for size in (past, future)):
        raise ValueError(
            f"`past` and `future` must be integers >= 0. Received: past={past}, future={future}"
        )
    if executor not in EXECUTORS:
        raise ValueError(
            f"`executor` must be 'thread' or 'inline'. Received: executor={executor!r}"
        )
    if stall_seconds is not None and stall_seconds <= 0:
        raise ValueError(
            f"`stall_seconds` must be positive or None. Received: stall_seconds={stall_seconds}"
        )
    if resume is not None and not isinstance(resume, ResumeTraining):
        raise TypeError(f"`resume` must be a ResumeTraining callback. Received: resume={resume!r}")
    if num_slots is not None and not (_is_count(num_slots) and num_slots):
        raise ValueError(
            f"`num_slots` must be a positive integer or None. Received: num_slots={num_slots}"
        )
    settings = PipelineSettings(past, future, executor, stall_seconds)

    def apply(dataset: tf.data.Dataset) -> tf.data.Dataset:
        model = layers if isinstance(layers, keras.Model) else None
        readings = features.found(model) if model is not None else features.told(layers)
        if resume is not None:
            resume.attach(dataset)
        budget = None if num_slots is None else SlotBudget(num_slots)
        told = dataclasses.replace(settings, budget=budget)
        return _Lookahead(dataset, model, readings, told, debug, resume).dataset()

    return apply


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


class _Lookahead:
    """One application to one dataset."""

    def __init__(
        self,
        source: tf.data.Dataset,
        model: keras.Model | None,
        readings: Sequence[Reading],
        settings: PipelineSettings,
        debug: bool,
        resume: ResumeTraining | None,
    ) -> None:
        self._source = source
        self._resume = resume
        self._model = model
        self._settings = settings
        self._spec = source.element_spec
        self._readings = [r for r in readings if r.layer.mode == "pipelined"]
        positions = _positions(self._inputs(), self._spec)
        self._positions = [_position(reading, positions) for reading in self._readings]
        self._prepare_layers()
        self._plans = [_Shared(part) for part in self._parts()]
        if debug:  # Now, for the steps that are traced from here on are the ones that are checked.
            for shared in self._plans:
                shared.group().watch()

    def dataset(self) -> tf.data.Dataset:
        """The dataset with planned ids."""
        if not self._readings and self._resume is None:
            return self._source
        flat_spec = tuple(_flat(self._spec))
        signature = tuple(tf.TensorSpec(spec.shape, spec.dtype) for spec in flat_spec)
        planned = tf.data.Dataset.from_generator(self._batches, output_signature=signature)
        if self._spec != flat_spec:
            planned = planned.map(self._packed)
        options = tf.data.Options()
        options.threading.private_threadpool_size = _POOL
        # There is nothing to tune, and an iterator may wait a minute for the tuner when it goes.
        options.autotune.enabled = False
        planned = planned.with_options(options)
        cardinality = self._source.cardinality()
        if cardinality == tf.data.UNKNOWN_CARDINALITY:
            return planned
        return planned.apply(tf.data.experimental.assert_cardinality(cardinality))

    def _packed(self, *flat: tf.Tensor) -> Any:
        return tf.nest.pack_sequence_as(self._spec, flat, expand_composites=True)

    def _batches(self) -> Iterator[tuple[Any, ...]]:
        """One pass, as a generator."""
        self._follow_model_optimizer()
        if not self._plans:
            for components in self._components():
                yield tuple(components)
            return
        feeds = [shared.feed() for shared in self._plans]
        run = PipelineRun(self._components(), feeds, self._settings)
        try:
            for components in run:
                yield tuple(components)
        finally:
            run.stop()

    def _components(self) -> Generator[list[tf.Tensor]]:
        source = self._source if self._resume is None else self._resume.batches(self._source)
        for element in source:
            yield _flat(element)

    def _inputs(self) -> Any:
        """The part of an element that the model gets as its inputs."""
        return self._spec[0] if isinstance(self._spec, tuple) else self._spec

    def _prepare_layers(self) -> None:
        self._follow_model_optimizer()
        for reading in self._readings:
            reading.layer.require_optimizer()

    def _follow_model_optimizer(self) -> None:
        optimizer = getattr(self._model, "optimizer", None)
        if optimizer is not None:
            for reading in self._readings:
                reading.layer.follow(optimizer)

    def _parts(self) -> list[list[tuple[Reading, int]]]:
        """Readings that share layers or ids, with the positions of their components."""
        parts: list[list[tuple[Reading, int]]] = []
        for pair in zip(self._readings, self._positions, strict=True):
            related = [part for part in parts if any(_related(pair, other) for other in part)]
            parts = [part for part in parts if part not in related]
            parts.append([*(other for part in related for other in part), pair])
        return parts


class _Shared:
    """Layers with one slot map, and what they read."""

    def __init__(self, readings: Sequence[tuple[Reading, int]]) -> None:
        self._layers = list({id(r.layer): r.layer for r, _ in readings}.values())
        self._readings_of = collections.Counter(id(reading.layer) for reading, _ in readings)
        first = self._layers[0]
        for layer in self._layers[1:]:
            agreed = [(one.engine.settings, one.oov_id) for one in (first, layer)]
            if agreed[0] != agreed[1]:
                raise ValueError(
                    f"Layers '{first.name}' and '{layer.name}' read the same feature, so they "
                    "share their slots and must have the same `input_dim`, `num_slots`, "
                    "`replacement`, `mask_zero` and `oov_id`. Received: "
                    f"{agreed[0][0]}, oov_id={agreed[0][1]} and {agreed[1][0]}, "
                    f"oov_id={agreed[1][1]}"
                )
        # Several layers may read the same ids: they are replaced once.
        distinct = {(position, str(r.keys)): (r, position) for r, position in readings}
        self._features = [
            Feature(
                "/".join(map(str, r.path)) or r.input_name or "inputs",
                position,
                r.layer.engine.check,
                r.select,
            )
            for r, position in distinct.values()
        ]

    def group(self) -> SlotGroup:
        """The group that the layers share from now on."""
        return shared_group([layer.engine for layer in self._layers])

    def feed(self) -> Feed:
        """What a pass over the data needs."""
        for layer in self._layers:
            layer.engine.table.lookups_in_batch.assign(self._readings_of[id(layer)])
        return Feed(self.group(), self._features)


def shared_group(engines: Sequence[Engine]) -> SlotGroup:
    """The group of these tables, made anew if they are not in one already."""
    groups = [engine.group for engine in engines]
    if all(group is groups[0] for group in groups) and len(groups[0].tables) == len(engines):
        return groups[0]
    for group in groups:
        group.clear()
    group = SlotGroup(engines[0].settings, [engine.table for engine in engines])
    for engine in engines:
        engine.join(group)
    return group


def _related(one: tuple[Reading, int], other: tuple[Reading, int]) -> bool:
    same_ids = one[1] == other[1] and str(one[0].keys) == str(other[0].keys)
    return same_ids or one[0].layer is other[0].layer


def _flat(structure: Any) -> list[Any]:
    return list(tf.nest.flatten(structure, expand_composites=True))


def _positions(inputs: Any, element: Any) -> dict[Path, tuple[int, Any]]:
    """For each input, its ids' number among the components of an element, and its spec."""
    # Inputs come first in an element, so their components do.
    result: dict[Path, tuple[int, Any]] = {}
    start = 0
    for path, spec in _leaves(inputs):
        # A sparse tensor's components are indices, values, shape; others begin with the values.
        values = 1 if isinstance(spec, tf.SparseTensorSpec) else 0
        result[path] = (start + values, spec)
        start += len(_flat(spec))
    return result


def _leaves(structure: Any, path: Path = ()) -> list[tuple[Path, Any]]:
    """Nested specs in the order in which `tf.nest` flattens them."""
    if isinstance(structure, Mapping):
        items: list[tuple[Any, Any]] = sorted(structure.items())
        if isinstance(structure, collections.OrderedDict) and items != list(structure.items()):
            # tf.data flattens it by its keys, Keras by its order: layers get each other's features.
            raise ValueError(
                "Features must be in a dict, or an OrderedDict with sorted keys: Keras takes the "
                f"values of others in another order. Received: keys {list(structure)}. Add "
                "`.map(lambda x, *rest: (dict(x), *rest))` to the dataset."
            )
    elif isinstance(structure, list | tuple):
        items = list(enumerate(structure))
    else:
        return [(path, structure)]
    return [leaf for key, part in items for leaf in _leaves(part, (*path, key))]


def _position(reading: Reading, positions: dict[Path, tuple[int, Any]]) -> int:
    """The number of the component that a layer reads."""
    candidates = [reading.path]
    if reading.input_name is not None:
        # Keras matches a dictionary with a list of inputs by the inputs' names.
        candidates.append((reading.input_name,))
    # A model's only input may come without a name.
    candidates.append(())
    for path in candidates:
        if path in positions:
            position, spec = positions[path]
            if spec.dtype not in (tf.int32, tf.int64):
                raise ValueError(
                    f"Feature '{'/'.join(map(str, path))}' must be int32 or int64 to be planned. "
                    f"Received: {spec.dtype.name}. Cast it in the dataset before `lookahead`, and "
                    'declare the input as keras.Input(..., dtype="int32").'
                )
            return position
    known = ", ".join(repr(path[0] if len(path) == 1 else path) for path in positions)
    wanted = reading.path[0] if len(reading.path) == 1 else reading.path
    raise ValueError(
        f"The dataset has no feature {wanted!r} for layer '{reading.layer.name}'. Its features are "
        f"{known}. Pass the mapping from features to layers to `lookahead`."
    )

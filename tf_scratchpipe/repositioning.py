"""Where in the data training is, and how to get there again.

A pass over the data is an epoch, or all epochs if `fit` is given `steps_per_epoch`.
"""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tf_scratchpipe import tf_internals

Source = Callable[[int, int], tf.data.Dataset]
"""From the number of a pass and batches to leave out to the rest of that pass."""


class Repositioned:
    """Passes over a dataset that begin where they are told.

    Args:
        source: Gives the rest of a pass; None: the dataset is gone through and batches are left
            out.
    """

    def __init__(self, source: Source | None) -> None:
        self._source = source
        self._begun: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._offset: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def check(self, dataset: tf.data.Dataset) -> None:
        """Raise `ValueError` if the dataset's order cannot be had again."""
        if self._source is None and any(not s.seeded for s in tf_internals.shuffles(dataset)):
            raise ValueError(
                "The dataset is shuffled without a seed, so its order cannot be had again after "
                "an interruption. Received: `shuffle(..., seed=None)`. Pass `seed=` to `shuffle`, "
                "call `keras.utils.set_random_seed` before, or pass a `source` to "
                "`ResumeTraining` that gives the rest of an epoch."
            )

    def begin(self, dataset: tf.data.Dataset, anew: bool) -> None:
        """Training begins, `anew` if passes are counted from the next one on."""
        self._offset[dataset] = self._begun.get(dataset, 0) if anew else 0

    def rest(self, dataset: tf.data.Dataset, number: int, batches: int) -> Iterator[Any]:
        """The elements of pass `number` but the first `batches`."""
        if self._source is not None:
            return iter(self._given(self._source, dataset, number, batches))
        self._wind(dataset, number + self._offset.get(dataset, 0))
        return iter(dataset.skip(batches) if batches else dataset)

    def _given(
        self, source: Source, dataset: tf.data.Dataset, number: int, batches: int
    ) -> tf.data.Dataset:
        rest = source(number, batches)
        spec = getattr(rest, "element_spec", None)
        if not _compatible(spec, dataset.element_spec):
            raise ValueError(
                "`source(epoch, batches_to_skip)` must return a dataset with the elements of the "
                f"one that `lookahead` was applied to. Received: {spec}. Expected: "
                f"{dataset.element_spec}"
            )
        return rest

    def _wind(self, dataset: tf.data.Dataset, number: int) -> None:
        """Have the next iterator be that of pass `number`, in which a shuffle has another order."""
        begun = self._begun.get(dataset, 0)
        if any(shuffle.anew for shuffle in tf_internals.shuffles(dataset)):
            if begun > number:
                raise ValueError(
                    f"The dataset is shuffled anew in each pass, and cannot go back to pass "
                    f"{number}. Received: a dataset that was gone through {begun} times. Make the "
                    "dataset again, pass `reshuffle_each_iteration=False` to `shuffle`, or pass a "
                    "`source` to `ResumeTraining`."
                )
            for _ in range(number - begun):
                iter(dataset)  # Takes the seed of one pass.
        self._begun[dataset] = number + 1


def _compatible(spec: Any, expected: Any) -> bool:
    try:
        tf.nest.assert_same_structure(spec, expected, expand_composites=True)
    except (TypeError, ValueError):
        return False
    pairs = zip(
        tf.nest.flatten(spec, expand_composites=True),
        tf.nest.flatten(expected, expand_composites=True),
        strict=True,
    )
    return all(theirs.is_compatible_with(mine) for mine, theirs in pairs)

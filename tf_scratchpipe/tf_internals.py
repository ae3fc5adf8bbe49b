"""Private TensorFlow, and what public call is missing for each use."""

import dataclasses

import tensorflow as tf
from tensorflow.python.eager import record


def is_recorded(tensor: tf.Tensor) -> bool:
    """Whether a gradient tape watches a tensor. Missing: any way to ask."""
    return bool(record.should_record_backprop([tensor]))


@dataclasses.dataclass(frozen=True, slots=True)
class Shuffle:
    """A shuffle in a dataset."""

    seeded: bool
    anew: bool
    """Whether each iterator has another order."""


def shuffles(dataset: tf.data.Dataset) -> list[Shuffle]:
    """The shuffles that a dataset is made by, but for those in functions that it calls.

    Missing: any way to ask a dataset how it was made.
    """
    found = [shuffle for source in dataset._inputs() for shuffle in shuffles(source)]
    if type(dataset).__name__ == "_ShuffleDataset":
        seeded = bool(int(dataset._seed) or int(dataset._seed2))
        found.append(Shuffle(seeded, bool(dataset._reshuffle_each_iteration)))
    return found

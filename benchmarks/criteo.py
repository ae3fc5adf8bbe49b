"""A recommender with the 26 tables of the Criteo Kaggle data set, on made-up ids.

Its sizes are those of the data's categories, 33.8 million rows in all. As in DLRM there are 13
numbers beside them, and rows and numbers interact by dot products. Ids follow the bounded Zipf law
of `scratchpipe_ids`, with hot rows in every table.
"""

from collections.abc import Callable, Iterator

import keras
import numpy as np
import scratchpipe_ids
import tensorflow as tf

CARDINALITIES = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27),
    *(14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
NUMBERS = 13

Ids = dict[str, np.ndarray]


def names() -> list[str]:
    """Names of the features that are looked up."""
    return [f"category_{number}" for number in range(len(CARDINALITIES))]


def model(embedding: Callable[[int, str], keras.Layer], dim: int) -> keras.Model:
    """The model.

    Args:
        embedding: Makes the layer of a table, given its number of rows and its feature.
        dim: Values in a row.
    """
    numbers = keras.Input((NUMBERS,), name="numbers")
    inputs = {name: keras.Input((), dtype="int32", name=name) for name in names()}
    rows = [
        embedding(count, name)(inputs[name])
        for count, name in zip(CARDINALITIES, names(), strict=True)
    ]
    dense = keras.layers.Dense(64, activation="relu")(numbers)
    dense = keras.layers.Dense(dim, activation="relu")(dense)
    stacked = keras.ops.stack([dense, *rows], axis=1)
    pairs = keras.ops.matmul(stacked, keras.ops.transpose(stacked, (0, 2, 1)))
    joined = keras.layers.concatenate([dense, keras.layers.Flatten()(pairs)])
    hidden = keras.layers.Dense(128, activation="relu")(joined)
    output = keras.layers.Dense(1, activation="sigmoid")(hidden)
    return keras.Model({"numbers": numbers, **inputs}, output)


def ids(locality: str, seed: int) -> Iterator[Callable[..., np.ndarray]]:
    """For each table what draws its ids."""
    for number, rows in enumerate(CARDINALITIES):
        exponent = scratchpipe_ids.EXPONENTS[locality]
        yield scratchpipe_ids.ZipfIds(rows, exponent, seed=100 * seed + number).draw


def data(locality: str, batch_size: int, batches: int, seed: int) -> tf.data.Dataset:
    """Batches, again and again."""
    rng = np.random.default_rng(seed)
    features = {
        name: draw(batches, batch_size).astype(np.int32)
        for name, draw in zip(names(), ids(locality, seed), strict=True)
    }
    features["numbers"] = rng.random((batches, batch_size, NUMBERS), np.float32)
    clicks = rng.integers(0, 2, (batches, batch_size, 1)).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((features, clicks)).repeat()


def hottest(locality: str, slots: int, seed: int, lookups: int = 1_000_000) -> Ids:
    """The rows that are looked up most, over all tables, as counted on data of their own."""
    counts = [
        np.bincount(draw(lookups), minlength=rows)
        for rows, draw in zip(CARDINALITIES, ids(locality, seed), strict=True)
    ]
    together = np.concatenate(counts)
    least = np.partition(together, together.size - slots)[together.size - slots]
    found = {}
    for name, count in zip(names(), counts, strict=True):
        hot = np.flatnonzero(count >= max(least, 1))
        hot = hot if hot.size else np.array([count.argmax()])
        found[name] = hot[np.argsort(-count[hot], kind="stable")]
    return found

"""Which ids a dataset looks up most."""

from typing import Any

import numpy as np
import tensorflow as tf

from tf_scratchpipe.errors import BadIdError
from tf_scratchpipe.plan import Ints


def count_ids(dataset: tf.data.Dataset, feature: Any = (), most: int | None = None) -> Ints:
    """Count the ids of a feature in one pass over a dataset.

    For `hot_ids` of a `ScratchPipeEmbedding` in mode `"static"`. Count on other data than those on
    which the mode is judged.

    Args:
        dataset: Elements are `x`, `(x, y)` or `(x, y, sample_weight)`.
        feature: Key of the feature in `x`, or a tuple of keys.
        most: Number of ids to return. None for all.

    Returns:
        Array of distinct ids, the most frequent first; equally frequent ones by their number.

    Raises:
        BadIdError: An id is negative or no integer.

    Example:

    ```python
    hot = tf_scratchpipe.count_ids(last_week, "item_id", most=100_000)
    ScratchPipeEmbedding(10_000_000, 64, mode="static", hot_ids=hot)
    ```
    """
    path = feature if isinstance(feature, tuple) else (feature,)
    counts = np.zeros(0, np.int64)
    for element in dataset:
        part = element[0] if isinstance(element, tuple) else element
        for key in path:
            part = part[key]
        values = part.flat_values if isinstance(part, tf.RaggedTensor) else part
        values = values.values if isinstance(values, tf.SparseTensor) else values
        ids = values.numpy().ravel()
        if not np.issubdtype(ids.dtype, np.integer) or (ids.size and ids.min() < 0):
            raise BadIdError(
                f"Ids must be integers >= 0. Received: feature {feature!r} with dtype {ids.dtype}, "
                f"least id {ids.min() if ids.size else None}"
            )
        if ids.size and ids.max() >= counts.size:
            counts = np.pad(counts, (0, max(int(ids.max()) + 1 - counts.size, counts.size)))
        np.add.at(counts, ids, 1)
    ids = np.flatnonzero(counts)
    return ids[np.argsort(-counts[ids], kind="stable")][:most].astype(np.int64)

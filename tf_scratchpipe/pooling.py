"""Flat lookups from nested ids, and back: dense, ragged and sparse, pooled or not."""

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

COMBINERS = ("sum", "mean", "sqrtn")


@dataclasses.dataclass(frozen=True, slots=True)
class Flat:
    """Ids in one dimension, and how their rows go back together.

    Args:
        ids: The ids.
        restore: From rows (ids, dim) to the ids' own structure with one more dimension.
        pool: From rows, weights (ids,) or None, and a combiner, to pooled rows in the structure of
            the ids less its last dimension.
    """

    ids: tf.Tensor
    restore: Callable[[tf.Tensor], Any]
    pool: Callable[[tf.Tensor, tf.Tensor | None, str], Any]


def flatten(ids: Any) -> Flat:
    """Take ids apart.

    Args:
        ids: Tensor, RaggedTensor or SparseTensor of ids. A sparse one has shape (batch, n).

    Raises:
        ValueError: A sparse tensor has another rank.
    """
    if isinstance(ids, tf.SparseTensor):
        return _flat_sparse(ids)
    if isinstance(ids, tf.RaggedTensor):
        return _flat_ragged(ids)
    return _flat_dense(ids)


def flat_weights(weights: Any, ids: Any) -> tf.Tensor:
    """Weights in the order of the flat ids.

    Raises:
        ValueError: They are not in the ids' own structure.
    """
    for kind in (tf.SparseTensor, tf.RaggedTensor):
        if isinstance(weights, kind) != isinstance(ids, kind):
            raise ValueError(
                "`weights` must have the structure of the ids. Received: weights of type "
                f"{type(weights).__name__} for ids of type {type(ids).__name__}"
            )
    if not weights.shape.is_compatible_with(ids.shape):
        raise ValueError(
            "`weights` must have the shape of the ids. Received: weights of shape "
            f"{weights.shape} for ids of shape {ids.shape}"
        )
    message = "`weights` must have the structure of the ids."
    with tf.control_dependencies(_same_structure(weights, ids, message)):
        if isinstance(weights, tf.SparseTensor):
            return tf.identity(weights.values)
        flat = weights.flat_values if isinstance(weights, tf.RaggedTensor) else weights
        return tf.reshape(flat, [-1])


def _same_structure(weights: Any, ids: Any, message: str) -> list[Any]:
    """What fails in the step if two values of one kind have not the same structure."""
    if isinstance(weights, tf.SparseTensor):
        pairs = [(weights.indices, ids.indices)]
    elif isinstance(weights, tf.RaggedTensor):
        if weights.ragged_rank != ids.ragged_rank:
            raise ValueError(
                f"{message} Received: ragged ranks {weights.ragged_rank} for {ids.ragged_rank}"
            )
        pairs = list(zip(weights.nested_row_splits, ids.nested_row_splits, strict=True))
    elif weights.shape.is_fully_defined() and ids.shape.is_fully_defined():
        pairs = []
    else:
        pairs = [(tf.shape(weights), tf.shape(ids))]
    checks = [tf.debugging.assert_equal(tf.shape(a), tf.shape(b), message) for a, b in pairs]
    with tf.control_dependencies([check for check in checks if check is not None]):
        return [
            check
            for a, b in pairs
            if (
                check := tf.debugging.assert_equal(
                    tf.cast(a, tf.int64), tf.cast(b, tf.int64), message
                )
            )
            is not None
        ]


def _flat_dense(ids: tf.Tensor) -> Flat:
    shape = tf.shape(ids)

    def restore(rows: tf.Tensor) -> tf.Tensor:
        whole = tf.reshape(rows, tf.concat([shape, tf.shape(rows)[1:]], axis=0))
        whole.set_shape([*ids.shape, rows.shape[-1]])
        return whole

    def pool(rows: tf.Tensor, weights: tf.Tensor | None, combiner: str) -> tf.Tensor:
        total = tf.reduce_sum(restore(_weighted(rows, weights)), axis=-2)
        return _scaled(
            total,
            combiner,
            lambda values: tf.reduce_sum(tf.reshape(values, shape), -1),
            _or_ones(weights, rows),
        )

    return Flat(tf.reshape(ids, [-1]), restore, pool)


def _flat_ragged(ids: tf.RaggedTensor) -> Flat:
    flat_values = ids.flat_values
    inner = _flat_dense(flat_values)

    def restore(rows: tf.Tensor) -> tf.RaggedTensor:
        return ids.with_flat_values(inner.restore(rows))

    def pool(rows: tf.Tensor, weights: tf.Tensor | None, combiner: str) -> Any:
        if flat_values.shape.rank > 1:
            return ids.with_flat_values(inner.pool(rows, weights, combiner))
        return _pool_innermost(
            ids, lambda rowids, count: _pool_segments(rows, weights, combiner, rowids, count)
        )

    return Flat(inner.ids, restore, pool)


def _pool_innermost(ids: tf.RaggedTensor, pool: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]) -> Any:
    if ids.ragged_rank > 1:
        return ids.with_values(_pool_innermost(ids.values, pool))
    return pool(ids.value_rowids(), ids.nrows())


def _flat_sparse(ids: tf.SparseTensor) -> Flat:
    if ids.shape.rank not in (None, 2):
        raise ValueError(f"Sparse ids must have shape (batch, n). Received: ids.shape={ids.shape}")

    def restore(rows: tf.Tensor) -> Any:
        raise ValueError(
            "Sparse ids have to be pooled. Received: combiner=None. Pass combiner='sum', 'mean' or "
            "'sqrtn', or dense or ragged ids."
        )

    def pool(rows: tf.Tensor, weights: tf.Tensor | None, combiner: str) -> tf.Tensor:
        count = ids.dense_shape[0]
        pooled = _pool_segments(rows, weights, combiner, ids.indices[:, 0], count)
        pooled.set_shape([ids.shape[0], rows.shape[-1]])
        return pooled

    return Flat(ids.values, restore, pool)


def _pool_segments(
    rows: tf.Tensor,
    weights: tf.Tensor | None,
    combiner: str,
    segments: tf.Tensor,
    count: tf.Tensor,
) -> tf.Tensor:
    def total(values: tf.Tensor) -> tf.Tensor:
        return tf.math.unsorted_segment_sum(values, segments, count)

    return _scaled(total(_weighted(rows, weights)), combiner, total, _or_ones(weights, rows))


def _weighted(rows: tf.Tensor, weights: tf.Tensor | None) -> tf.Tensor:
    return rows if weights is None else rows * weights[:, None]


def _or_ones(weights: tf.Tensor | None, rows: tf.Tensor) -> tf.Tensor:
    return tf.ones(tf.shape(rows)[:1], rows.dtype) if weights is None else weights


def _scaled(
    total: tf.Tensor,
    combiner: str,
    summed: Callable[[tf.Tensor], tf.Tensor],
    weights: tf.Tensor,
) -> tf.Tensor:
    """Weighted sums made into what the combiner says; 0 where no weight is."""
    if combiner == "sum":
        return total
    if combiner == "mean":
        return tf.math.divide_no_nan(total, summed(weights)[..., None])
    return tf.math.divide_no_nan(total, tf.sqrt(summed(tf.square(weights)))[..., None])

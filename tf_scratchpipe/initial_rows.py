"""The values with which a table starts."""

import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_scratchpipe.host_table import HostTable
from tf_scratchpipe.plan import Rows
from tf_scratchpipe.row_sampler import RowSampler
from tf_scratchpipe.storage import HOST_DEVICE

LARGEST_WHOLE = 2**28
"""Values in a table, beyond which rows are drawn one by one: 1 GiB of float32."""


def host_table(
    rows: int, dim: int, dtype: str, initializer: keras.Initializer, by_row: bool | None
) -> HostTable:
    """A table with initial values.

    Args:
        rows: Rows of the table.
        dim: Values in a row.
        dtype: Their dtype.
        initializer: Draws them.
        by_row: Whether each row is drawn by itself when it is first needed. None: where the table
            is large.

    Raises:
        ValueError: The initializer cannot draw rows by themselves.
    """
    if by_row is None:
        by_row = rows * dim > LARGEST_WHOLE
    if not by_row:
        return HostTable(rows, dim, dtype, draw_all=_whole(rows, dim, dtype, initializer))
    sampler = row_sampler(initializer, rows, dim)
    return HostTable(rows, dim, dtype, draw=lambda ids: sampler.draw(ids, dim))


def row_sampler(initializer: keras.Initializer, rows: int, dim: int) -> RowSampler:
    """What draws single rows from the distribution of a Keras initializer.

    Raises:
        ValueError: There is none.
    """
    maker = _SAMPLERS.get(type(initializer).__name__)
    if maker is None:
        maker = _scaled if isinstance(initializer, keras.initializers.VarianceScaling) else None
    seed = getattr(initializer, "seed", 0)
    if maker is None or not isinstance(seed, int | np.integer):
        raise ValueError(
            "Rows can be drawn one by one from the distributions of keras.initializers' "
            "RandomUniform, RandomNormal, TruncatedNormal, VarianceScaling and its kin, Constant, "
            f"Zeros and Ones, with an integer seed. Received: embeddings_initializer="
            f"{initializer}, seed={seed}. Pass one of these, or `initialize_by_row=False` if the "
            "table can be drawn at once."
        )
    return maker(initializer, rows, dim, int(seed))


def _whole(rows: int, dim: int, dtype: str, initializer: keras.Initializer) -> Callable[[], Rows]:
    def draw() -> Rows:
        with tf.init_scope(), tf.device(HOST_DEVICE):
            return np.asarray(keras.ops.convert_to_numpy(initializer((rows, dim), dtype=dtype)))

    return draw


def _constant(value: float) -> Callable[..., RowSampler]:
    return lambda *_: RowSampler("constant", value, 0.0, 0)


def _uniform(initializer: Any, rows: int, dim: int, seed: int) -> RowSampler:
    return RowSampler("uniform", initializer.minval, initializer.maxval, seed)


def _normal(initializer: Any, rows: int, dim: int, seed: int) -> RowSampler:
    return RowSampler("normal", initializer.mean, initializer.stddev, seed)


def _truncated(initializer: Any, rows: int, dim: int, seed: int) -> RowSampler:
    return RowSampler("truncated_normal", initializer.mean, initializer.stddev, seed)


def _scaled(initializer: Any, rows: int, dim: int, seed: int) -> RowSampler:
    fans = {"fan_in": rows, "fan_out": dim, "fan_avg": (rows + dim) / 2}
    variance = initializer.scale / max(1.0, fans[initializer.mode])
    if initializer.distribution == "uniform":
        limit = math.sqrt(3.0 * variance)
        return RowSampler("uniform", -limit, limit, seed)
    if initializer.distribution == "truncated_normal":
        # The deviation that is left of 1 when a normal distribution is cut at 2.
        return RowSampler("truncated_normal", 0.0, math.sqrt(variance) / 0.87962566103423978, seed)
    return RowSampler("normal", 0.0, math.sqrt(variance), seed)


_SAMPLERS: dict[str, Callable[..., RowSampler]] = {
    "RandomUniform": _uniform,
    "RandomNormal": _normal,
    "TruncatedNormal": _truncated,
    "Zeros": _constant(0.0),
    "Ones": _constant(1.0),
    "Constant": lambda initializer, *_: RowSampler("constant", float(initializer.value), 0.0, 0),
}

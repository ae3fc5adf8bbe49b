"""The errors that have a name of their own, and checks that several modules make."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tf_scratchpipe.codes import HIGHEST, LOWEST


class BadIdError(ValueError):
    """An id that names no row: negative, too large, not a whole number."""


class TooFewSlotsError(ValueError):
    """One batch needs more rows at once than there are slots."""


class StallError(RuntimeError):
    """A stage has waited for longer than `stall_seconds`."""


class AbandonedError(RuntimeError):
    """A batch was asked for from an iterator whose place another one has taken."""


def check_ids(
    ids: npt.NDArray[np.generic], rows: int, table: str, feature: str, batch: int | None
) -> None:
    """Raise `BadIdError` if an id is not a row number of a table with `rows` rows.

    Args:
        ids: Ids of any shape and dtype.
        rows: Number of rows of the table.
        table: Name of the layer.
        feature: Name of the feature that the ids are from.
        batch: Number of the batch, if it is known.
    """
    if not ids.size:
        return
    if np.issubdtype(ids.dtype, np.integer) and ids.min() >= 0 and ids.max() < rows:
        return
    bad = bad_ids(ids, rows)
    if bad.size:
        shown = ", ".join(str(value) for value in _distinct(bad)[:5])
        where = "" if batch is None else f" in batch {batch}"
        raise BadIdError(
            f"Ids of layer '{table}' must be whole numbers from 0 to input_dim - 1. "
            f"Received: {bad.size} bad ids in feature '{feature}'{where}, among them {shown}, "
            f"with input_dim={rows}. Correct the data, raise `input_dim`, or pass `oov_id` to "
            "have them all looked up in one row." + _hint(bad)
        )


def bad_ids(ids: npt.NDArray[np.generic], rows: int) -> npt.NDArray[np.generic]:
    """Those of `ids` that are not row numbers, flat."""
    if np.issubdtype(ids.dtype, np.integer):
        return ids[(ids < 0) | (ids >= rows)]  # type: ignore[operator]
    if not np.issubdtype(ids.dtype, np.floating):
        raise BadIdError(f"Ids must be numbers. Received: dtype={ids.dtype}")
    values = ids.astype(np.float64)
    whole = (values >= 0) & (values < rows) & (np.floor(values) == values)
    bad: npt.NDArray[np.generic] = ids[~whole]
    return bad


def _hint(bad: npt.NDArray[np.generic]) -> str:
    low = bad.astype(np.float64)
    if not ((low < HIGHEST) & (low >= LOWEST)).any():
        return ""
    return (
        " If they come from `lookahead`: nothing may change planned ids on their way to the layer, "
        'pad them or make them floats; declare inputs as keras.Input(..., dtype="int32").'
    )


def _distinct(values: npt.NDArray[np.generic]) -> Sequence[object]:
    """Each value once, in order of appearance; NaN equals NaN."""
    return list({repr(value.item()): value.item() for value in values[:1000]}.values())


def check_frequency(name: str, value: Any) -> None:
    """Raise `ValueError` unless a callback's frequency is `"epoch"` or a number of batches."""
    number = value if isinstance(value, int) and not isinstance(value, bool) else 0
    if value != "epoch" and number <= 0:
        raise ValueError(
            f"`{name}` must be 'epoch' or a positive number of batches. Received: {name}={value!r}"
        )

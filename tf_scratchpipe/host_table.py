"""Rows in host memory."""

import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tf_scratchpipe.plan import Ints, Rows

_DRAWN_AT_ONCE = 2**16
"""Rows; drawing takes several times their memory."""


class HostTable:
    """A table of rows, drawn at once or row by row when first needed. Threads may share it.

    Args:
        rows: Number of rows.
        dim: Values in a row.
        dtype: Their dtype.
        draw_all: Gives the whole table. It is called when a row is first needed.
        draw: Gives the rows with these ids instead. Rows that nobody needs take no memory until
            somebody asks for all of them.
    """

    def __init__(
        self,
        rows: int,
        dim: int,
        dtype: str = "float32",
        *,
        draw_all: Callable[[], Rows] | None = None,
        draw: Callable[[Ints], Rows] | None = None,
    ) -> None:
        self.shape = (rows, dim)
        self.dtype = np.dtype(dtype)
        self._draw_all = draw_all
        self._draw = draw
        self._values: Rows | None = None
        self._undrawn: npt.NDArray[np.bool_] | None = None
        self._lock = threading.RLock()

    @classmethod
    def filled(cls, rows: int, dim: int, value: float, dtype: str = "float32") -> "HostTable":
        """A table with the same value everywhere."""
        if not value:  # Zeroed memory is not taken until it is written to.
            return cls(rows, dim, dtype, draw_all=lambda: np.zeros((rows, dim), dtype))
        return cls(rows, dim, dtype, draw_all=lambda: np.full((rows, dim), value, dtype))

    def gather(self, ids: Ints, out: Rows | None = None) -> Rows:
        """Rows `ids` in that order, in `out` if it is given."""
        with self._lock:
            values = self._drawn(ids)
        # With "clip" numpy needs no buffer of its own; ids are known to be right.
        return np.take(values, ids, axis=0, out=out, mode="clip")

    def scatter(self, ids: Ints, rows: Rows) -> None:
        """Overwrite the rows `ids`, each named once."""
        with self._lock:
            self._storage()[ids] = rows
            if self._undrawn is not None:
                self._undrawn[ids] = False

    def whole(self) -> Rows:
        """All rows, not a copy."""
        with self._lock:
            for start in range(0, self.shape[0], _DRAWN_AT_ONCE) if self._lazy else ():
                self._drawn(np.arange(start, min(start + _DRAWN_AT_ONCE, self.shape[0])))
            return self._storage()

    def assign(self, rows: Rows) -> None:
        """Overwrite all rows."""
        with self._lock:
            self._values = np.array(rows, self.dtype)
            self._undrawn = None
            self._draw = None

    def peek(self, start: int, stop: int) -> Rows:
        """A copy of rows `start` to `stop`. Those drawn row by row take no memory by that."""
        with self._lock:
            if not self._lazy:
                return np.array(self._storage()[start:stop])
            ids = np.arange(start, stop)
            assert self._draw is not None
            if self._undrawn is None:
                return np.asarray(self._draw(ids), self.dtype)
            rows = np.array(self._storage()[start:stop])
            new = np.flatnonzero(self._undrawn[start:stop])
            rows[new] = self._draw(ids[new])
            return rows

    def blank(self) -> None:
        """Take memory for all rows without drawing any; whoever does will `scatter` them all."""
        with self._lock:
            if self._values is None:
                self._values = np.empty(self.shape, self.dtype)
            self._undrawn = None
            self._draw = None

    def release(self) -> None:
        """Free the memory; whoever does has the rows, and will `assign` them."""
        self._values = None
        self._undrawn = None

    @property
    def _lazy(self) -> bool:
        return self._draw is not None

    def _storage(self) -> Rows:
        if self._values is None:
            if self._lazy:
                self._undrawn = np.ones(self.shape[0], bool)
                self._values = np.zeros(self.shape, self.dtype)
            else:
                assert self._draw_all is not None
                self._values = np.require(self._draw_all(), self.dtype, "W")
        return self._values

    def _drawn(self, ids: Ints) -> Rows:
        values = self._storage()
        if self._undrawn is not None and self._draw is not None:
            new = ids[self._undrawn[ids]]
            values[new] = self._draw(new)
            self._undrawn[new] = False
        return values

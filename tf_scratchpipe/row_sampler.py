"""Initial values of single rows, for tables that are too large to draw at once.

A value is a function of the seed, its row and its column alone: the same whenever, and in whatever
company, the row is first needed. Its bits come from SplitMix64, whose output function is applied to
a counter. The values differ from those that the initializer would draw for the whole table, their
distribution does not.
"""

import dataclasses
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from tf_scratchpipe.plan import Ints, Rows

Bits: TypeAlias = npt.NDArray[np.uint64]

_STEP = np.uint64(0x9E3779B97F4A7C15)
_TRUNCATE_AT = 2.0


@dataclasses.dataclass(frozen=True, slots=True)
class RowSampler:
    """Draws rows.

    Example:

    ```python
    RowSampler("uniform", -0.05, 0.05, seed=1).draw(np.array([3, 3, 7]), dim=16)
    ```
    """

    distribution: Literal["uniform", "normal", "truncated_normal", "constant"]
    first: float
    """Lower end, mean or value."""
    second: float
    """Upper end or standard deviation; without a meaning for a constant."""
    seed: int

    def draw(self, ids: Ints, dim: int) -> Rows:
        """Rows `ids`, each with `dim` values, as float32."""
        if self.distribution == "constant":
            return np.full((ids.size, dim), self.first, np.float32)
        columns = np.arange(dim, dtype=np.uint64)
        places: Bits = ids.astype(np.uint64)[:, None] * np.uint64(dim) + columns
        if self.distribution == "uniform":
            width = self.second - self.first
            return (self.first + width * self._uniform(places, 0)).astype(np.float32)
        values = self._normal(places, 0)
        if self.distribution == "truncated_normal":
            attempt = 1
            while (outside := np.abs(values) > _TRUNCATE_AT).any():
                values[outside] = self._normal(places[outside], attempt)
                attempt += 1
        return (self.first + self.second * values).astype(np.float32)

    def _normal(self, places: Bits, attempt: int) -> npt.NDArray[np.float64]:
        """Standard normal values by the method of Box and Muller."""
        radius = np.sqrt(-2.0 * np.log1p(-self._uniform(places, 2 * attempt + 1)))
        return radius * np.cos(2.0 * np.pi * self._uniform(places, 2 * attempt + 2))

    def _uniform(self, places: Bits, stream: int) -> npt.NDArray[np.float64]:
        """Values in [0, 1)."""
        counter: Bits = np.array([(self.seed + stream * int(_STEP)) % 2**64], np.uint64)
        bits = _mixed(_mixed(counter) + places * _STEP)
        return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(bits: Bits) -> Bits:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))

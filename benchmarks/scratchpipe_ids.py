"""Ids with locality: a bounded Zipf law over the rows of a table.

The row of rank k takes a share proportional to the integral of x ** -exponent from k - 1/2 to
k + 1/2, which is the continuous law between two midpoints; its inverse is a formula, so a draw
costs two powers and no table. Ranks are spread over the table by a bijection, so that hot rows are
not neighbours.

These are three of the four classes of ScratchPipe's evaluation; the fourth ("low") is between the
first two. Their hottest 2% of 10M rows take 2.0%,
35.0% and 80.2% of the lookups by the formula (paper's classes: 2%, 35%, 80%); of 10M draws with
seed 0 they took 2.0%, 35.0% and 80.2%. `python benchmarks/scratchpipe_ids.py` prints both.
"""

import math

import numpy as np
import numpy.typing as npt

EXPONENTS = {"random": 0.0, "medium": 0.737, "high": 1.024}
_GOLDEN = (math.sqrt(5) - 1) / 2


class ZipfIds:
    """A seeded stream of ids.

    Args:
        rows: Number of rows of the table.
        exponent: 0 for no locality. Not 1 exactly.
        seed: Seed of the draws. The rows' ranks do not depend on it.
    """

    def __init__(self, rows: int, exponent: float, seed: int = 0) -> None:
        self.rows = rows
        self._power = 1.0 - exponent
        self._generator = np.random.default_rng(seed)
        self._step = _coprime(rows)
        self._low = 0.5**self._power
        self._high = (rows + 0.5) ** self._power

    def draw(self, *shape: int) -> npt.NDArray[np.int64]:
        """The next ids."""
        return self.ids_of(self._ranks(self._generator.random(shape)))

    def ids_of(self, ranks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The rows of these ranks; rank 0 is the hottest."""
        return ranks * self._step % self.rows

    def share(self, hottest: float) -> float:
        """The part of the lookups that the hottest part of the rows takes."""
        edge = (hottest * self.rows + 0.5) ** self._power
        return (edge - self._low) / (self._high - self._low)

    def _ranks(self, uniform: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        x = (self._low + uniform * (self._high - self._low)) ** (1.0 / self._power)
        return np.minimum((x - 0.5).astype(np.int64), self.rows - 1)


def _coprime(rows: int) -> int:
    """A factor by which ranks are spread over the table, each to a row of its own."""
    step = max(int(_GOLDEN * rows), 1)
    while math.gcd(step, rows) != 1:
        step += 1
    return step


def main() -> None:
    rows, lookups, hottest = 10_000_000, 10_000_000, 0.02
    for name, exponent in EXPONENTS.items():
        ids = ZipfIds(rows, exponent)
        hot = np.zeros(rows, bool)
        hot[ids.ids_of(np.arange(int(hottest * rows)))] = True
        drawn = np.mean([hot[ids.draw(lookups // 10)].mean() for _ in range(10)])
        print(
            f"{name:7} exponent {exponent:.3f}: the hottest {hottest:.0%} of {rows:,} rows take "
            f"{ids.share(hottest):.1%} by the formula, {drawn:.1%} of {lookups:,} draws"
        )


if __name__ == "__main__":
    main()

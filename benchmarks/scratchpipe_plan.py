"""How long the Plan stage of tf_scratchpipe takes.

    python benchmarks/scratchpipe_plan.py
    python benchmarks/scratchpipe_plan.py --tables 1 --rows 1000000 --replacement lfu

The default is the paper's size: 8 tables of 10M rows, 2048 samples with 20 ids for each table. A
line is one locality class (see scratchpipe_ids.py). Times are milliseconds for a batch, all tables
together, in one thread: the median and the lowest of the measured batches. Measuring starts once
every table evicts, and then `--warm-up` batches later. Drawing ids is not in the times.
Distinct ids, fills, evictions, and the hit rate of the lookups are means over these batches;
rows are those of all tables. No TensorFlow is imported.
"""

import argparse
import collections
import dataclasses
import importlib.util
import statistics
import sys
import time
from typing import Any

import harness
import numpy as np
import scratchpipe_ids

_MOST_WARM_UP = 2000


@dataclasses.dataclass(frozen=True)
class Measured:
    """One locality class."""

    seconds: list[float]
    """One for each measured batch."""
    lookups: int
    """Of all measured batches; likewise below."""
    hits: int
    distinct: int
    fills: int
    evictions: int
    shortened: int
    """Plans whose window had to be shortened."""
    warm_up: int
    """Batches planned before."""


class Table:
    """A planner with the batches that are in its sight.

    Args:
        modules: `tf_scratchpipe.planner` and `tf_scratchpipe.replacement`.
        args: The options.
        exponent: Of its ids.
        seed: Of its ids.
    """

    def __init__(
        self, modules: tuple[Any, Any], args: argparse.Namespace, exponent: float, seed: int
    ) -> None:
        planner, replacement = modules
        policy = replacement.POLICIES[args.replacement]
        self._planner = planner.SlotPlanner(args.rows, args.num_slots, replacement=policy)
        self._ids = scratchpipe_ids.ZipfIds(args.rows, exponent, seed)
        self._size = args.ids
        self._window = collections.deque(
            self._planner.look(self._drawn()) for _ in range(planner.FUTURE)
        )
        self._next = self._drawn()

    def plan(self, batch: int) -> Any:
        """The plan of the next batch. Another one comes into sight, and is looked up."""
        self._window.append(self._planner.look(self._next))
        return self._planner.plan(batch, self._window.popleft(), list(self._window))

    def advance(self) -> None:
        """Draw another batch."""
        self._next = self._drawn()

    def _drawn(self) -> list[np.ndarray]:
        return [self._ids.draw(self._size)]


def main() -> None:
    args = options()
    modules = without_tensorflow()
    assert "tensorflow" not in sys.modules
    results = {}
    for name, exponent in scratchpipe_ids.EXPONENTS.items():
        print(f"planning {name} ...", file=sys.stderr, flush=True)
        results[name] = measure(modules, args, exponent)
    assert "tensorflow" not in sys.modules
    show(args, results)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tables", type=int, default=8)
    parser.add_argument("--rows", type=int, default=10_000_000, help="rows of a table")
    parser.add_argument("--ids", type=int, default=40_960, help="ids of a table in a batch")
    parser.add_argument("--num-slots", type=int, default=400_000, help="slots of a table")
    parser.add_argument("--replacement", default="lru", help="lru, lfu or random")
    parser.add_argument("--batches", type=int, default=50, help="batches to measure")
    parser.add_argument("--warm-up", type=int, default=50, help="batches after the first evictions")
    return parser.parse_args()


def without_tensorflow() -> tuple[Any, Any]:
    """The modules of the Plan stage, without the package's `__init__`, which imports
    TensorFlow.
    """
    spec = importlib.util.find_spec("tf_scratchpipe")
    assert spec is not None
    sys.modules["tf_scratchpipe"] = importlib.util.module_from_spec(spec)
    return (
        importlib.import_module("tf_scratchpipe.planner"),
        importlib.import_module("tf_scratchpipe.replacement"),
    )


def measure(modules: tuple[Any, Any], args: argparse.Namespace, exponent: float) -> Measured:
    tables = [Table(modules, args, exponent, seed) for seed in range(args.tables)]
    warm_up = 0
    evicting = False
    while not evicting and warm_up < _MOST_WARM_UP:
        warm_up += 1
        _, plans = step(tables, warm_up)
        evicting = all(plan.victim_ids.size for plan in plans)
    for _ in range(args.warm_up):
        warm_up += 1
        step(tables, warm_up)
    steps = [step(tables, warm_up + number) for number in range(1, args.batches + 1)]
    plans = [plan for _, parts in steps for plan in parts]
    return Measured(
        [seconds for seconds, _ in steps],
        sum(plan.lookups for plan in plans),
        sum(plan.hits for plan in plans),
        sum(np.unique(slots).size for plan in plans for slots in plan.slots),
        sum(plan.fill_ids.size for plan in plans),
        sum(plan.victim_ids.size for plan in plans),
        sum((plan.past, plan.future) != (modules[0].PAST, modules[0].FUTURE) for plan in plans),
        warm_up,
    )


def step(tables: list[Table], batch: int) -> tuple[float, list[Any]]:
    """Plan one batch for all tables. Returns the seconds that it took, and the plans."""
    start = time.perf_counter()
    plans = [table.plan(batch) for table in tables]
    seconds = time.perf_counter() - start
    for table in tables:
        table.advance()
    return seconds, plans


def show(args: argparse.Namespace, results: dict[str, Measured]) -> None:
    print(
        f"{args.tables} tables of {args.rows:,} rows, {args.ids:,} ids each in a batch, "
        f"{args.num_slots:,} slots each, {args.replacement}, {args.batches} batches"
    )
    header = ["locality", "ms", "lowest", "distinct", "fills", "evictions", "hit rate"]
    header += ["shortened", "warm-up"]
    rows = [
        [
            f"{name} ({scratchpipe_ids.EXPONENTS[name]})",
            f"{1e3 * statistics.median(result.seconds):.1f}",
            f"{1e3 * min(result.seconds):.1f}",
            f"{result.distinct / args.batches:,.0f}",
            f"{result.fills / args.batches:,.0f}",
            f"{result.evictions / args.batches:,.0f}",
            f"{result.hits / result.lookups:.1%}",
            f"{result.shortened}",
            f"{result.warm_up}",
        ]
        for name, result in results.items()
    ]
    print(harness.table(header, rows))


if __name__ == "__main__":
    main()

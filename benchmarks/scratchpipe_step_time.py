"""How long a training step takes with one large embedding table, in each mode of the layer.

    python benchmarks/scratchpipe_step_time.py
    python benchmarks/scratchpipe_step_time.py --rows 100000 --steps 100 --optimizer adagrad
    python benchmarks/scratchpipe_step_time.py --criteo     # 26 tables, see criteo.py

The model is an embedding whose rows are pooled by sum, Dense(64) and Dense(1), in `model.fit`. The
`host` mode is the best uncached form: the whole table in host memory, a gather, and an update of
the batch's rows only. `keras.layers.Embedding` copies its table in each step. Nothing is compiled
by XLA, which cannot run what is planned on the host.

A step is the time from the end of one batch to the end of the next, waits for data included. It is
measured once the cache evicts, or the warm-up is over if it never will; hit rates are those of Plan
(for `static`: of the hot rows, which were counted on other data). `waited` is for how long the
training waited for Insert, in all measured steps. The second table is the `pipelined` mode with
other numbers of slots. Neither these nor the rows of the table should change the time of its steps,
but for the rows that move: compare lines with about as many fills.

With `--criteo` the model has 26 tables, whose slots are one number that `lookahead` divides. `plan`
is what the Plan stage works for each step, `transfer` Collect, Exchange and Insert, `stall` for how
long training waits; without a pipeline, plans and transfers are a part of the step.
"""

import argparse
import dataclasses
import gc
import os
import statistics
import sys
import time
import warnings
from collections.abc import Sequence

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import criteo
import harness
import keras
import numpy as np
import scratchpipe_ids
import tensorflow as tf

import tf_scratchpipe

KERAS = "keras.layers.Embedding"
CACHED = ("synchronous", "pipelined")
MODES = (KERAS, "host", "static", *CACHED)
SLOTS = (10_000, 100_000, 1_000_000)
_LEAST_WARM_UP = 30
_MOST_WARM_UP = 4_000
_LEAST_STEPS = 4


@dataclasses.dataclass(frozen=True)
class Case:
    """One run of `fit`."""

    rows: int
    slots: int
    mode: str


@dataclasses.dataclass(frozen=True)
class Measured:
    """What one run took."""

    step_seconds: list[float]
    hit_rate: float | None = None
    """None: nothing is cached."""
    fills: float | None = None
    """Rows for each step; likewise evictions."""
    evictions: float | None = None
    waited_seconds: float | None = None
    plan_seconds: float | None = None
    """Of work for each step; likewise transfers, which are Collect, Exchange and Insert."""
    transfer_seconds: float | None = None


class Meter(keras.callbacks.Callback):
    """Takes the time of steps after a warm-up, and ends the training.

    Args:
        layers: The ScratchPipe layers, if there are any.
        evicts: Whether its cache will evict some time.
        steps: Steps to measure.
        seconds: Measure no longer than this, but a few steps.
    """

    def __init__(
        self,
        layers: Sequence[tf_scratchpipe.ScratchPipeEmbedding],
        evicts: bool,
        steps: int,
        seconds: float,
    ) -> None:
        super().__init__()
        self.layers, self.evicts = layers, evicts
        self.steps, self.seconds = steps, seconds
        self.ends: list[float] = []
        self.before = tf_scratchpipe.CacheStats()
        self._began = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        """Note the time."""
        if not self.ends and not self._warm(batch + 1):
            return
        self.ends.append(time.perf_counter())
        if len(self.ends) == 1:
            self.before = self._stats()
        done = len(self.ends) - 1
        late = self.ends[-1] - self.ends[0] > self.seconds and done >= _LEAST_STEPS
        self.model.stop_training = done >= self.steps or late

    def measured(self) -> Measured:
        """What was measured."""
        times = np.diff(self.ends).tolist()
        if not self.layers or self.layers[0].mode not in CACHED:
            return Measured(times)
        after = self._stats().since(self.before)
        work, steps = after.stage_seconds, max(after.batches / len(self.layers), 1)
        return Measured(
            times,
            after.hit_rate,
            after.fills / steps,
            after.evictions / steps,
            after.wait_seconds.get(("train", "insert"), 0.0),
            work["plan"] / steps,
            (work["collect"] + work["exchange"] + work["insert"]) / steps,
        )

    def _warm(self, done: int) -> bool:
        slow = time.perf_counter() - self._began > self.seconds
        if self.evicts and done < _MOST_WARM_UP:
            return done >= _LEAST_WARM_UP and self._stats().evictions > 0
        return done >= _LEAST_WARM_UP or (done >= _LEAST_STEPS and slow)

    def _stats(self) -> tf_scratchpipe.CacheStats:
        """Counts of all layers together; seconds of one, for those of a dataset share them."""
        found = [layer.stats() for layer in self.layers] or [tf_scratchpipe.CacheStats()]
        counts = ("batches", "lookups", "hits", "fills", "evictions")
        totals = {name: sum(getattr(one, name) for one in found) for name in counts}
        if found[0].wait_seconds:
            return dataclasses.replace(found[0], **totals)
        seconds = {k: sum(one.stage_seconds[k] for one in found) for k in found[0].stage_seconds}
        return dataclasses.replace(found[0], **totals, stage_seconds=seconds)


def main() -> None:
    args = options()
    warnings.filterwarnings("ignore", message=".*shuffle=True.*")
    if args.criteo:
        run_criteo(args)
        return
    print(
        f"{args.batch_size} x {args.ids} ids of locality '{args.locality}', dim {args.dim}, "
        f"{args.optimizer}, up to {args.steps} steps, TensorFlow {tf.__version__}, "
        f"{'GPU' if tf.config.list_physical_devices('GPU') else 'CPU'}",
        flush=True,
    )
    cases = [Case(rows, args.slots, mode) for rows in args.rows for mode in MODES]
    largest = max(args.rows)
    swept = [Case(largest, slots, "pipelined") for slots in SLOTS if slots <= largest]
    results: dict[Case, Measured] = {}
    for case in [*cases, *swept]:
        if case not in results:
            print(f"running {case} ...", file=sys.stderr, flush=True)
            results[case] = run(case, args)
    show(cases, results)
    if swept:
        print()
        show(swept, results, baseline=Case(largest, args.slots, "host"))


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--criteo", action="store_true", help="26 tables, see criteo.py")
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 1_000_000, 10_000_000])
    parser.add_argument("--slots", type=int, default=100_000, help="slots; for static, hot rows")
    parser.add_argument("--steps", type=int, default=200, help="steps to measure")
    parser.add_argument("--seconds", type=float, default=8.0, help="measure no longer than this")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--ids", type=int, default=4, help="ids in a sample")
    parser.add_argument("--optimizer", default="sgd", help="sgd, adagrad or adam")
    parser.add_argument("--locality", default="medium", choices=scratchpipe_ids.EXPONENTS)
    return parser.parse_args()


def run(case: Case, args: argparse.Namespace) -> Measured:
    keras.backend.clear_session()
    gc.collect()
    keras.utils.set_random_seed(1)
    hot_ids = count(case, args) if case.mode == "static" else None
    model = build(case, args, hot_ids)
    layer = None if case.mode == KERAS else model.get_layer("table")
    train = data(case, args, seed=0)
    if layer is not None:
        train = train.apply(tf_scratchpipe.lookahead(model))
    evicts = case.mode in CACHED and case.slots < case.rows
    meter = Meter([layer] if layer else [], evicts, args.steps, args.seconds)
    model.fit(train, verbose=0, callbacks=[meter])
    measured = meter.measured()
    if hot_ids is not None:
        return dataclasses.replace(measured, hit_rate=share(case, args, hot_ids))
    return measured


def build(case: Case, args: argparse.Namespace, hot_ids: np.ndarray | None) -> keras.Model:
    # Zeros cost nothing to draw; that they leave the embedding with a gradient is up to gelu.
    ids = keras.Input((args.ids,), dtype="int32")
    if case.mode == KERAS:
        rows = keras.layers.Embedding(case.rows, args.dim, embeddings_initializer="zeros")(ids)
        pooled = keras.ops.sum(rows, axis=1)
    else:
        pooled = tf_scratchpipe.ScratchPipeEmbedding(
            case.rows,
            args.dim,
            num_slots=None if case.mode == "host" else case.slots,
            combiner="sum",
            embeddings_initializer="zeros",
            mode=case.mode,
            hot_ids=hot_ids,
            name="table",
        )(ids)
    hidden = keras.layers.Dense(64, activation="gelu")(pooled)
    model = keras.Model(ids, keras.layers.Dense(1)(hidden))
    model.compile(optimizer=args.optimizer, loss="mse", jit_compile=False)
    return model


def data(case: Case, args: argparse.Namespace, seed: int) -> tf.data.Dataset:
    """Batches without end, of which the training needs fewer than are drawn."""
    batches = _MOST_WARM_UP + 2 * args.steps
    ids = zipf(case, args, seed).draw(batches, args.batch_size, args.ids).astype(np.int32)
    labels = np.random.default_rng(seed).standard_normal((batches, args.batch_size, 1), np.float32)
    return tf.data.Dataset.from_tensor_slices((ids, labels)).repeat()


def count(case: Case, args: argparse.Namespace) -> np.ndarray:
    """The hot rows, from other data than those that are trained on."""
    ids = zipf(case, args, seed=1).draw(4, 1_000_000)
    parts = tf.data.Dataset.from_tensor_slices({"ids": ids})
    return tf_scratchpipe.count_ids(parts, "ids", most=min(case.slots, case.rows))


def share(case: Case, args: argparse.Namespace, hot_ids: np.ndarray) -> float:
    """The part of the training's lookups that the hot rows take."""
    hot = np.zeros(case.rows, bool)
    hot[hot_ids] = True
    return float(hot[zipf(case, args, seed=0).draw(1_000_000)].mean())


def zipf(case: Case, args: argparse.Namespace, seed: int) -> scratchpipe_ids.ZipfIds:
    return scratchpipe_ids.ZipfIds(case.rows, scratchpipe_ids.EXPONENTS[args.locality], seed)


CRITEO_SLOTS, CRITEO_BATCH = 1_000_000, 2048
_CRITEO_BATCHES = 400


def run_criteo(args: argparse.Namespace) -> None:
    rows = sum(criteo.CARDINALITIES)
    print(
        f"{len(criteo.CARDINALITIES)} tables, {rows:,} rows, {CRITEO_SLOTS:,} slots, batch "
        f"{CRITEO_BATCH}, dim {args.dim}, ids of locality '{args.locality}', {args.optimizer}, "
        f"TensorFlow {tf.__version__}",
        flush=True,
    )
    results = {}
    for mode in MODES:
        print(f"running {mode} ...", file=sys.stderr, flush=True)
        results[mode] = measure_criteo(mode, args)
    header = ["mode", "steps/s", "ms", "to keras", "to host"]
    header += ["hit rate", "fills", "plan", "transfer", "stall"]
    print(harness.table(header, [criteo_line(mode, results) for mode in MODES]))


def measure_criteo(mode: str, args: argparse.Namespace) -> Measured:
    keras.backend.clear_session()
    gc.collect()
    keras.utils.set_random_seed(1)
    hot = criteo.hottest(args.locality, CRITEO_SLOTS, seed=1) if mode == "static" else {}

    def embedding(rows: int, name: str) -> keras.Layer:
        settings = {"embeddings_initializer": "zeros", "name": f"table_{name}"}
        if mode == KERAS:
            return keras.layers.Embedding(rows, args.dim, **settings)
        return tf_scratchpipe.ScratchPipeEmbedding(
            rows, args.dim, mode=mode, hot_ids=hot.get(name), **settings
        )

    model = criteo.model(embedding, args.dim)
    model.compile(optimizer=args.optimizer, loss="binary_crossentropy", jit_compile=False)
    train = criteo.data(args.locality, CRITEO_BATCH, _CRITEO_BATCHES, seed=0)
    layers = [one for one in model.layers if isinstance(one, tf_scratchpipe.ScratchPipeEmbedding)]
    if layers:
        train = train.apply(tf_scratchpipe.lookahead(model, num_slots=CRITEO_SLOTS))
    meter = Meter(layers, False, args.steps, 4 * args.seconds)
    model.fit(train, verbose=0, callbacks=[meter])
    return meter.measured()


def criteo_line(mode: str, results: dict[str, Measured]) -> list[str]:
    result = results[mode]
    step = statistics.median(result.step_seconds)
    ratios = [
        f"{step / statistics.median(results[other].step_seconds):.3g}x" for other in (KERAS, "host")
    ]
    stall = result.waited_seconds
    cached = [
        "-" if result.hit_rate is None else f"{result.hit_rate:.1%}",
        "-" if result.fills is None else f"{result.fills:,.0f}",
        "-" if result.plan_seconds is None else f"{1e3 * result.plan_seconds:.1f} ms",
        "-" if result.transfer_seconds is None else f"{1e3 * result.transfer_seconds:.1f} ms",
        "-" if stall is None else f"{1e3 * stall / len(result.step_seconds):.1f} ms",
    ]
    return [mode, f"{1 / step:.3g}", f"{1e3 * step:.1f}", *ratios, *cached]


def show(cases: list[Case], results: dict[Case, Measured], baseline: Case | None = None) -> None:
    header = ["mode", "rows", "slots", "steps", "ms", "mean", "to keras", "to host"]
    header += ["hit rate", "fills", "evictions", "waited"]
    print(harness.table(header, [line(case, results, baseline) for case in cases]))


def line(case: Case, results: dict[Case, Measured], baseline: Case | None) -> list[str]:
    result = results[case]
    slots = baseline.slots if baseline else case.slots
    step = statistics.median(result.step_seconds)
    ratios = [
        f"{step / statistics.median(results[Case(case.rows, slots, mode)].step_seconds):.3g}x"
        for mode in (KERAS, "host")
    ]
    return [
        case.mode,
        f"{case.rows:,}",
        "-" if case.mode in (KERAS, "host") else f"{min(case.slots, case.rows):,}",
        f"{len(result.step_seconds)}",
        f"{1e3 * step:.2f}",
        f"{1e3 * statistics.mean(result.step_seconds):.2f}",
        *ratios,
        "-" if result.hit_rate is None else f"{result.hit_rate:.1%}",
        "-" if result.fills is None else f"{result.fills:,.0f}",
        "-" if result.evictions is None else f"{result.evictions:,.0f}",
        "-" if result.waited_seconds is None else f"{result.waited_seconds:.2f} s",
    ]


if __name__ == "__main__":
    main()

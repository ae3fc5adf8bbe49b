"""Measure one training run in a process of its own: peak bytes from the allocator, seconds a step.

The CPU device is put on the BFC allocator, which also serves GPUs, and steps run on one inter-op
thread: side by side, ops share memory differently in every run.
"""

import dataclasses
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ENVIRONMENT = {
    "TF_CPU_ALLOCATOR_USE_BFC": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "KERAS_BACKEND": "tensorflow",
}
_MARK = "RESULT "
_WARM_UP = 2


@dataclasses.dataclass(frozen=True)
class Result:
    """One training run."""

    peak_bytes: float
    """Median over the steps of the most that was allocated at once, weights included."""
    spread: float
    """(highest - lowest) / median of the steps' peaks."""
    step_seconds: float
    """Median over the steps."""
    first_step_seconds: float
    """From the call of `fit` to the end of the first step: tracing, planning, one step."""
    plan_seconds: float
    """Of these, planning and rewriting."""
    predicted_bytes: float
    loss: float
    forward_ops: int


def run_child(script: str, arguments: Sequence[str]) -> Result:
    """Runs `script --child ...` in a fresh process and returns what it measured."""
    command = [sys.executable, script, "--child", *arguments]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if done.returncode or not lines:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
    return Result(**json.loads(lines[-1].removeprefix(_MARK)))


def report_child(result: Result) -> None:
    """What a child process prints for `run_child`."""
    print(_MARK + json.dumps(dataclasses.asdict(result)))


def train(workload: object, policy: str, optimizer: str = "sgd", told_batch: bool = True) -> Result:
    """Trains a workload for its steps and measures it. Call in a child process only.

    Args:
        workload: a `workloads.Workload`.
        policy: a policy of `EchoOptimizer`, or "plain" for the bare optimizer.
        optimizer: name of the inner optimizer.
        told_batch: whether the data fix the batch size.
    """
    import time

    import keras
    import tensorflow as tf

    import tf_echo
    from tf_echo import passes, rewriter

    spent = {"plan": 0.0}
    for module, name in ((passes, "plan_step"), (rewriter, "rewrite")):
        setattr(module, name, _timed(getattr(module, name), spent))

    class Meter(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.peaks: list[int] = []
            self.times: list[float] = []
            self.first_end = 0.0

        def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
            tf.config.experimental.reset_memory_stats(device)
            self.start = time.perf_counter()

        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            self.end = time.perf_counter()
            self.first_end = self.end if not self.times else self.first_end
            self.times.append(self.end - self.start)
            self.peaks.append(tf.config.experimental.get_memory_info(device)["peak"])

    device = "GPU:0" if tf.config.list_physical_devices("GPU") else "CPU:0"
    keras.utils.set_random_seed(1)
    model = workload.build()
    inner = keras.optimizers.get(optimizer)
    chosen = inner if policy == "plain" else tf_echo.EchoOptimizer(inner, policy=policy)
    model.compile(optimizer=chosen, loss=workload.loss, jit_compile=False)
    data = tf.data.Dataset.from_tensors((workload.x, workload.y)).repeat()
    if not told_batch:
        data = data.unbatch().batch(len(workload.x))
    meter = Meter()
    start = time.perf_counter()
    history = model.fit(data, steps_per_epoch=workload.steps, verbose=0, callbacks=[meter])
    first = meter.first_end - start
    peaks, times = meter.peaks[_WARM_UP:] or meter.peaks, meter.times[_WARM_UP:] or meter.times
    median = statistics.median(peaks)
    plan = getattr(chosen, "plan", None)
    return Result(
        median,
        (max(peaks) - min(peaks)) / median,
        statistics.median(times),
        first,
        spent["plan"],
        plan.after.total_bytes if plan else 0.0,
        history.history["loss"][-1],
        _forward_ops(model, workload) if policy == "plain" else 0,
    )


def _timed(function: object, spent: dict[str, float]) -> object:
    import time

    def timed(*args: object, **kwargs: object) -> object:
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            spent["plan"] += time.perf_counter() - start

    return timed


def _forward_ops(model: object, workload: object) -> int:
    """How many ops the forward pass is traced to."""
    import tensorflow as tf

    forward = tf.function(lambda x: model(x, training=True), autograph=False)
    spec = tf.TensorSpec(workload.x.shape, workload.x.dtype)
    return len(forward.get_concrete_function(spec).graph.get_operations())


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of text, the first one to the left."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "  ".join(
            c.ljust(w) if i == 0 else c.rjust(w)
            for i, (c, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def ratio(over: float, under: float) -> str:
    """`over / under` for a table."""
    return f"{over / under:.2f}x"


def mib(count: float) -> str:
    """Bytes for a table."""
    return f"{count / 2**20:,.0f}"


def write_json(path: str | None, results: Mapping[str, Mapping[str, Result]]) -> None:
    """Writes all results where asked for."""
    if path:
        plain = {k: {p: dataclasses.asdict(r) for p, r in v.items()} for k, v in results.items()}
        Path(path).write_text(json.dumps(plain, indent=1))

"""Measure one training run in a process of its own: peak bytes from the allocator, seconds a step.

The CPU device is put on the BFC allocator, which also serves GPUs, and steps run on one inter-op
thread: side by side, ops share memory differently in every run. oneDNN is off, unless
TF_ENABLE_ONEDNN_OPTS says otherwise. Under XLA a step is one allocation, rounded up by far; its
size is read from what the compiler says.
"""

import contextlib
import dataclasses
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "TF_CPU_ALLOCATOR_USE_BFC": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "KERAS_BACKEND": "tensorflow",
}
# By default it depends on the processor. Given by the caller, it stays.
KERNELS = {"TF_ENABLE_ONEDNN_OPTS": "0"}
_MARK = "RESULT "
_WARM_UP = 2


@dataclasses.dataclass(frozen=True)
class Result:
    """One training run."""

    peak_bytes: float
    """Median over the steps of the most that was allocated at once, weights included."""
    spread: float
    """(highest - lowest) / median of the steps' peaks, or of the peaks of several runs."""
    requested_bytes: float
    """The same peak by what variables and one step asked for, where the allocator hands out up to
    twice that; 0 under XLA."""
    step_seconds: float
    """Median over the steps."""
    first_step_seconds: float
    """From the call of `fit` to the end of the first step: tracing, planning, one step."""
    plan_seconds: float
    """Of these, planning and rewriting."""
    predicted_bytes: float
    loss: float
    forward_ops: int
    largest: Sequence[str] = ()
    """Of the memory at the peak the largest parts, a line each."""

    @property
    def prediction_error(self) -> float:
        """Relative to what was asked for; to the peak under XLA."""
        return self.predicted_bytes / (self.requested_bytes or self.peak_bytes) - 1.0


class ChildError(RuntimeError):
    """A run that did not end well; `stderr` is what it wrote."""

    def __init__(self, command: Sequence[str], stdout: str, stderr: str):
        super().__init__(f"{' '.join(command)} failed:\n{stdout}\n{stderr}")
        self.stderr = stderr

    @property
    def reason(self) -> str:
        """The first line of the last exception; what Keras prints in bold is what it wraps."""
        bold = re.findall(r"\x1b\[1m(.*?)(?:\n|\x1b)", self.stderr)
        errors = re.findall(r"^(?:\w+\.)*(\w+(?:Error|Exception): .*)", self.stderr, re.MULTILINE)
        lines = bold or errors or self.stderr.strip().splitlines() or ["aborted"]
        return lines[-1]


def median(results: Sequence[Result]) -> Result:
    """Of runs of the same, number by number; the spread is between runs if there are several."""
    if len(results) == 1:
        return results[0]
    peaks = [result.peak_bytes for result in results]
    medians = {
        field.name: statistics.median(getattr(result, field.name) for result in results)
        for field in dataclasses.fields(Result)
        if field.name not in ("spread", "loss", "largest")
    }
    spread = (max(peaks) - min(peaks)) / statistics.median(peaks)
    return dataclasses.replace(results[-1], **medians, spread=spread)


def run_child(
    script: str,
    arguments: Sequence[str],
    xla: bool = False,
    environment: Mapping[str, str] | None = None,
) -> Result:
    """Runs `script --child ...` in a fresh process and returns what it measured.

    Args:
        script: path of the script, which calls `report_child`.
        arguments: what follows `--child`.
        xla: whether the train step is compiled, so that the compiler says how large it is.
        environment: more environment variables.

    Raises:
        ChildError: the process failed.
    """
    command = [sys.executable, script, "--child", *arguments]
    full = {
        **KERNELS,
        **os.environ,
        **ENVIRONMENT,
        **(environment or {}),
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    with tempfile.TemporaryDirectory() as dump:
        if xla:
            full["XLA_FLAGS"] = f"--xla_dump_to={dump} --xla_dump_hlo_as_text"
        done = subprocess.run(command, env=full, capture_output=True, text=True, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
        if done.returncode or not lines:
            raise ChildError(command, done.stdout, done.stderr)
        result = Result(**json.loads(lines[-1].removeprefix(_MARK)))
        return _as_compiled(result, Path(dump)) if xla else result


def _as_compiled(result: Result, dump: Path) -> Result:
    """The result with the peak of the largest module that XLA compiled."""
    reports = [path.read_text() for path in dump.glob("*memory-usage-report.txt")]
    sizes = [int(re.search(r"Total bytes used: (\d+)", report)[1]) for report in reports]
    if not sizes:
        raise RuntimeError("XLA compiled nothing.")
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    # Of each value in the step's one large allocation: sum so far, size, offset, count, shapes.
    rows = re.findall(r"^\s+\S+\(.*?%\); +(\S+); +\d+; +\d+; (.*)$", reports[largest], re.MULTILINE)
    parts = [f"{size}  {shapes}" for size, shapes in rows] if result.largest else []
    return dataclasses.replace(
        result, peak_bytes=sizes[largest], spread=0.0, largest=parts[: len(result.largest)]
    )


def report_child(result: Result) -> None:
    """What a child process prints for `run_child`."""
    print(_MARK + json.dumps(dataclasses.asdict(result)))


def train(
    workload: object,
    policy: str,
    optimizer: str = "sgd",
    told_batch: bool = True,
    xla: bool = False,
    largest: int = 0,
) -> Result:
    """Trains a workload for its steps and measures it. Call in a child process only.

    Args:
        workload: a `workloads.Workload`.
        policy: a policy of `EchoOptimizer`, perhaps followed by " without " and parts of it, with
            commas between; the name of a rival; or "plain" for the bare optimizer.
        optimizer: name of the inner optimizer.
        told_batch: whether the data fix the batch size.
        xla: whether the step is compiled.
        largest: how many parts of the predicted peak to list.
    """
    import keras
    import rivals
    import tensorflow as tf
    from requested import Requests

    import tf_echo
    from tf_echo import passes, planner

    planned, carried_out = _Recorder(passes.plan_step), _Recorder(passes.carry_out)
    passes.plan_step, passes.carry_out = planned, carried_out

    class Meter(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.peaks: list[int] = []
            self.times: list[float] = []
            self.first_end, self.loss = 0.0, 0.0

        def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
            if batch == workload.steps:
                profile.enter_context(requests.recorded())
            tf.config.experimental.reset_memory_stats(device)
            self.start = time.perf_counter()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == workload.steps:
                profile.close()
                requests.forget_surplus([*self.model.variables, *self.model.optimizer.variables])
                return
            # What `fit` returns is not the loss where the model has a `train_step` of its own.
            self.loss = logs["loss"]
            self.end = time.perf_counter()
            self.first_end = self.end if not self.times else self.first_end
            self.times.append(self.end - self.start)
            self.peaks.append(tf.config.experimental.get_memory_info(device)["peak"])

    device = "GPU:0" if tf.config.list_physical_devices("GPU") else "CPU:0"
    keras.utils.set_random_seed(1)
    model = rivals.RIVALS[policy](workload) if policy in rivals.RIVALS else workload.build()
    inner = workload.optimizer() if workload.optimizer else keras.optimizers.get(optimizer)
    name, _, part = policy.partition(" without ")
    without = tuple(filter(None, part.split(",")))
    echo = name in planner.POLICIES
    chosen = tf_echo.EchoOptimizer(inner, policy=name, without=without) if echo else inner
    weights = workload.loss_weights
    model.compile(optimizer=chosen, loss=workload.loss, loss_weights=weights, jit_compile=xla)
    data = tf.data.Dataset.from_tensors(workload.data).repeat()
    if not told_batch:
        data = data.unbatch().batch(workload.batch)
    meter, requests = Meter(), Requests(on_gpu=device.startswith("GPU"))
    profile = contextlib.ExitStack()
    steps = workload.steps + (not xla)  # the one more is profiled
    start = time.perf_counter()
    model.fit(data, steps_per_epoch=steps, verbose=0, callbacks=[meter])
    first = meter.first_end - start
    peaks, times = meter.peaks[_WARM_UP:] or meter.peaks, meter.times[_WARM_UP:] or meter.times
    median = statistics.median(peaks)
    # With several optimizers in one step, the last plan is that of the whole step.
    plan = carried_out.result.result() if carried_out.result else None
    return Result(
        median,
        (max(peaks) - min(peaks)) / median,
        requests.peak_bytes,
        statistics.median(times),
        first,
        planned.seconds + carried_out.seconds,
        plan.after.total_bytes if plan else 0.0,
        float(meter.loss),
        _forward_ops(model, workload) if policy == "plain" else 0,
        _largest(planned.result[0], plan, largest) if largest and plan else [],
    )


class _Recorder:
    """A function that notes the time it takes and what it returned last."""

    def __init__(self, function: Callable[..., Any]):
        self.function, self.seconds, self.result = function, 0.0, None

    def __call__(self, *args: object, **kwargs: object) -> object:
        start = time.perf_counter()
        try:
            self.result = self.function(*args, **kwargs)
        finally:
            self.seconds += time.perf_counter() - start
        return self.result


def _largest(trace: Any, plan: Any, count: int) -> list[str]:
    """The largest tensors at the predicted peak of a planned step."""
    from tf_echo import memory_model, passes, tracing

    rewired = passes.carried_out(trace.view, plan)
    view = tracing.in_known_order(rewired.view, tracing.order_question(trace)())
    scale = plan.batch_size / trace.view.batch_size if plan.batch_size else 1.0
    timeline = memory_model.simulate(view, scale)
    labels = _labels(trace.view)
    lines = [f"{mib(timeline.resident_bytes)} MiB  variables and inputs"]
    for tensor in timeline.live_at(timeline.peak_step)[:count]:
        name = labels.get(rewired.originals[tensor], rewired.view.tensor_name(tensor))
        lines.append(f"{mib(timeline.sizes[tensor])} MiB  {name}")
    return lines


def _labels(view: Any) -> dict[int, str]:
    """What the tensors are that stand for what loops keep and need."""
    found = {}
    for loop in view.loops:
        forward, backward = (view.nodes[n].name for n in (loop.forward, loop.backward))
        found.update(dict.fromkeys(loop.kept, f"kept for the gradient of {forward}"))
        found.update(dict.fromkeys(loop.forward_work, f"an iteration of {forward}"))
        found.update(dict.fromkeys(loop.backward_work, f"an iteration of {backward}"))
    return found


def _forward_ops(model: object, workload: object) -> int:
    """How many ops the forward pass is traced to."""
    import tensorflow as tf

    forward = tf.function(lambda x: model(x, training=True), autograph=False)
    spec = tf.nest.map_structure(lambda x: tf.TensorSpec(x.shape, x.dtype), workload.x)
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

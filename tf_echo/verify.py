"""A train step with and without Echo, side by side, on a user's own model."""

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_echo import passes, tracing
from tf_echo.explain import (
    batch_spec,
    check_model,
    differentiate,
    probe_settings,
    trained_by,
)
from tf_echo.optimizer import EchoOptimizer
from tf_echo.plan import RecomputePlan, format_bytes

_LISTED = 5
_HOW_TO_TELL = (
    "The device does not tell its peak. A GPU does; for a CPU set TF_CPU_ALLOCATOR_USE_BFC=1 in "
    "the environment before TensorFlow is imported."
)


@dataclasses.dataclass(frozen=True)
class Verification:
    """What `verify` found."""

    plan: RecomputePlan
    """What was recomputed."""
    differences: Mapping[str, float]
    """How far the loss, each gradient and each variable after the step are from those of the
    untouched step, as a part of the largest element of each; 0 where they are equal bit by bit."""
    peak_before: int | None
    """Measured peak of the untouched step in bytes; None where the device does not tell."""
    peak_after: int | None
    """The same with Echo."""

    @property
    def bit_equal(self) -> bool:
        """Whether everything is equal bit by bit."""
        return not any(self.differences.values())

    @property
    def largest_difference(self) -> float:
        """The largest of `differences`."""
        return max(self.differences.values(), default=0.0)

    def __str__(self) -> str:
        if self.bit_equal:
            lines = [f"All {len(self.differences)} values compared are equal bit by bit."]
        else:
            apart = sorted(((d, name) for name, d in self.differences.items() if d), reverse=True)
            lines = [f"{len(apart)} of {len(self.differences)} values compared differ:"]
            lines += [f"  {name}: {d:.2g} of its largest element" for d, name in apart[:_LISTED]]
        predicted = [self.plan.before.total_bytes, self.plan.after.total_bytes]
        lines.append("Predicted peak: {} -> {}".format(*map(format_bytes, predicted)))
        if self.peak_before is None or self.peak_after is None:
            return "\n".join([*lines, _HOW_TO_TELL])
        measured = [self.peak_before, self.peak_after]
        return "\n".join([*lines, "Measured peak: {} -> {}".format(*map(format_bytes, measured))])


def verify(target: keras.Model | Callable[..., tf.Tensor], *args: Any) -> Verification:
    """Runs one train step with and without Echo from the same state, and compares.

    Weights, optimizer state, seeds and metrics are afterwards what they were before. Values are
    compared with Grappler off, whose fusions round differently; peaks are measured with it on.

    Example:

    ```python
    model.compile(optimizer=tf_echo.EchoOptimizer("adam"), loss="mse")
    print(tf_echo.verify(model, x_batch, y_batch))
    ```

    Args:
        target: a compiled and built Keras model, whose optimizer need not be an `EchoOptimizer`; or
            a function of tensors that returns a scalar loss.
        *args: for a model one batch `x, y, sample_weight`, as for `train_on_batch`; for a function
            its arguments.

    Returns:
        Whether loss, gradients and variables are bit-equal or how far apart, and both peaks. Print
        it.

    Raises:
        ValueError: the model is not compiled or not built, or the loss depends on no variable.
        TypeError: `target` is neither a model nor a function.
    """
    if isinstance(target, keras.Model):
        check_model(target, "verified")
        make = _model_step(target, args)
    elif callable(target):
        make = _function_step(target, args)
    else:
        raise TypeError(
            "`target` must be a compiled Keras model or a function that returns a loss. Received: "
            f"{target!r}"
        )
    with _without_grappler():
        plain, echo = (_Step(make, policy, values=True) for policy in ("none", "echo"))
        differences = _differences(plain.run().values, echo.run().values)
    peaks: list[int | None] = [None, None]
    if plain.device is not None:
        steps = [_Step(make, policy, values=False) for policy in ("none", "echo")]
        peaks = [step.run(plain.device).peak for step in steps]
    return Verification(echo.plan, differences, *peaks)


Values = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class _Traceable:
    """A step before it is traced."""

    function: Callable[..., Values]
    arguments: tuple[Any, ...]
    """What it is called with; not captured, so that its graph is that of training."""
    plans: list[Future[RecomputePlan]]
    """Its plan is added here."""
    compiled: bool
    """Whether XLA compiles it."""
    state: list[Any]
    """Variables that it may change, besides those that it reads."""


Make = Callable[[str, bool], _Traceable]
"""A step for a policy, and whether it is to return gradients."""


@dataclasses.dataclass(frozen=True)
class _Outcome:
    values: dict[str, np.ndarray]
    peak: int | None


class _Step:
    """One traced step."""

    def __init__(self, make: Make, policy: str, values: bool):
        made = make(policy, values)
        function = tf.function(made.function, autograph=False, jit_compile=made.compiled)
        concrete = function.get_concrete_function(*made.arguments)
        self._run = functools.partial(concrete, *made.arguments)
        if not made.plans:
            raise ValueError(
                "The step could not be planned: it must tell `EchoOptimizer` the loss, as "
                "`train_step` of a Keras model does, and call `optimizer.apply`."
            )
        self.plan = made.plans[-1].result()
        used = [getattr(v, "value", v) for v in made.state] + list(concrete.graph.variables)
        self._variables = list({id(v): v for v in used}.values())
        self.device = _telling_device(self._variables)

    def run(self, device: str | None = None) -> _Outcome:
        """The values that the step returns and leaves in variables, which are then put back.

        Args:
            device: where to measure the peak.
        """
        before = [variable.numpy() for variable in self._variables]
        try:
            if device is not None:
                self._run()
                tf.config.experimental.reset_memory_stats(device)
            found = {name: _array(value) for name, value in self._run().items()}
            peak = device and int(tf.config.experimental.get_memory_info(device)["peak"])
            names = _told_apart([v.name for v in self._variables])
            pairs = zip(names, self._variables, strict=True)
            found.update((f"{name} after the step", v.numpy()) for name, v in pairs)
        finally:
            for variable, value in zip(self._variables, before, strict=True):
                variable.assign(value)
        return _Outcome(found, peak or None)


class _Recorder(EchoOptimizer):
    """An EchoOptimizer that notes the loss and the gradients that it is given."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        object.__setattr__(self, "recorded", {})

    def scale_loss(self, loss: Any) -> Any:
        """As the inner optimizer does."""
        self.recorded["loss"] = loss
        return super().scale_loss(loss)

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """As the inner optimizer does."""
        grads = list(grads)
        variables = trainable_variables or self._trainable_variables
        self.recorded.update(_by_name(grads, [v.path for v in variables]))
        super().apply(grads, trainable_variables)


def _array(value: Any) -> np.ndarray:
    return np.asarray(value.numpy() if tf.is_tensor(value) else value)


def _told_apart(names: Sequence[str]) -> list[str]:
    """The names, numbered where several are alike."""
    total, seen = collections.Counter(names), collections.Counter[str]()
    found = []
    for name in names:
        seen[name] += 1
        found.append(f"{name} ({seen[name]})" if total[name] > 1 else name)
    return found


def _by_name(gradients: Sequence[Any], names: Sequence[str]) -> Values:
    pairs = zip(gradients, _told_apart(names), strict=True)
    dense = {f"gradient of {n}": tf.convert_to_tensor(g) for g, n in pairs if g is not None}
    return {name: g for name, g in dense.items() if tf.is_symbolic_tensor(g)}


def _model_step(model: keras.Model, args: tuple[Any, ...]) -> Make:
    data = tf.nest.map_structure(_as_tensor, args if len(args) > 1 else args[0])

    def make(policy: str, values: bool) -> _Traceable:
        settings = probe_settings(model.optimizer)
        if policy == "none":
            settings = {key: settings[key] for key in ("inner_optimizer", "loss_scale")}
        if policy == "none" or settings.get("policy", "none") == "none":
            settings["policy"] = policy
        probe = _Recorder(**settings)
        if not probe.built:
            probe.build(model.trainable_variables)

        def step(data: Any) -> Values:
            with trained_by(model, probe):
                logs = model.train_step(data)
            here = tf.compat.v1.get_default_graph()
            noted = {n: t for n, t in probe.recorded.items() if getattr(t, "graph", None) is here}
            return {**(noted if values else {}), **{f"log {n}": v for n, v in logs.items()}}

        state = [*model.variables, *model.metrics_variables, *probe.variables]
        return _Traceable(step, (data,), probe._steps.plans, bool(model.jit_compile), state)

    return make


def _function_step(function: Callable[..., tf.Tensor], args: tuple[Any, ...]) -> Make:
    data = tf.nest.map_structure(_as_tensor, args)

    def make(policy: str, values: bool) -> _Traceable:
        plans: list[Future[RecomputePlan]] = []

        def step(*data: Any) -> Values:
            loss, variables, gradients = differentiate(function, data)
            flat = tracing.flat_gradients(gradients)
            trace, plan = passes.plan_step([loss], flat, passes.Settings(policy))
            plans.append(passes.carry_out(trace, plan))
            names = [f"{number} {v.name}" for number, v in enumerate(variables)]
            found = _by_name(gradients, names)
            if not values:
                # All gradients are needed, as for an update, but not all at once.
                found = {name: tf.reduce_sum(g) for name, g in found.items()}
            return {"loss": loss, **found}

        return _Traceable(step, data, plans, False, [])

    return make


def _as_tensor(value: Any) -> Any:
    """A batch as Keras would feed it."""
    spec = batch_spec(value)
    return (
        value
        if spec is None or not isinstance(spec, tf.TensorSpec)
        else tf.cast(tf.convert_to_tensor(value), spec.dtype)
    )


def _telling_device(variables: Sequence[tf.Variable]) -> str | None:
    """The device of the step, if it tells how much memory it uses."""
    spec = tf.DeviceSpec.from_string(variables[0].device)
    device = f"{spec.device_type}:{spec.device_index}"
    try:
        tf.config.experimental.get_memory_info(device)
    except ValueError:
        return None
    return device


def _differences(values: dict[str, np.ndarray], others: dict[str, np.ndarray]) -> dict[str, float]:
    return {name: _difference(value, others[name]) for name, value in values.items()}


def _difference(value: np.ndarray, other: np.ndarray) -> float:
    if value.dtype.kind not in "fV" or np.array_equal(value, other, equal_nan=True):
        return 0.0 if np.array_equal(value, other) or value.dtype.kind in "fV" else 1.0
    apart = np.abs(value.astype("float64") - other.astype("float64"))
    largest = np.abs(value.astype("float64")).max(initial=0.0)
    return float(np.nan_to_num(apart.max() / max(largest, np.finfo("float64").tiny), nan=np.inf))


@contextlib.contextmanager
def _without_grappler() -> Iterator[None]:
    before = tf.config.optimizer.get_experimental_options().get("disable_meta_optimizer", False)
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": before})

"""Time ops on the device at hand, for a cost model that fits it."""

import time
from collections.abc import Callable

import tensorflow as tf

from tf_echo.cost_model import MeasuredCost

_UNARY = [
    "Relu",
    "Tanh",
    "Sigmoid",
    "Exp",
    "Log",
    "Erf",
    "Erfc",
    "Sqrt",
    "Rsqrt",
    "Square",
    "Neg",
    "Softplus",
    "Elu",
    "Selu",
]
_BINARY = ["AddV2", "Sub", "Mul", "RealDiv", "Maximum", "SquaredDifference"]
_SMALL, _ROWS, _COLUMNS, _REPEATS = 16, 2048, 1024, 5


def measure_costs(device: str | None = None) -> MeasuredCost:
    """Times the ops that are recomputed most often and returns a cost model for the device.

    Takes about a second. Each op is timed on a small tensor, for the overhead, and on one of 8 MiB.

    Args:
        device: a device name such as `"GPU:0"`; the default device if None.

    Returns:
        The measured cost model, for `EchoOptimizer(cost_model=...)`.
    """
    with tf.device(device):
        large = tf.random.stateless_uniform((_ROWS, _COLUMNS), (1, 2)) + 0.5
        small = large[:1, :_SMALL]
        overhead = min(_seconds(lambda: tf.raw_ops.Relu(features=small)) for _ in range(3))
        rates = {
            name: max(_seconds(call(large)) - overhead, 0.0) / (moved * 4 * _ROWS * _COLUMNS)
            for name, call, moved in _calls()
        }
    return MeasuredCost(rates, overhead)


def _calls() -> list[tuple[str, Callable[[tf.Tensor], Callable[[], object]], float]]:
    """Op type, a function that binds it to a tensor, and how many times the tensor's bytes it
    moves.
    """
    calls: list[tuple[str, Callable[[tf.Tensor], Callable[[], object]], float]] = []
    for name in _UNARY:
        argument = "features" if name in ("Relu", "Softplus", "Elu", "Selu") else "x"
        calls.append((name, _bind(getattr(tf.raw_ops, name), argument), 2.0))
    for name in _BINARY:
        calls.append((name, _bind(getattr(tf.raw_ops, name), "x", "y"), 3.0))
    calls.append(("Softmax", _bind(tf.raw_ops.Softmax, "logits"), 2.0))
    calls.append(("Mean", lambda t: lambda: tf.raw_ops.Mean(input=t, axis=[-1]), 1.0))
    calls.append(("Sum", lambda t: lambda: tf.raw_ops.Sum(input=t, axis=[-1]), 1.0))
    calls.append(("Transpose", lambda t: lambda: tf.raw_ops.Transpose(x=t, perm=[1, 0]), 2.0))
    return calls


def _bind(op: Callable[..., object], *names: str) -> Callable[[tf.Tensor], Callable[[], object]]:
    return lambda tensor: lambda: op(**dict.fromkeys(names, tensor))


def _seconds(call: Callable[[], object]) -> float:
    """The shortest of a few runs."""
    best = float("inf")
    for _ in range(_REPEATS):
        start = time.perf_counter()
        tf.nest.map_structure(lambda t: t.numpy(), call())
        best = min(best, time.perf_counter() - start)
    return best
